"""Builders of a simulator's records for given agents."""

from __future__ import annotations

import numpy as np

from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends, Step


def step_of(sequence: int, **agents: tuple[int, ...]) -> Step:
    """Returns a Step with decisions of agents by behavior id."""
    reports = [BehaviorReport(behavior=name, decisions=decisions_of(ids)) for name, ids in agents.items()]
    return Step(sequence=sequence, reports=tuple(reports))


def decisions_of(agents: tuple[int, ...], groups: tuple[int, ...] | None = None, reward: float = 0.0) -> Decisions:
    n = len(agents)
    return Decisions(
        agents=np.array(agents, np.int64),
        observations=(np.zeros((n, 1), np.float32), np.zeros((n, 1, 2, 2), np.uint8)),
        rewards=np.full(n, reward, np.float32),
        groups=None if groups is None else np.array(groups, np.int64),
    )


def ends_of(agents: tuple[int, ...], outcomes: tuple[float, ...] | None = None) -> Ends:
    n = len(agents)
    return Ends(
        agents=np.array(agents, np.int64),
        observations=(np.zeros((n, 1), np.float32), np.zeros((n, 1, 2, 2), np.uint8)),
        rewards=np.zeros(n, np.float32),
        interrupted=np.zeros(n, bool),
        outcomes=None if outcomes is None else np.array(outcomes, np.float32),
    )
