"""This module assembles whole episodes from a simulator's reports and the answers to it, as columns of `episodes`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.demonstrations.episodes import PER_EPISODE, SLACK, Arrays, Recording, step_columns
from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Decisions, Ends
from sparring.pipeline.specs import Array, BehaviorId, BehaviorSpec


@dataclass
class _Episode:
    """Holds an agent's episode so far.

    Attributes:
        values: its number in each column with one number for each episode.
        steps: the values of each step, by column; the last one has no outcome yet.
        final: observations after the last step.
    """

    values: dict[str, int]
    steps: list[Arrays] = field(default_factory=list)
    final: Sequence[Array] = ()


class Tape:
    """Records the first episodes of one behavior name of one simulator, in the order of their starts.

    Recording those that end first would favor short ones. An agent's reward belongs to the action of its previous
    decision; if a report includes the action that the agent executed, that is recorded instead of the one it received.

    Args:
        behavior: name of the behavior.
        spec: observations and actions of the behavior.
        wanted: how many episodes; 0 for all.

    Attributes:
        begun: agent episodes so far, wanted or not.
        unreported: outcomes without an executed action, because the agent executed the one it received.
    """

    def __init__(self, behavior: str, spec: BehaviorSpec, wanted: int = 0) -> None:
        self.behavior = behavior
        self.begun = 0
        self.unreported = 0
        self._spec = spec
        self._wanted = wanted
        self._all_allowed = np.zeros(spec.actions.mask_size, np.bool_)
        self._running: dict[tuple[str, int], _Episode] = {}  # by behavior id and agent
        self._ended: dict[int, _Episode] = {}  # the wanted ones, by number
        self._unanswered: dict[str, NDArray[np.int64]] = {}  # agents of the last decisions, by behavior id

    @property
    def episodes(self) -> int:
        """Returns how many of the wanted episodes have ended."""
        return len(self._ended)

    @property
    def complete(self) -> bool:
        """Returns whether all wanted episodes have ended."""
        return self.episodes == self._wanted > 0

    @property
    def unfinished(self) -> int:
        """Returns how many wanted episodes have begun and not ended; the recording leaves them out."""
        return (min(self.begun, self._wanted) if self._wanted else self.begun) - self.episodes

    def report(self, report: BehaviorReport) -> None:
        """Adds a report that a `Stepper` has accepted.

        Raises:
            RemoteProtocolError: the agent executed an action beyond [-1, 1].
        """
        if report.ends is not None:
            for row, agent in enumerate(report.ends.agents.tolist()):
                self._end(report.behavior, agent, report.ends, row)
        if report.decisions is not None:
            self._unanswered[report.behavior] = report.decisions.agents
            for row, agent in enumerate(report.decisions.agents.tolist()):
                self._decide(report.behavior, agent, report.decisions, row)

    def answer(self, actions: BehaviorActions) -> None:
        """Adds the answer to the last report of a behavior id.

        Raises:
            ValueError: the answer is for other agents than that report.
        """
        agents = self._unanswered.pop(actions.behavior)
        if not np.array_equal(agents, actions.agents):
            raise ValueError(f"got actions for {actions.agents} of {actions.behavior}; expected actions for {agents}")
        for agent, continuous, discrete in zip(agents.tolist(), actions.continuous, actions.discrete, strict=True):
            self._running[actions.behavior, agent].steps[-1] |= {"continuous": continuous, "discrete": discrete}

    def recording(self) -> Recording:
        """Returns the wanted episodes that have ended."""
        episodes = [self._ended[number] for number in sorted(self._ended)]
        steps = [step for episode in episodes for step in episode.steps]
        columns: Arrays = {
            name: np.array([episode.values[name] for episode in episodes], dtype) for name, dtype in PER_EPISODE.items()
        }
        for name, (dtype, shape) in step_columns(self._spec).items():
            columns[name] = np.array([step[name] for step in steps], dtype).reshape(len(steps), *shape)
        for at, one in enumerate(self._spec.observations):
            final = np.array([episode.final[at] for episode in episodes], one.dtype)
            columns[f"final_observation.{at}"] = final.reshape(len(episodes), *one.shape)
        if not columns["masks"].any():
            del columns["masks"]
        return Recording(behavior=self.behavior, spec=self._spec, columns=columns)

    def _decide(self, behavior: str, agent: int, decisions: Decisions, row: int) -> None:
        """Begins a step with copies of a report's row, because a view would keep the whole report in memory."""
        episode = self._running.get((behavior, agent))
        if episode is None:
            self.begun += 1
            values = dict.fromkeys(PER_EPISODE, 0) | {"agents": self.begun, "teams": BehaviorId.parse(behavior).team}
            episode = self._running[behavior, agent] = _Episode(values)
        else:
            self._complete(episode, decisions, row, behavior)
        episode.values["groups"] = 0 if decisions.groups is None else int(decisions.groups[row])
        step = {f"observation.{at}": column[row].copy() for at, column in enumerate(decisions.observations)}
        step["masks"] = self._all_allowed if decisions.masks is None else decisions.masks[row].copy()
        if not self._wants(episode):
            episode.steps.clear()
        episode.steps.append(step)

    def _wants(self, episode: _Episode) -> bool:
        return not self._wanted or episode.values["agents"] <= self._wanted

    def _end(self, behavior: str, agent: int, ends: Ends, row: int) -> None:
        episode = self._running.pop((behavior, agent))
        self._complete(episode, ends, row, behavior)
        episode.final = [column[row].copy() for column in ends.observations]
        episode.values |= {"lengths": len(episode.steps), "terminated": not ends.interrupted[row]}
        if self._wants(episode):
            self._ended[episode.values["agents"]] = episode

    def _complete(self, episode: _Episode, rows: Decisions | Ends, row: int, behavior: str) -> None:
        """Adds the outcome of an agent's last decision."""
        actions, did_continuous, did_discrete = self._spec.actions, rows.did_continuous, rows.did_discrete
        step = episode.steps[-1]
        step["rewards"] = rows.rewards[row]
        step["group_rewards"] = np.asarray(0 if rows.group_rewards is None else rows.group_rewards[row], np.float32)
        if (did_continuous is None and actions.continuous) or (did_discrete is None and actions.discrete):
            self.unreported += 1
        if did_discrete is not None:
            step["discrete"] = did_discrete[row].copy()
        if did_continuous is not None:
            if (np.abs(did_continuous[row]) > 1 + SLACK).any():
                raise RemoteProtocolError(
                    "shape",
                    got=f"did_continuous {did_continuous[row]} of agent {rows.agents[row]} of {behavior}",
                    expected="numbers in [-1, 1]",
                    remedy="report what the agent did in the form of an action that it can receive",
                )
            step["continuous"] = np.clip(did_continuous[row], -1, 1)
