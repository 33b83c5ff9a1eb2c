"""Crowd equals a slow twin member by member, and random play earns little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.crowd import LIMIT, LONGEST_PAUSE, OBSERVATION_SIZE, Crowd
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Decisions
from tests.simulation.simulation_helpers import check_report

CROWD = "Crowd?team=0"
Reports = Sequence[BehaviorReport]
Policy = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""Returns choices for the observations of the deciding members."""


def act(agents: Any, chosen: Any) -> dict[str, BehaviorActions]:
    ids = np.array(agents, np.int64)
    discrete = np.array(chosen, np.int32).reshape(-1, 1)
    none = np.zeros((len(ids), 0), np.float32)
    return {CROWD: BehaviorActions(behavior=CROWD, agents=ids, continuous=none, discrete=discrete)}


def deciding(reports: Reports) -> Decisions | None:
    return reports[0].decisions if reports else None


def at_random(observed: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return random.integers(0, 3, len(observed))


def to_the_right(observed: np.ndarray, random: np.random.Generator) -> np.ndarray:
    del random
    return np.full(len(observed), 2)


def nearest_holds(observed: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The member nearest to the wall behind the plate goes there and stays; the others leave."""
    del random
    place, crowd = observed[:, :8].argmax(1), observed[:, 8:16]
    nearer = (crowd * (np.arange(8) < place[:, None])).sum(1)
    return np.where((place <= 4) & (nearer == 0), 0, 2)


def play(game: Crowd, policy: Policy, steps: int) -> list[Reports]:
    """Returns the first reports and those of `steps` steps."""
    random = np.random.default_rng(0)
    reports = game.reset({}, 0)
    played = [reports]
    for _ in range(steps):
        observed = deciding(reports)
        reports = game.step({} if observed is None else act(observed.agents, policy(observed.observations[0], random)))
        played.append(reports)
    return played


class Member:
    def __init__(self, place: int, every: int) -> None:
        self.place, self.every, self.age, self.held, self.earned = place, every, 0, 0, 0.0


class Twin:
    """One area by the rules; appearing members and their places are taken from the reports."""

    def __init__(self, numbers: list[int], every: int) -> None:
        self.numbers, self.every = numbers, {n: every if i % 2 else 1 for i, n in enumerate(numbers)}
        self.here: dict[int, Member] = {}
        self.absent = dict.fromkeys(numbers, 0)
        self.age = 0

    def appear(self, places: dict[int, int]) -> None:
        """Adds members that decide and were absent; no member may be absent for longer."""
        for number, place in places.items():
            assert 1 <= place <= 4
            self.here[number] = Member(place, self.every[number])
            del self.absent[number]
        assert self.here
        assert all(pause < LONGEST_PAUSE for pause in self.absent.values())

    def step(self, chosen: dict[int, int]) -> tuple[dict[int, tuple[float, bool]], bool]:
        """Returns reward and interruption of each member that ends, and whether the episode is over."""
        self.age += 1
        open_ = any(member.place == 0 for member in self.here.values())
        for number, member in self.here.items():
            low, high = (0, 7) if open_ else (0, 4) if member.place <= 4 else (5, 7)
            if member.age % member.every == 0:
                member.place = max(low, min(high, member.place + chosen.pop(number) - 1))
            member.held = min(member.held + 1, 4) if member.place == 0 else 0
            member.age += 1
        assert not chosen  # no other member decided
        leaving = [n for n, member in sorted(self.here.items()) if member.place == 7 or member.held == 4]
        if len(leaving) == len(self.here):
            del leaving[0]
        reward = sum(self.here[number].place == 7 for number in leaving) / len(self.numbers)
        for member in self.here.values():
            member.earned += reward
        over = self.age == LIMIT
        ended = sorted(self.here) if over else leaving
        self.absent = {number: pause + 1 for number, pause in self.absent.items()}
        rewards = {number: (self.here[number].earned, number not in leaving) for number in ended}
        for number in leaving:
            self.absent[number] = 0
            del self.here[number]
        return rewards, over

    def restart(self) -> None:
        self.here, self.age = {}, 0
        self.absent = dict.fromkeys(self.numbers, -1)

    def take_earned(self, number: int) -> float:
        earned, self.here[number].earned = self.here[number].earned, 0.0
        return earned

    def sees(self, number: int) -> list[float]:
        member, size = self.here[number], len(self.numbers)
        own = [float(member.place == place) for place in range(8)]
        crowd = [sum(one.place == place for one in self.here.values()) / size for place in range(8)]
        longest = max(one.held for one in self.here.values())
        return [*own, *crowd, member.held / 4, longest / 4, float(member.every > 1)]


class Twins:
    """Twins of all areas, which check the reports of a game."""

    def __init__(self, areas: int, members: int, every: int) -> None:
        self.areas = [Twin(list(range(area * members, (area + 1) * members)), every) for area in range(areas)]
        self.ended = self.slow = 0

    def check(self, reports: Reports, chosen: dict[int, int] | None) -> None:
        """Checks reports after the choices of all members that decided before, or None after a reset."""
        rows, ends = deciding(reports), reports[0].ends if reports else None
        now = {} if rows is None else dict(zip(rows.agents.tolist(), range(len(rows.agents)), strict=True))
        last = {} if ends is None else dict(zip(ends.agents.tolist(), range(len(ends.agents)), strict=True))
        self.ended += len(last)
        for index, twin in enumerate(self.areas):
            rewards: dict[int, tuple[float, bool]] = {}
            if chosen is not None:
                rewards, over = twin.step({number: chosen[number] for number in twin.numbers if number in chosen})
                if over:
                    twin.restart()
            assert {number for number in twin.numbers if number in last} == rewards.keys()
            for number, (earned, interrupted) in rewards.items():
                assert ends.group_rewards[last[number]] == pytest.approx(earned, abs=1e-6)
                assert ends.interrupted[last[number]] == interrupted
            newcomers = [number for number in twin.numbers if number in now and number in twin.absent]
            twin.appear({number: int(rows.observations[0][now[number], :8].argmax()) for number in newcomers})
            due = {number for number, member in twin.here.items() if member.age % member.every == 0}
            self.slow += len(twin.here) - len(due)
            assert {number for number in twin.numbers if number in now} == due
            for number in due:
                assert rows.groups[now[number]] == index + 1
                assert rows.group_rewards[now[number]] == pytest.approx(twin.take_earned(number), abs=1e-6)
                assert rows.observations[0][now[number]].tolist() == pytest.approx(twin.sees(number))


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**32),
    areas=st.integers(1, 2),
    members=st.integers(2, 8),
    every=st.integers(1, 3),
    skilled=st.floats(0, 1),
)
def test_every_report_equals_that_of_the_twin(seed: int, areas: int, members: int, every: int, skilled: float) -> None:
    game, twins, random = Crowd(areas, members, every=every), Twins(areas, members, every), np.random.default_rng(seed)
    specs = dict(game.behaviors())
    reports = game.reset({}, seed)
    twins.check(reports, None)
    for _ in range(LIMIT + 30):
        observed, chosen = deciding(reports), dict[int, int]()
        if observed is not None:
            rows = observed.observations[0]
            able = random.random(len(rows)) < skilled
            choices = np.where(able, nearest_holds(rows, random), at_random(rows, random)).tolist()
            chosen = dict(zip(observed.agents.tolist(), choices, strict=True))
        reports = game.step(act(list(chosen), list(chosen.values())) if chosen else {})
        for report in reports:
            check_report(report, specs)
        twins.check(reports, chosen)
    assert twins.ended > 0
    assert (twins.slow > 0) == (every > 1)


def group_rewards(report: BehaviorReport) -> dict[int, float]:
    """Returns the group reward that each agent receives; an end takes precedence over the next start."""
    received: dict[int, float] = {}
    for rows in (report.decisions, report.ends):
        if rows is not None:
            received |= dict(zip(rows.agents.tolist(), rows.group_rewards.tolist(), strict=True))
    return received


def returns(policy: Policy) -> float:
    """Returns the mean return of a group in an episode."""
    areas, members = 8, 20
    total = 0.0
    for reports in play(Crowd(areas, members), policy, LIMIT)[1:]:
        total += sum(
            {agent // members: reward for agent, reward in group_rewards(reports[0]).items() if reward}.values()
        )
    return total / areas


def test_a_group_needs_one_member_that_stays_behind() -> None:
    """A script that reads only observations earns over 4 times as much as chance; all at the exit earn nothing."""
    chance, skilled = returns(at_random), returns(nearest_holds)
    assert returns(to_the_right) == 0
    assert 2 < chance < 4
    assert skilled > 4 * chance
    assert skilled > 15


def test_groups_shrink_and_grow_and_ids_are_reused() -> None:
    """Within one episode of 200 steps a group is never empty, and every id ends and returns."""
    played = play(Crowd(), nearest_holds, LIMIT - 1)
    sizes = [reports[0].decisions.agents.size for reports in played]
    assert min(sizes) >= 1
    assert max(sizes) > min(sizes) + 5
    ends = np.bincount(np.concatenate([reports[0].ends.agents for reports in played if reports[0].ends is not None]))
    assert ends.size == 20
    assert ends.min() > 2


def test_after_200_steps_all_episodes_are_interrupted() -> None:
    """Members that end in that step are not interrupted; the next episode begins in the same report."""
    played = play(Crowd(2), at_random, LIMIT)
    assert not any(reports[0].ends.interrupted.any() for reports in played[:-1] if reports[0].ends is not None)
    before, last = played[-2][0].decisions, played[-1][0]
    assert before is not None
    assert last.ends is not None
    assert last.decisions is not None
    assert set(last.ends.agents.tolist()) == set(before.agents.tolist())
    leaves = last.ends.observations[0][:, 7] + (last.ends.observations[0][:, 16] == 1) > 0
    np.testing.assert_array_equal(last.ends.interrupted, ~leaves)
    assert last.decisions.group_rewards is not None
    assert not last.decisions.group_rewards.any()


def test_slow_members_get_the_sum_of_their_groups_rewards_since_their_decision() -> None:
    """The others receive it step by step."""
    earned: list[float] = []
    decided: dict[int, int] = {}
    sums = 0
    for at, (report,) in enumerate(play(Crowd(every=3), nearest_holds, LIMIT - 1)):
        received = group_rewards(report)
        earned.append(max(reward for agent, reward in received.items() if agent % 2 == 0))
        for agent in [agent for agent in received if agent % 2 == 1]:
            if agent in decided:
                assert received[agent] == pytest.approx(sum(earned[decided[agent] + 1 :]), abs=1e-6)
                assert at - decided[agent] <= 3
                sums += received[agent] > earned[-1]
        ended = set() if report.ends is None else set(report.ends.agents.tolist())
        decided = {agent: age for agent, age in decided.items() if agent not in ended}
        decided |= dict.fromkeys(report.decisions.agents.tolist(), at)
    assert sums > 100


def test_a_step_without_decisions_and_ends_has_no_report() -> None:
    """With slow members alone the game continues without actions."""
    played = play(Crowd(1, 2, every=4), at_random, 2 * LIMIT)
    assert any(not reports for reports in played)
    assert any(reports and reports[0].decisions is None for reports in played)  # one ends, the other is slow
    assert played[0]
    assert played[LIMIT][0].ends is not None


def test_the_seed_determines_everything() -> None:
    """The same seed and actions give identical reports."""

    def observed(seed: int) -> bytes:
        game, random = Crowd(3), np.random.default_rng(1)
        reports, observed = game.reset({}, seed), b""
        for _ in range(60):
            rows = deciding(reports)
            assert rows is not None
            observed += rows.agents.tobytes() + rows.observations[0].tobytes()
            reports = game.step(act(rows.agents, random.integers(0, 3, rows.agents.size)))
        return observed

    assert observed(3) == observed(3) != observed(4)


def test_crowd_has_one_behavior_with_three_choices() -> None:
    (spec,) = Crowd().behaviors().values()
    assert [(one.name, one.shape) for one in spec.observations] == [("corridor", (OBSERVATION_SIZE,))]
    assert (spec.actions.continuous, spec.actions.discrete) == (0, (3,))


@pytest.mark.parametrize(("option", "value", "expected"), [("members", 1, "2 or more"), ("every", 0, "1 or more")])
def test_invalid_options_are_refused(option: str, value: int, expected: str) -> None:
    with pytest.raises(SettingsError, match=f"expected {expected}"):
        Crowd(**{option: value})
