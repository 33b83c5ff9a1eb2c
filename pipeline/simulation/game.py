"""Defines the interface of games, and functions that build reports."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from sparring.pipeline.messages.simulator import (
    Adopted,
    BehaviorActions,
    BehaviorReport,
    Bye,
    Decisions,
    Ends,
    Player,
    Statistic,
)
from sparring.pipeline.simulation.connection import Client
from sparring.pipeline.specs import Array, BehaviorSpec

_BYTES: Final = np.dtype(np.uint8)
Observations = Array | Sequence[ArrayLike]


class Game(Protocol):
    """Represents one simulator with any number of agents of one or more behaviors.

    A report may hold an end row and a decision row of the same agent id: the decision is the first of its next episode.
    Reports are read before the game is called again, so a game may reuse its arrays.

    Attributes:
        name: name of the program, for logs.
    """

    name: str

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        """Returns the spec of each behavior id (`Ball?team=0`); called again when a report has a new id."""

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        """Starts new episodes for all agents and returns their first decisions.

        Args:
            parameters: environment parameters by name. Under `run` this is one `Parameters` for the whole conversation:
                a game that keeps it, and reads it when an episode begins, gets a new sample of a sampled parameter, and
                sees a new lesson of a curriculum without a reset. A copy (`dict(parameters)`) keeps its first samples.
            seed: for the random source; None continues the current one.
        """

    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        """Plays on with the actions, by behavior id, row by row in the order of the last reports.

        Returns:
            At most one report per behavior id.
        """

    def close(self) -> None:
        """Frees the game's resources; called once."""


@runtime_checkable
class ScriptedGame(Protocol):
    """Represents a game that can play any agent of a behavior itself; this interface is optional."""

    def scripts(self) -> Mapping[str, Sequence[str]]:
        """Returns the names of the scripts by behavior name; `BehaviorActions.scripts` numbers them from 1."""


@runtime_checkable
class StatisticsGame(Protocol):
    """Represents a game with statistics to show beside the trainer's; this interface is optional."""

    def statistics(self) -> Sequence[Statistic]:
        """Returns the statistics since the last call."""


@runtime_checkable
class DrawnGame(Game, Protocol):
    """Represents a game whose first area can be drawn; this interface is optional.

    Attributes:
        on_end: called with the areas whose episodes are replaced by new ones, while they stand as they ended.
    """

    on_end: Callable[[Sequence[int]], None]

    def scene(self) -> Mapping[str, object]:
        """Returns what does not move, as `docs/page.md` describes it."""

    def frame(self) -> Sequence[Sequence[float]]:
        """Returns x, y and direction (radians, counter-clockwise) of each moving shape of the scene."""


@runtime_checkable
class ScoredGame(DrawnGame, Protocol):
    """Represents a drawn game whose teams have a score during a match; this interface is optional."""

    def score(self) -> Sequence[float]:
        """Returns the points of each team in the first area."""


@runtime_checkable
class PlayerGame(Protocol):
    """Represents a program with a protocol of its own, which a trainer on the same machine may speak itself."""

    def player(self) -> Player:
        """Describes the program for the trainer; the program neither runs nor listens before the answer."""

    def attend(self, adopted: Adopted, trainer: Client) -> Bye:
        """Launches the program, and supervises it until the end, which `trainer.follow` reports.

        Raises: as `follow`, or if the program fails.
        """


def decisions(
    agents: ArrayLike,
    observations: Observations,
    *,
    rewards: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    group_rewards: ArrayLike | None = None,
    masks: ArrayLike | None = None,
    matches: ArrayLike | None = None,
    did_continuous: ArrayLike | None = None,
    did_discrete: ArrayLike | None = None,
) -> Decisions:
    """Returns the decisions of agents that want an action now, with dtypes converted; omitted rewards are 0.

    Args:
        agents: [n] agent ids.
        observations: [n, *shape], or one such array per observation of the spec, in its order.
        rewards: [n] reward since the agent's previous decision.
        groups: [n] group ids, 0 for none.
        group_rewards: [n] reward of the agent's group since the same decision.
        masks: [n, choices of all branches] True = forbidden.
        matches: [n] match ids.
        did_continuous: [n, continuous actions] what the agent did if the simulator decided.
        did_discrete: [n, branches] the same for discrete actions.
    """
    ids = np.asarray(agents, np.int64)
    return Decisions(
        agents=ids,
        observations=_observations(observations),
        rewards=_column(rewards, ids.size, np.float32),
        groups=_optional(groups, np.int64),
        group_rewards=_optional(group_rewards, np.float32),
        masks=_optional(masks, np.bool_),
        matches=_optional(matches, np.int64),
        did_continuous=_optional(did_continuous, np.float32),
        did_discrete=_optional(did_discrete, np.int32),
    )


def ends(
    agents: ArrayLike,
    observations: Observations,
    *,
    rewards: ArrayLike | None = None,
    interrupted: ArrayLike | None = None,
    group_rewards: ArrayLike | None = None,
    outcomes: ArrayLike | None = None,
    matches: ArrayLike | None = None,
    did_continuous: ArrayLike | None = None,
    did_discrete: ArrayLike | None = None,
) -> Ends:
    """Returns the ends of agents whose episode just ended, with dtypes converted; omitted flags and rewards are 0.

    Args:
        agents: [m] agent ids.
        observations: [m, *shape], or one such array per observation: the last of the episode.
        rewards: [m] reward since the agent's previous decision.
        interrupted: [m] True if a limit truncated the episode, False if the task ended.
        group_rewards: [m] reward of the group of the agent's last decision, since that decision.
        outcomes: [m] 1 won, 0.5 drawn, 0 lost.
        matches: [m] match ids.
        did_continuous: [m, continuous actions] what the agent did if the simulator decided.
        did_discrete: [m, branches] the same for discrete actions.
    """
    ids = np.asarray(agents, np.int64)
    return Ends(
        agents=ids,
        observations=_observations(observations),
        rewards=_column(rewards, ids.size, np.float32),
        interrupted=_column(interrupted, ids.size, np.bool_),
        group_rewards=_optional(group_rewards, np.float32),
        outcomes=_optional(outcomes, np.float32),
        matches=_optional(matches, np.int64),
        did_continuous=_optional(did_continuous, np.float32),
        did_discrete=_optional(did_discrete, np.int32),
    )


def _column(values: ArrayLike | None, rows: int, dtype: type[np.generic]) -> Array:
    return np.zeros(rows, dtype) if values is None else np.asarray(values, dtype)


def _optional(values: ArrayLike | None, dtype: type[np.generic]) -> Array | None:
    return None if values is None else np.asarray(values, dtype)


def _observations(observations: Observations) -> tuple[Array, ...]:
    arrays = [observations] if isinstance(observations, np.ndarray) else map(np.asarray, observations)
    return tuple([array if array.dtype == _BYTES else array.astype(np.float32, copy=False) for array in arrays])
