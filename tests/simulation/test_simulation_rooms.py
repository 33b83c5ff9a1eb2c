"""Rooms equals a slow twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.rooms import LIMIT, Rooms
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport

ROOMS = "Rooms?team=0"


def act(agents: Any, chosen: Any) -> dict[str, BehaviorActions]:
    ids = np.array(agents, np.int64)
    discrete = np.array(chosen, np.int32).reshape(-1, 1)
    none = np.zeros((len(ids), 0), np.float32)
    return {ROOMS: BehaviorActions(behavior=ROOMS, agents=ids, continuous=none, discrete=discrete)}


class Member:
    def __init__(self, number: int, place: int) -> None:
        self.number, self.place, self.here = number, place, True


class Twin:
    """One area, computed member by member."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def begin(self, places: list[int]) -> None:
        self.members = [Member(number, place) for number, place in zip(self.numbers, places, strict=True)]
        self.open, self.age = False, 0

    def step(self, chosen: dict[int, int]) -> tuple[dict[int, tuple[float, bool]], float, bool]:
        """Returns reward and interruption of members that end, the group reward, and whether the episode is over."""
        self.age += 1
        for member in self.members:
            if member.here:
                member.place = max(0, min(6 if self.open else 4, member.place + chosen[member.number] - 1))
        ended: dict[int, tuple[float, bool]] = {}
        held = next((m for m in self.members if m.here and m.place == 0 and not self.open), None)
        if held is not None:
            held.here, self.open = False, True
        won = any(m.here and m.place == 6 for m in self.members)
        reward = float(won) - 0.01
        if held is not None:
            ended[held.number] = (reward, False)
        over = won or self.age >= LIMIT
        if over:
            ended |= {m.number: (reward, not won) for m in self.members if m.here}
        return ended, reward, over


def places(report: BehaviorReport) -> dict[int, int]:
    assert report.decisions is not None
    observed = report.decisions.observations[0][:, 0] * 6
    return dict(zip(report.decisions.agents.tolist(), observed.round().astype(int).tolist(), strict=True))


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32), areas=st.integers(1, 4), members=st.integers(2, 4), towards=st.sampled_from([0, 1, 2])
)
def test_every_report_equals_that_of_the_twin(seed: int, areas: int, members: int, towards: int) -> None:
    random, game = np.random.default_rng(seed), Rooms(areas, members)
    (report,) = game.reset({}, seed)
    twins = [Twin([area * members + member for member in range(members)]) for area in range(areas)]
    for twin in twins:
        twin.begin([places(report)[number] for number in twin.numbers])
    for _ in range(60):
        assert report.decisions is not None
        agents = report.decisions.agents.tolist()
        chosen = [int(random.integers(0, 3)) if random.random() < 0.6 else towards for _ in agents]
        (report,) = game.step(act(agents, chosen))
        assert report.decisions is not None
        ends = {} if report.ends is None else dict(zip(report.ends.agents.tolist(), range(99), strict=False))
        rewards = dict(zip(report.decisions.agents.tolist(), report.decisions.group_rewards, strict=True))
        for twin in twins:
            choices = dict(zip(agents, chosen, strict=True))
            ended, reward, over = twin.step(choices)
            assert {number for number in twin.numbers if number in ends} == ended.keys()
            for number, (earned, interrupted) in ended.items():
                assert report.ends is not None
                assert report.ends.group_rewards[ends[number]] == pytest.approx(earned)
                assert report.ends.interrupted[ends[number]] == interrupted
            if over:
                twin.begin([places(report)[number] for number in twin.numbers])
                assert all(0 < member.place < 5 for member in twin.members)
            here = [member for member in twin.members if member.here]
            assert {m.number: places(report)[m.number] for m in here} == {m.number: m.place for m in here}
            for member in here:
                assert rewards[member.number] == pytest.approx(0 if over else reward)
            assert not any(m.number in rewards for m in twin.members if not m.here)


def walk(game: Rooms, report: BehaviorReport, direction: dict[int, int], steps: int) -> list[BehaviorReport]:
    reports = []
    for _ in range(steps):
        assert report.decisions is not None
        agents = report.decisions.agents.tolist()
        (report,) = game.step(act(agents, [direction[agent] for agent in agents]))
        reports.append(report)
    return reports


def test_a_member_that_opens_the_door_ends_and_the_group_earns_later() -> None:
    """Member 0 ends at a cost, before its group earns its reward."""
    game = Rooms()
    (report,) = game.reset({}, 3)
    reports = walk(game, report, {0: 0, 1: 2}, 12)
    first = next(one for one in reports if one.ends is not None)
    assert first.ends is not None
    assert first.ends.agents.tolist() == [0]
    assert first.ends.group_rewards is not None
    assert first.ends.group_rewards.tolist() == [pytest.approx(-0.01)]
    assert not first.ends.interrupted[0]
    later = next(one for one in reports[reports.index(first) + 1 :] if one.ends is not None)
    assert later.ends is not None
    assert later.ends.agents.tolist() == [1]
    assert later.ends.group_rewards is not None
    assert later.ends.group_rewards.tolist() == [pytest.approx(0.99)]
    assert later.decisions is not None
    assert later.decisions.agents.tolist() == [0, 1]  # the next episode has both


def test_without_a_member_that_opens_the_door_the_episode_is_interrupted() -> None:
    game = Rooms()
    (report,) = game.reset({}, 3)
    reports = walk(game, report, {0: 2, 1: 2}, LIMIT)
    assert [one.ends is None for one in reports] == [True] * (LIMIT - 1) + [False]
    assert reports[-1].ends is not None
    assert reports[-1].ends.interrupted.all()
    assert all(max(places(one).values()) <= 4 for one in reports)


def test_members_have_one_group_for_each_area() -> None:
    (report,) = Rooms(3, 2).reset({}, 1)
    assert report.decisions is not None
    assert report.decisions.groups is not None
    assert report.decisions.groups.tolist() == [1, 1, 2, 2, 3, 3]


def test_a_member_observes_itself_and_the_others() -> None:
    game = Rooms(1, 3)
    (report,) = game.reset({}, 5)
    at = places(report)
    assert report.decisions is not None
    observed = report.decisions.observations[0]
    for member in range(3):
        others = [value for other in range(3) if other != member for value in (1, at[other] / 6)]
        np.testing.assert_allclose(observed[member], [at[member] / 6, 0, 0, *others], rtol=1e-6)
    reports = walk(game, report, {0: 0, 1: 1, 2: 1}, at[0])
    last = reports[-1].decisions
    assert last is not None
    assert last.agents.tolist() == [1, 2]
    expected = [at[1] / 6, 1, at[0] / LIMIT, 0, 0, 1, at[2] / 6]
    np.testing.assert_allclose(last.observations[0][0], expected, rtol=1e-6)


def test_a_single_member_is_refused() -> None:
    with pytest.raises(SettingsError, match="expected 2 or more"):
        Rooms(1, 1)
