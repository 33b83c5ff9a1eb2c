"""Whole episodes out of what a simulator reports and is answered, in the columns of `episodes`.

n rows of one report. Reports are kept as they come and sorted by agent only when the episodes are taken out.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.demonstrations.episodes import Arrays, Recording
from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Decisions, Ends
from sparring.pipeline.specs import BehaviorId, BehaviorSpec

Ids = NDArray[np.int64]

_SLACK: Final = 1e-3
"""What rounding may add to an action at the end of its range."""


class ByAgent:
    """One value for each of some agents, found by their ids without a loop over them.

    Args:
        like: [0, ...] dtype and shape of the values.
    """

    def __init__(self, like: NDArray[Any]) -> None:
        self._ids: Ids = np.empty(0, np.int64)
        self._values = like

    def find(self, ids: Ids) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """[n, ...] value of each id, zeros where it has none; [n] whether it has one."""
        found = np.zeros((len(ids), *self._values.shape[1:]), self._values.dtype)
        at = np.searchsorted(self._ids, ids)
        known = at < len(self._ids)
        known[known] = self._ids[at[known]] == ids[known]
        found[known] = self._values[at[known]]
        return found, known

    def put(self, ids: Ids, values: NDArray[Any]) -> None:
        """Gives each of `ids`, all different, its value, whether it had one or not."""
        self.remove(ids)
        every = np.concatenate([self._ids, ids])
        order = np.argsort(every)
        self._ids, self._values = every[order], np.concatenate([self._values, values])[order]

    def remove(self, ids: Ids) -> None:
        """Forgets `ids`."""
        kept = ~np.isin(self._ids, ids)
        self._ids, self._values = self._ids[kept], self._values[kept]


class Tape:
    """The first episodes of one behavior name of one simulator, in the order of their starts.

    To take those that end first would favour short ones. An agent's reward belongs to the action of its decision
    before; where a report says what the agent did since then, that is recorded, not what it was told.

    Args:
        behavior: name.
        spec: of it.
        wanted: how many episodes; 0 for all.
        simulator: number of it.

    Attributes:
        begun: lives so far, wanted or not.
        episodes: of the wanted episodes, those that have ended.
        unreported: outcomes that came without what the agent did, because it did as it was told.
    """

    def __init__(self, behavior: str, spec: BehaviorSpec, wanted: int = 0, simulator: int = 0) -> None:
        self.behavior = behavior
        self.begun = 0
        self.episodes = 0
        self.unreported = 0
        self._spec = spec
        self._wanted = wanted
        self._last = wanted or np.iinfo(np.int64).max
        self._simulator = simulator
        self._living: dict[int, ByAgent] = {}
        self._chunks: list[Arrays] = [self._zeros(0)]
        self._asked: dict[str, tuple[Ids, NDArray[np.bool_], Arrays]] = {}
        self._masked = False

    @property
    def complete(self) -> bool:
        """Whether all that are wanted have ended."""
        return self.episodes == self._wanted > 0

    @property
    def unfinished(self) -> int:
        """Wanted episodes that have begun and not ended; the recording is without them."""
        return min(self.begun, self._last) - self.episodes

    def report(self, report: BehaviorReport) -> None:
        """Takes in a report that was checked against the spec.

        Raises:
            RemoteProtocolError: the end of an agent that has not decided, or an action beyond [-1, 1].
        """
        team = BehaviorId.parse(report.behavior).team
        living = self._living.setdefault(team, ByAgent(np.empty(0, np.int64)))
        self._asked.pop(report.behavior, None)
        if report.ends is not None and len(report.ends.agents):
            self._end(report.behavior, report.ends, living, team)
        if report.decisions is not None and len(report.decisions.agents):
            self._decide(report.behavior, report.decisions, living, team)

    def answer(self, actions: BehaviorActions) -> None:
        """Takes in the answer to the last report of a behavior id.

        Raises:
            ValueError: it is not for the agents of that report.
        """
        agents, kept, chunk = self._asked.pop(actions.behavior)
        if not np.array_equal(agents, actions.agents):
            raise ValueError(f"actions for {actions.agents}, asked for by {agents} of {actions.behavior}")
        chunk["continuous"], chunk["discrete"] = actions.continuous[kept], actions.discrete[kept]

    def recording(self) -> Recording:
        """The wanted episodes that have ended."""
        rows = {name: np.concatenate([chunk[name] for chunk in self._chunks]) for name in self._chunks[0]}
        order = np.argsort(rows["life"], kind="stable")
        order = order[np.isin(rows["life"], rows["life"][rows["over"]])[order]]  # without those that have not ended
        over = rows["over"][order]
        at, last = np.flatnonzero(~over), np.flatnonzero(over)
        steps, outcomes = order[at], order[at + 1]  # a step is followed by the next one of its life, or by its end
        columns = self._per_episode(rows, order, last)
        for name in ("continuous", "discrete"):
            did = rows[f"says_{name}"][outcomes][:, None]
            columns[name] = np.where(did, rows[f"did_{name}"][outcomes], rows[name][steps])
        for number in range(len(self._spec.observations)):
            column = rows[f"observation.{number}"]
            columns |= {f"observation.{number}": column[steps], f"final_observation.{number}": column[order[last]]}
        if self._masked:
            columns["masks"] = rows["masks"][steps]
        columns |= {name: rows[name][outcomes] for name in ("rewards", "group_rewards")}
        return Recording(behavior=self.behavior, spec=self._spec, columns=columns)

    def _per_episode(self, rows: Arrays, order: Ids, last: Ids) -> Arrays:
        """Columns with one row for each episode, whose ends stand at `last` in `order`."""
        ends = order[last]
        return {
            "lengths": (np.diff(last, prepend=-1) - 1).astype(np.int32),
            "agents": rows["life"][ends],
            "teams": rows["team"][ends],
            "simulators": np.full(len(ends), self._simulator, np.int32),
            "groups": rows["group"][order[last - 1]],
            "terminated": rows["terminated"][ends],
        }

    def _end(self, behavior: str, ends: Ends, living: ByAgent, team: int) -> None:
        agent_episodes, known = living.find(ends.agents)
        if not known.all():
            raise RemoteProtocolError(
                "unknown_agent",
                got=f"the end of agent {ends.agents[~known][0]} of {behavior}",
                expected="the end of an agent that has decided before",
                remedy="report an agent's first decision before its end",
            )
        living.remove(ends.agents)
        chunk, kept = self._append(behavior, ends, agent_episodes, known, team)
        chunk |= {"over": np.ones(len(chunk["life"]), np.bool_), "terminated": ~ends.interrupted[kept]}
        self.episodes += len(chunk["life"])

    def _decide(self, behavior: str, decisions: Decisions, living: ByAgent, team: int) -> None:
        agent_episodes, known = living.find(decisions.agents)
        if not known.all():
            agent_episodes[~known] = self.begun + 1 + np.arange(np.count_nonzero(~known))
            self.begun += int(np.count_nonzero(~known))
            living.put(decisions.agents[~known], agent_episodes[~known])
        chunk, kept = self._append(behavior, decisions, agent_episodes, known, team)
        if decisions.groups is not None:
            chunk["group"] = decisions.groups[kept]
        if decisions.masks is not None:
            chunk["masks"] = decisions.masks[kept]
            self._masked |= bool(chunk["masks"].any())
        self._asked[behavior] = decisions.agents, kept, chunk

    def _append(
        self, behavior: str, rows: Decisions | Ends, agent_episodes: Ids, known: NDArray[np.bool_], team: int
    ) -> tuple[Arrays, NDArray[np.bool_]]:
        """Keeps the rows of wanted lives; returns them, and which they are. `known` have decided before."""
        self._check_range(behavior, rows, known)
        if self._missing(rows):
            self.unreported += int(np.count_nonzero(known))
        kept = agent_episodes <= self._last
        chunk = self._zeros(int(np.count_nonzero(kept))) | {"life": agent_episodes[kept], "rewards": rows.rewards[kept]}
        chunk["team"][:] = team
        if rows.group_rewards is not None:
            chunk["group_rewards"] = rows.group_rewards[kept]
        for number, column in enumerate(rows.observations):
            chunk[f"observation.{number}"] = column[kept]
        for name, did in (("continuous", rows.did_continuous), ("discrete", rows.did_discrete)):
            if did is not None:
                chunk[f"did_{name}"] = np.clip(did[kept], -1, 1) if name == "continuous" else did[kept]
                chunk[f"says_{name}"][:] = True
        self._chunks.append(chunk)
        return chunk, kept

    def _missing(self, rows: Decisions | Ends) -> bool:
        """Whether some of what the agents did is not said."""
        actions = self._spec.actions
        return (rows.did_continuous is None and actions.continuous > 0) or (
            rows.did_discrete is None and bool(actions.discrete)
        )

    def _check_range(self, behavior: str, rows: Decisions | Ends, known: NDArray[np.bool_]) -> None:
        if rows.did_continuous is None:
            return
        beyond = known & (np.abs(rows.did_continuous) > 1 + _SLACK).any(axis=1)
        if beyond.any():
            raise RemoteProtocolError(
                "shape",
                got=f"did_continuous {rows.did_continuous[beyond][0]} of agent {rows.agents[beyond][0]} of {behavior}",
                expected="numbers in [-1, 1]",
                remedy="say what the agent did as the action that it would have been told",
            )

    def _zeros(self, n: int) -> Arrays:
        """Rows in which nothing happened."""
        actions = self._spec.actions
        rows: Arrays = {name: np.zeros(n, np.int64) for name in ("life", "group")}
        rows |= {name: np.zeros(n, np.bool_) for name in ("over", "terminated", "says_continuous", "says_discrete")}
        rows |= {name: np.zeros(n, np.float32) for name in ("rewards", "group_rewards")}
        rows |= {name: np.zeros((n, actions.continuous), np.float32) for name in ("continuous", "did_continuous")}
        rows |= {name: np.zeros((n, len(actions.discrete)), np.int32) for name in ("discrete", "did_discrete")}
        rows |= {"team": np.zeros(n, np.int32), "masks": np.zeros((n, actions.mask_size), np.bool_)}
        for number, one in enumerate(self._spec.observations):
            rows[f"observation.{number}"] = np.zeros((n, *one.shape), one.dtype)
        return rows
