"""Logs the decisions of open and unsent segments in columns: a row per decision, in the order of arrival.

A row is written in three parts: the agent's observations, its action, and the outcome. Segments are lists
of row numbers, so a step of all agents is written as it arrives and copied once more when it is sent. When
the log is full, rows that no segment needs are dropped, and the others move to its front.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.steps import ActionsChosen
from sparring.pipeline.specs import Array

RowNumbers = NDArray[np.int64]
"""Row numbers in the log."""

_FIRST_ROWS: Final = 256


class StepLog:
    """Holds columns of `capacity` rows, of which the first `size` are in use.

    Attributes:
        size: rows in use.
        capacity: rows allocated.
        observations: one [rows, *shape] per observation; empty before the first decision.
        rewards: [rows] the agent's own reward.
        group_rewards: [rows] the group's reward.
        log_probs: [rows] log-probability of the joint action.
        versions: [rows] policy version that acted.
        continuous: [rows, continuous actions] raw sample.
        discrete: [rows, branches] chosen index.
        masks: [rows, choices of all branches] True = forbidden; None before the first mask.
        carried: [rows, numbers] numbers that the agent carried to the decision; None if its network uses none.
        times: [rows] group timestep of the decision, for groups.
    """

    def __init__(self) -> None:
        self.size = 0
        self.capacity = _FIRST_ROWS
        self.observations: list[Array] = []
        self.rewards: NDArray[np.float32] = np.zeros(_FIRST_ROWS, np.float32)
        self.group_rewards: NDArray[np.float32] = np.zeros(_FIRST_ROWS, np.float32)
        self.log_probs: NDArray[np.float32] = np.zeros(_FIRST_ROWS, np.float32)
        self.versions: NDArray[np.int64] = np.zeros(_FIRST_ROWS, np.int64)
        self.continuous: NDArray[np.float32] = np.zeros((_FIRST_ROWS, 0), np.float32)
        self.discrete: NDArray[np.int32] = np.zeros((_FIRST_ROWS, 0), np.int32)
        self.masks: NDArray[np.bool_] | None = None
        self.carried: NDArray[np.float32] | None = None
        self.times: NDArray[np.int32] = np.zeros(_FIRST_ROWS, np.int32)

    def add(self, observations: tuple[Array, ...]) -> int:
        """Writes the observations of agents, for which enough rows must be free.

        Returns:
            The first of the new rows, which are consecutive.
        """
        if not self.observations:
            self.observations = [np.zeros((self.capacity, *c.shape[1:]), c.dtype) for c in observations]
        first = self.size
        self.size += len(observations[0])
        for held, column in zip(self.observations, observations, strict=True):
            held[first : self.size] = column
        return first

    def act(self, rows: RowNumbers | slice, acted: ActionsChosen, part: RowNumbers | slice) -> None:
        """Writes the actions of agents.

        Args:
            rows: rows in the log.
            acted: record with the actions.
            part: rows of `acted`.
        """
        self.log_probs[rows] = acted.log_probs[part]
        self.versions[rows] = acted.versions[part]
        if acted.continuous is not None:
            self.continuous = self._of_width(self.continuous, acted.continuous)
            self.continuous[rows] = acted.continuous[part]
        if acted.discrete is not None:
            self.discrete = self._of_width(self.discrete, acted.discrete)
            self.discrete[rows] = acted.discrete[part]
        if acted.masks is not None:
            if self.masks is None:
                self.masks = np.zeros((self.capacity, acted.masks.shape[1]), bool)
            self.masks[rows] = acted.masks[part]
        elif self.masks is not None:
            self.masks[rows] = False
        if acted.carried is not None:
            if self.carried is None:
                self.carried = np.zeros((self.capacity, acted.carried.shape[1]), np.float32)
            self.carried[rows] = acted.carried[part]

    def keep(self, needed: NDArray[np.bool_], more: int) -> RowNumbers:
        """Drops all rows but those needed, and grows if that frees too few.

        Args:
            needed: [size] whether each row is kept.
            more: number of rows that must fit afterwards.

        Returns:
            [size] new number of each row that is kept.
        """
        kept = np.flatnonzero(needed)
        capacity = self.capacity
        while capacity < 2 * (len(kept) + more):  # at least half is free, so that rows are not moved again soon
            capacity *= 2

        def moved(column: Array) -> Array:
            new = np.zeros((capacity, *column.shape[1:]), column.dtype)
            new[: len(kept)] = column[kept]
            return new

        self.observations = [moved(column) for column in self.observations]
        self.rewards, self.group_rewards = moved(self.rewards), moved(self.group_rewards)
        self.log_probs, self.versions = moved(self.log_probs), moved(self.versions)
        self.continuous, self.discrete = moved(self.continuous), moved(self.discrete)
        self.masks = None if self.masks is None else moved(self.masks)
        self.carried = None if self.carried is None else moved(self.carried)
        self.times = moved(self.times)
        self.size, self.capacity = len(kept), capacity
        numbers: RowNumbers = np.cumsum(needed) - 1
        return numbers

    def _of_width(self, column: Array, like: Array) -> Array:
        """Returns the column, which gets its width when the first actions arrive."""
        if column.shape[1] == like.shape[1]:
            return column
        return np.zeros((self.capacity, like.shape[1]), like.dtype)
