"""Tape makes whole episodes of reports and answers, as does a plain twin that follows one agent at a time."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.demonstrations.episodes import SUFFIX, encode, read
from sparring.pipeline.demonstrations.tape import Tape
from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.simulation.game import decisions, ends
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

SPEC = BehaviorSpec(
    observations=(
        ObservationSpec(name="a", shape=(2,)),
        ObservationSpec(name="b", shape=(1, 2, 2), dtype="uint8", kind="image"),
    ),
    actions=ActionSpec(continuous=1, discrete=(2, 3)),
)
TEAMS = (0, 3)


@dataclass
class AgentEpisode:
    """One agent episode as the twin records it.

    Attributes:
        steps: observation, mask, group, chosen action, then the outcome: rewards and the action that was taken.
    """

    number: int
    team: int
    steps: list[dict[str, Any]] = field(default_factory=list)
    last: Any = None
    terminated: bool | None = None


class RandomSimulator:
    """Samples reports of two teams, passes them to the tape, and follows each agent separately."""

    def __init__(self, rng: random.Random, tape: Tape) -> None:
        self.rng = rng
        self.np_rng = np.random.default_rng(rng.randrange(2**32))
        self.tape = tape
        self.agent_episodes: list[AgentEpisode] = []
        self.open_episodes: dict[tuple[int, int], AgentEpisode] = {}
        self.report_probability = rng.choice([0.0, 0.5, 1.0])

    def frame(self) -> None:
        """Sends one Step to the tape and then its answer."""
        reports = [report for team in self.rng.sample(TEAMS, 2) if (report := self.report(team)) is not None]
        for report in reports:
            self.tape.report(report)
        for report in reports:
            if report.decisions is not None:
                self.answer(report)

    def report(self, team: int) -> BehaviorReport | None:
        of_team = [agent for owner, agent in self.open_episodes if owner == team]
        ending = [agent for agent in of_team if self.rng.random() < 0.25]
        waiting = [agent for agent in of_team if agent not in ending and self.rng.random() < 0.2]
        newcomers = [agent for agent in range(6) if agent not in of_team and self.rng.random() < 0.3]
        again = [agent for agent in ending if self.rng.random() < 0.6]
        deciding = [agent for agent in of_team if agent not in ending and agent not in waiting] + newcomers + again
        self.rng.shuffle(deciding)
        ended = self.ends(team, ending) if ending else None
        decided = self.decisions(team, deciding) if deciding else None
        if ended is None and decided is None:
            return None
        return BehaviorReport(behavior=f"B?team={team}", decisions=decided, ends=ended)

    def rows(self, n: int) -> dict[str, Any]:
        """Returns the columns that decisions and ends share."""
        with_group = self.rng.random() < 0.5
        return {
            "observations": [
                self.np_rng.normal(size=(n, 2)).astype(np.float32),
                self.np_rng.integers(0, 255, (n, 1, 2, 2)).astype(np.uint8),
            ],
            "rewards": self.np_rng.normal(size=n).astype(np.float32),
            "group_rewards": self.np_rng.normal(size=n).astype(np.float32) if with_group else None,
            "did_continuous": self.np_rng.uniform(-1, 1, (n, 1))
            if self.rng.random() < self.report_probability
            else None,
            "did_discrete": self.np_rng.integers(0, 2, (n, 2)) if self.rng.random() < self.report_probability else None,
        }

    def outcome(self, episode: AgentEpisode, columns: dict[str, Any], row: int) -> None:
        names = ("rewards", "group_rewards", "did_continuous", "did_discrete")
        episode.steps[-1] |= {name: None if columns[name] is None else columns[name][row] for name in names}

    def ends(self, team: int, agents: list[int]) -> Any:
        columns = self.rows(len(agents))
        interrupted = self.np_rng.random(len(agents)) < 0.5
        for row, agent in enumerate(agents):
            episode = self.open_episodes.pop((team, agent))
            self.outcome(episode, columns, row)
            episode.last = [column[row] for column in columns["observations"]]
            episode.terminated = not interrupted[row]
        return ends(agents, interrupted=interrupted, **columns)

    def decisions(self, team: int, agents: list[int]) -> Any:
        columns = self.rows(len(agents))
        groups = self.np_rng.integers(0, 9, len(agents)) if self.rng.random() < 0.5 else None
        masks = self.np_rng.random((len(agents), 5)) < 0.4 if self.rng.random() < 0.3 else None
        for row, agent in enumerate(agents):
            if (team, agent) in self.open_episodes:
                self.outcome(self.open_episodes[team, agent], columns, row)
            else:
                self.agent_episodes.append(AgentEpisode(len(self.agent_episodes) + 1, team))
                self.open_episodes[team, agent] = self.agent_episodes[-1]
            self.open_episodes[team, agent].steps.append(
                {
                    "seen": [column[row] for column in columns["observations"]],
                    "mask": None if masks is None else masks[row],
                    "group": 0 if groups is None else groups[row],
                }
            )
        return decisions(agents, groups=groups, masks=masks, **columns)

    def answer(self, report: BehaviorReport) -> None:
        assert report.decisions is not None
        agents = report.decisions.agents
        continuous = self.np_rng.uniform(-1, 1, (len(agents), 1)).astype(np.float32)
        discrete = self.np_rng.integers(0, 2, (len(agents), 2)).astype(np.int32)
        team = int(report.behavior[-1])
        for row, agent in enumerate(agents.tolist()):
            self.open_episodes[team, agent].steps[-1] |= {"continuous": continuous[row], "discrete": discrete[row]}
        self.tape.answer(
            BehaviorActions(behavior=report.behavior, agents=agents, continuous=continuous, discrete=discrete)
        )


def expected(agent_episodes: list[AgentEpisode], column: str) -> list[Any]:
    """Returns a column of the file, built one step at a time."""
    found = []
    for episode in agent_episodes:
        for step in episode.steps:
            if column in ("continuous", "discrete"):
                did = step[f"did_{column}"]
                found.append(step[column] if did is None else did)
            else:
                found.append(0 if step[column] is None else step[column])
    return found


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), frames=st.integers(0, 25), wanted=st.sampled_from([0, 1, 4, 1000]))
def test_the_recording_equals_that_of_a_plain_twin(seed: int, frames: int, wanted: int) -> None:
    """It holds the wanted episodes that ended, in the order of their starts, each outcome at the decision before it."""
    rng = random.Random(seed)
    tape = Tape("B", SPEC, wanted)
    simulator = RandomSimulator(rng, tape)
    for _ in range(frames):
        simulator.frame()
    chosen = simulator.agent_episodes[: wanted or None]
    agent_episodes = [episode for episode in chosen if episode.terminated is not None]
    assert (tape.begun, tape.episodes, tape.unfinished) == (
        len(simulator.agent_episodes),
        len(agent_episodes),
        len(chosen) - len(agent_episodes),
    )
    assert tape.complete == (0 < wanted == len(agent_episodes))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"B{SUFFIX}"
        path.write_bytes(encode(tape.recording()))
        columns = read(path).columns  # also checks dtypes and shapes
    assert columns["agents"].tolist() == [episode.number for episode in agent_episodes]
    assert columns["lengths"].tolist() == [len(episode.steps) for episode in agent_episodes]
    assert columns["teams"].tolist() == [episode.team for episode in agent_episodes]
    assert columns["groups"].tolist() == [episode.steps[-1]["group"] for episode in agent_episodes]
    assert columns["terminated"].tolist() == [episode.terminated for episode in agent_episodes]
    assert columns["simulators"].tolist() == [0] * len(agent_episodes)
    for name in ("continuous", "discrete", "rewards", "group_rewards"):
        column = np.array(expected(agent_episodes, name), columns[name].dtype).reshape(columns[name].shape)
        np.testing.assert_array_equal(columns[name], column, name)
    steps = [step for episode in agent_episodes for step in episode.steps]
    for at in range(2):
        for row, step in enumerate(steps):
            np.testing.assert_array_equal(columns[f"observation.{at}"][row], step["seen"][at])
        for row, episode in enumerate(agent_episodes):
            np.testing.assert_array_equal(columns[f"final_observation.{at}"][row], episode.last[at])
    masks = [np.zeros(5, bool) if step["mask"] is None else step["mask"] for step in steps]
    if "masks" in columns:
        np.testing.assert_array_equal(columns["masks"], np.array(masks, bool).reshape(-1, 5))
    else:
        assert not np.any(masks)


def report(agents: list[int], ending: list[int] | None = None, **columns: Any) -> BehaviorReport:
    def seen(n: int) -> list[Any]:
        return [np.zeros((n, 2), np.float32), np.zeros((n, 1, 2, 2), np.uint8)]

    over = None if ending is None else ends(ending, seen(len(ending)))
    return BehaviorReport(behavior="B", decisions=decisions(agents, seen(len(agents)), **columns), ends=over)


def test_outcomes_without_the_action_that_was_taken_are_counted() -> None:
    """A first decision reports no action; an outcome must report every kind of action."""
    tape = Tape("B", SPEC)
    both: dict[str, Any] = {"did_continuous": np.zeros((1, 1)), "did_discrete": np.zeros((1, 2))}
    tape.report(report([1]))
    assert tape.unreported == 0
    tape.report(report([1], **both))
    assert tape.unreported == 0
    tape.report(report([1], did_continuous=both["did_continuous"]))
    assert tape.unreported == 1
    tape.report(report([1], did_discrete=both["did_discrete"]))
    assert tape.unreported == 2


def test_an_action_beyond_its_range_is_refused() -> None:
    """Rows of agents that decide for the first time are ignored; all others must be in [-1, 1]."""
    tape = Tape("B", SPEC)
    tape.report(report([1], did_continuous=[[40.0]]))
    with pytest.raises(RemoteProtocolError, match=r"\[-1, 1\]"):
        tape.report(report([1], did_continuous=[[40.0]]))


def test_an_answer_to_other_agents_is_refused() -> None:
    """Actions have the order of the decisions."""
    tape = Tape("B", SPEC)
    tape.report(report([1, 2]))
    agents = np.array([2, 1])
    with pytest.raises(ValueError, match="expected actions for"):
        tape.answer(
            BehaviorActions(
                behavior="B", agents=agents, continuous=np.zeros((2, 1), "f4"), discrete=np.zeros((2, 2), "i4")
            )
        )
