"""This module assembles whole episodes from a simulator's reports and the answers to it, in the columns of `episodes`.

n rows of one report. Reports are stored in order of arrival and sorted by agent only when the episodes are returned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.demonstrations.episodes import SLACK, Arrays, Recording, step_columns
from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Decisions, Ends
from sparring.pipeline.specs import Array, BehaviorId, BehaviorSpec

Ids = NDArray[np.int64]


class ByAgent:
    """Maps agent ids to values, found without a loop over the ids.

    Args:
        like: [0, ...] dtype and shape of the values.
    """

    def __init__(self, like: Array) -> None:
        self._ids: Ids = np.empty(0, np.int64)
        self._values = like

    def find(self, ids: Ids) -> tuple[Array, NDArray[np.bool_]]:
        """Returns [n, ...] the value of each id, zeros for unknown ones; and [n] whether the id is known."""
        found = np.zeros((len(ids), *self._values.shape[1:]), self._values.dtype)
        at = np.searchsorted(self._ids, ids)
        known = at < len(self._ids)
        known[known] = self._ids[at[known]] == ids[known]
        found[known] = self._values[at[known]]
        return found, known

    def put(self, ids: Ids, values: Array) -> None:
        """Sets the values of `ids`, all different, whether they are known or not."""
        self.remove(ids)
        every = np.concatenate([self._ids, ids])
        order = np.argsort(every)
        self._ids, self._values = every[order], np.concatenate([self._values, values])[order]

    def remove(self, ids: Ids) -> None:
        """Removes `ids`."""
        kept = ~np.isin(self._ids, ids)
        self._ids, self._values = self._ids[kept], self._values[kept]


class Tape:
    """Records the first episodes of one behavior name of one simulator, in the order of their starts.

    Recording those that end first would favor short ones. An agent's reward belongs to the action of its previous
    decision; if a report includes the action that the agent executed, that is recorded instead of the one it received.

    Args:
        behavior: name of the behavior.
        spec: observations and actions of the behavior.
        wanted: how many episodes; 0 for all.
        simulator: number of the simulator.

    Attributes:
        begun: agent episodes so far, wanted or not.
        episodes: of the wanted episodes, those that have ended.
        unreported: outcomes without an executed action, because the agent executed the one it received.
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
        self._running: dict[int, ByAgent] = {}
        self._chunks: list[Arrays] = [self._zeros(0)]
        self._unanswered: dict[str, tuple[Ids, NDArray[np.bool_], Arrays]] = {}
        self._masked = False

    @property
    def complete(self) -> bool:
        """Returns whether all wanted episodes have ended."""
        return self.episodes == self._wanted > 0

    @property
    def unfinished(self) -> int:
        """Returns how many wanted episodes have begun and not ended; the recording leaves them out."""
        return min(self.begun, self._last) - self.episodes

    def report(self, report: BehaviorReport) -> None:
        """Adds a report that was checked against the spec.

        Raises:
            RemoteProtocolError: the end of an agent that has not decided, or an action beyond [-1, 1].
        """
        team = BehaviorId.parse(report.behavior).team
        running = self._running.setdefault(team, ByAgent(np.empty(0, np.int64)))
        self._unanswered.pop(report.behavior, None)
        if report.ends is not None and len(report.ends.agents):
            self._end(report.behavior, report.ends, running, team)
        if report.decisions is not None and len(report.decisions.agents):
            self._decide(report.behavior, report.decisions, running, team)

    def answer(self, actions: BehaviorActions) -> None:
        """Adds the answer to the last report of a behavior id.

        Raises:
            ValueError: the answer is for other agents than that report.
        """
        agents, kept, chunk = self._unanswered.pop(actions.behavior)
        if not np.array_equal(agents, actions.agents):
            raise ValueError(f"got actions for {actions.agents} of {actions.behavior}; expected actions for {agents}")
        chunk["continuous"], chunk["discrete"] = actions.continuous[kept], actions.discrete[kept]

    def recording(self) -> Recording:
        """Returns the wanted episodes that have ended."""
        rows = {name: np.concatenate([chunk[name] for chunk in self._chunks]) for name in self._chunks[0]}
        episodes = rows["agent_episode"]
        order = np.argsort(episodes, kind="stable")
        order = order[np.isin(episodes, episodes[rows["over"]])[order]]  # only episodes that have ended
        over = rows["over"][order]
        at, last = np.flatnonzero(~over), np.flatnonzero(over)
        steps, outcomes = order[at], order[at + 1]  # each step's next row is the next step or the end
        ends = order[last]
        columns = {
            "lengths": (np.diff(last, prepend=-1) - 1).astype(np.int32),
            "agents": rows["agent_episode"][ends],
            "teams": rows["team"][ends],
            "simulators": np.full(len(ends), self._simulator, np.int32),
            "groups": rows["group"][order[last - 1]],
            "terminated": rows["terminated"][ends],
        }
        for name in ("continuous", "discrete"):
            reported = rows[f"reports_{name}"][outcomes][:, None]
            columns[name] = np.where(reported, rows[f"did_{name}"][outcomes], rows[name][steps])
        for number in range(len(self._spec.observations)):
            column = rows[f"observation.{number}"]
            columns |= {f"observation.{number}": column[steps], f"final_observation.{number}": column[ends]}
        if self._masked:
            columns["masks"] = rows["masks"][steps]
        columns |= {name: rows[name][outcomes] for name in ("rewards", "group_rewards")}
        return Recording(behavior=self.behavior, spec=self._spec, columns=columns)

    def _end(self, behavior: str, ends: Ends, running: ByAgent, team: int) -> None:
        agent_episodes, known = running.find(ends.agents)
        if not known.all():
            raise RemoteProtocolError(
                "unknown_agent",
                got=f"the end of agent {ends.agents[~known][0]} of {behavior}",
                expected="the end of an agent that has decided before",
                remedy="report an agent's first decision before its end",
            )
        running.remove(ends.agents)
        chunk, kept = self._append(behavior, ends, agent_episodes, known, team)
        chunk |= {"over": np.ones(len(chunk["agent_episode"]), np.bool_), "terminated": ~ends.interrupted[kept]}
        self.episodes += len(chunk["agent_episode"])

    def _decide(self, behavior: str, decisions: Decisions, running: ByAgent, team: int) -> None:
        agent_episodes, known = running.find(decisions.agents)
        if not known.all():
            agent_episodes[~known] = self.begun + 1 + np.arange(np.count_nonzero(~known))
            self.begun += int(np.count_nonzero(~known))
            running.put(decisions.agents[~known], agent_episodes[~known])
        chunk, kept = self._append(behavior, decisions, agent_episodes, known, team)
        if decisions.groups is not None:
            chunk["group"] = decisions.groups[kept]
        if decisions.masks is not None:
            chunk["masks"] = decisions.masks[kept]
            self._masked |= bool(chunk["masks"].any())
        self._unanswered[behavior] = decisions.agents, kept, chunk

    def _append(
        self, behavior: str, rows: Decisions | Ends, agent_episodes: Ids, known: NDArray[np.bool_], team: int
    ) -> tuple[Arrays, NDArray[np.bool_]]:
        """Stores the rows of wanted episodes; returns them, and which they are. `known` agents have decided before."""
        self._check_range(behavior, rows, known)
        actions = self._spec.actions
        if (rows.did_continuous is None and actions.continuous) or (rows.did_discrete is None and actions.discrete):
            self.unreported += int(np.count_nonzero(known))
        kept = agent_episodes <= self._last
        chunk = self._zeros(int(np.count_nonzero(kept))) | {
            "agent_episode": agent_episodes[kept],
            "rewards": rows.rewards[kept],
        }
        chunk["team"][:] = team
        if rows.group_rewards is not None:
            chunk["group_rewards"] = rows.group_rewards[kept]
        for number, column in enumerate(rows.observations):
            chunk[f"observation.{number}"] = column[kept]
        for name, did in (("continuous", rows.did_continuous), ("discrete", rows.did_discrete)):
            if did is not None:
                chunk[f"did_{name}"] = np.clip(did[kept], -1, 1) if name == "continuous" else did[kept]
                chunk[f"reports_{name}"][:] = True
        self._chunks.append(chunk)
        return chunk, kept

    def _check_range(self, behavior: str, rows: Decisions | Ends, known: NDArray[np.bool_]) -> None:
        if rows.did_continuous is None:
            return
        beyond = known & (np.abs(rows.did_continuous) > 1 + SLACK).any(axis=1)
        if beyond.any():
            raise RemoteProtocolError(
                "shape",
                got=f"did_continuous {rows.did_continuous[beyond][0]} of agent {rows.agents[beyond][0]} of {behavior}",
                expected="numbers in [-1, 1]",
                remedy="report what the agent did in the form of an action that it can receive",
            )

    def _zeros(self, n: int) -> Arrays:
        """Returns rows of zeros: columns of a file, what they are made of, and flags."""
        rows: Arrays = {name: np.zeros((n, *shape), dtype) for name, (dtype, shape) in step_columns(self._spec).items()}
        rows |= {f"did_{name}": rows[name].copy() for name in ("continuous", "discrete")}
        rows |= {f"reports_{name}": np.zeros(n, np.bool_) for name in ("continuous", "discrete")}
        rows |= {name: np.zeros(n, np.bool_) for name in ("over", "terminated")}
        rows |= {name: np.zeros(n, np.int64) for name in ("agent_episode", "group")}
        return rows | {"team": np.zeros(n, np.int32)}
