"""Crowd against a slow twin, member by member; and that it takes more than chance."""

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
"""From what the deciding members see to their choices."""


def act(agents: Any, chosen: Any) -> dict[str, BehaviorActions]:
    ids = np.array(agents, np.int64)
    discrete = np.array(chosen, np.int32).reshape(-1, 1)
    none = np.zeros((len(ids), 0), np.float32)
    return {CROWD: BehaviorActions(behavior=CROWD, agents=ids, continuous=none, discrete=discrete)}


def deciding(reports: Reports) -> Decisions | None:
    return reports[0].decisions if reports else None


def at_random(seen: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return random.integers(0, 3, len(seen))


def to_the_right(seen: np.ndarray, random: np.random.Generator) -> np.ndarray:
    del random
    return np.full(len(seen), 2)


def nearest_holds(seen: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Whoever has nobody between itself and the wall behind the plate goes there and stays; the others leave."""
    del random
    place, crowd = seen[:, :8].argmax(1), seen[:, 8:16]
    nearer = (crowd * (np.arange(8) < place[:, None])).sum(1)
    return np.where((place <= 4) & (nearer == 0), 0, 2)


def play(game: Crowd, policy: Policy, steps: int) -> list[Reports]:
    """The first reports and those of so many steps."""
    random = np.random.default_rng(0)
    reports = game.reset({}, 0)
    played = [reports]
    for _ in range(steps):
        seen = deciding(reports)
        reports = game.step({} if seen is None else act(seen.agents, policy(seen.observations[0], random)))
        played.append(reports)
    return played


class Member:
    def __init__(self, place: int, every: int) -> None:
        self.place, self.every, self.life, self.held, self.earned = place, every, 0, 0, 0.0


class Twin:
    """One area, from the rules; who appears and where is read off the reports."""

    def __init__(self, numbers: list[int], every: int) -> None:
        self.numbers, self.every = numbers, {n: every if i % 2 else 1 for i, n in enumerate(numbers)}
        self.here: dict[int, Member] = {}
        self.absent = dict.fromkeys(numbers, 0)
        self.age = 0

    def appear(self, places: dict[int, int]) -> None:
        """Members that decide and were absent; nobody may be absent for longer."""
        for number, place in places.items():
            assert 1 <= place <= 4
            self.here[number] = Member(place, self.every[number])
            del self.absent[number]
        assert self.here
        assert all(pause < LONGEST_PAUSE for pause in self.absent.values())

    def step(self, chosen: dict[int, int]) -> tuple[dict[int, tuple[float, bool]], bool]:
        """Reward and whether it was interrupted for each that ends; whether the episode is over."""
        self.age += 1
        open_ = any(member.place == 0 for member in self.here.values())
        for number, member in self.here.items():
            low, high = (0, 7) if open_ else (0, 4) if member.place <= 4 else (5, 7)
            if member.life % member.every == 0:
                member.place = max(low, min(high, member.place + chosen.pop(number) - 1))
            member.held = min(member.held + 1, 4) if member.place == 0 else 0
            member.life += 1
        assert not chosen  # nobody else decided
        leaving = [n for n, member in sorted(self.here.items()) if member.place == 7 or member.held == 4]
        if len(leaving) == len(self.here):
            del leaving[0]
        reward = sum(self.here[number].place == 7 for number in leaving) / len(self.numbers)
        for member in self.here.values():
            member.earned += reward
        over = self.age == LIMIT
        ended = sorted(self.here) if over else leaving
        self.absent = {number: pause + 1 for number, pause in self.absent.items()}
        told = {number: (self.here[number].earned, number not in leaving) for number in ended}
        for number in leaving:
            self.absent[number] = 0
            del self.here[number]
        return told, over

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
    """All areas of a game, checked against its reports."""

    def __init__(self, areas: int, members: int, every: int) -> None:
        self.areas = [Twin(list(range(area * members, (area + 1) * members)), every) for area in range(areas)]
        self.ended = self.slow = 0

    def check(self, reports: Reports, chosen: dict[int, int] | None) -> None:
        """`chosen` by all that decided before, None after a reset."""
        rows, ends = deciding(reports), reports[0].ends if reports else None
        now = {} if rows is None else dict(zip(rows.agents.tolist(), range(len(rows.agents)), strict=True))
        last = {} if ends is None else dict(zip(ends.agents.tolist(), range(len(ends.agents)), strict=True))
        self.ended += len(last)
        for index, twin in enumerate(self.areas):
            told: dict[int, tuple[float, bool]] = {}
            if chosen is not None:
                told, over = twin.step({number: chosen[number] for number in twin.numbers if number in chosen})
                if over:
                    twin.restart()
            assert {number for number in twin.numbers if number in last} == told.keys()
            for number, (earned, interrupted) in told.items():
                assert ends.group_rewards[last[number]] == pytest.approx(earned, abs=1e-6)
                assert ends.interrupted[last[number]] == interrupted
            newcomers = [number for number in twin.numbers if number in now and number in twin.absent]
            twin.appear({number: int(rows.observations[0][now[number], :8].argmax()) for number in newcomers})
            due = {number for number, member in twin.here.items() if member.life % member.every == 0}
            self.slow += len(twin.here) - len(due)
            assert {number for number in twin.numbers if number in now} == due
            for number in due:
                assert rows.groups[now[number]] == index + 1
                assert rows.group_rewards[now[number]] == pytest.approx(twin.take_earned(number), abs=1e-6)
                assert rows.observations[0][now[number]].tolist() == pytest.approx(twin.sees(number))


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32),
    areas=st.integers(1, 2),
    members=st.integers(2, 8),
    every=st.integers(1, 3),
    skilled=st.floats(0, 1),
)
def test_every_report_is_that_of_the_twin(seed: int, areas: int, members: int, every: int, skilled: float) -> None:
    game, twins, random = Crowd(areas, members, every=every), Twins(areas, members, every), np.random.default_rng(seed)
    specs = dict(game.behaviors())
    reports = game.reset({}, seed)
    twins.check(reports, None)
    for _ in range(LIMIT + 30):
        seen, chosen = deciding(reports), dict[int, int]()
        if seen is not None:
            rows = seen.observations[0]
            able = random.random(len(rows)) < skilled
            choices = np.where(able, nearest_holds(rows, random), at_random(rows, random)).tolist()
            chosen = dict(zip(seen.agents.tolist(), choices, strict=True))
        reports = game.step(act(list(chosen), list(chosen.values())) if chosen else {})
        for report in reports:
            check_report(report, specs)
        twins.check(reports, chosen)
    assert twins.ended > 0
    assert (twins.slow > 0) == (every > 1)


def told(report: BehaviorReport) -> dict[int, float]:
    """What each agent hears of its group's reward; at an end and the next start, the end's."""
    heard: dict[int, float] = {}
    for rows in (report.decisions, report.ends):
        if rows is not None:
            heard |= dict(zip(rows.agents.tolist(), rows.group_rewards.tolist(), strict=True))
    return heard


def returns(policy: Policy) -> float:
    """Mean return of a group for an episode."""
    areas, members = 8, 20
    total = 0.0
    for reports in play(Crowd(areas, members), policy, LIMIT)[1:]:
        total += sum({agent // members: reward for agent, reward in told(reports[0]).items() if reward}.values())
    return total / areas


def test_it_takes_one_who_stays_behind() -> None:
    """A script that reads the observation alone earns more than 4 times what chance does; all to the exit earn none."""
    chance, skilled = returns(at_random), returns(nearest_holds)
    assert returns(to_the_right) == 0
    assert 2 < chance < 4
    assert skilled > 4 * chance
    assert skilled > 15


def test_groups_shrink_and_grow_and_ids_come_again() -> None:
    """Within one episode of 200 steps there are never none, and every id dies and lives again."""
    played = play(Crowd(), nearest_holds, LIMIT - 1)
    sizes = [reports[0].decisions.agents.size for reports in played]
    assert min(sizes) >= 1
    assert max(sizes) > min(sizes) + 5
    ends = np.bincount(np.concatenate([reports[0].ends.agents for reports in played if reports[0].ends is not None]))
    assert ends.size == 20
    assert ends.min() > 2


def test_after_200_steps_the_episode_of_all_is_cut() -> None:
    """Whoever is there is interrupted, except who ends in that very step; the next one begins in the same report."""
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


def test_slow_members_get_the_sum_of_what_their_group_earned_meanwhile() -> None:
    """The others hear of it step by step."""
    earned: list[float] = []
    decided: dict[int, int] = {}
    sums = 0
    for at, (report,) in enumerate(play(Crowd(every=3), nearest_holds, LIMIT - 1)):
        heard = told(report)
        earned.append(max(reward for agent, reward in heard.items() if agent % 2 == 0))
        for agent in [agent for agent in heard if agent % 2 == 1]:
            if agent in decided:
                assert heard[agent] == pytest.approx(sum(earned[decided[agent] + 1 :]), abs=1e-6)
                assert at - decided[agent] <= 3
                sums += heard[agent] > earned[-1]
        ended = set() if report.ends is None else set(report.ends.agents.tolist())
        decided = {agent: life for agent, life in decided.items() if agent not in ended}
        decided |= dict.fromkeys(report.decisions.agents.tolist(), at)
    assert sums > 100


def test_a_step_in_which_nobody_decides_or_ends_has_no_report() -> None:
    """With slow members alone there; the game goes on without actions."""
    played = play(Crowd(1, 2, every=4), at_random, 2 * LIMIT)
    assert any(not reports for reports in played)
    assert any(reports and reports[0].decisions is None for reports in played)  # one ends, the other is slow
    assert played[0]
    assert played[LIMIT][0].ends is not None


def test_the_seed_decides_everything() -> None:
    """The same seed and actions give the same reports to the bit."""

    def observed(seed: int) -> bytes:
        game, random = Crowd(3), np.random.default_rng(1)
        reports, seen = game.reset({}, seed), b""
        for _ in range(60):
            rows = deciding(reports)
            assert rows is not None
            seen += rows.agents.tobytes() + rows.observations[0].tobytes()
            reports = game.step(act(rows.agents, random.integers(0, 3, rows.agents.size)))
        return seen

    assert observed(3) == observed(3) != observed(4)


def test_one_behavior_with_three_choices() -> None:
    (spec,) = Crowd().behaviors().values()
    assert [(one.name, one.shape) for one in spec.observations] == [("corridor", (OBSERVATION_SIZE,))]
    assert (spec.actions.continuous, spec.actions.discrete) == (0, (3,))


@pytest.mark.parametrize(("option", "value", "expected"), [("members", 1, "2 or more"), ("every", 0, "1 or more")])
def test_what_can_not_be_played_is_refused(option: str, value: int, expected: str) -> None:
    with pytest.raises(SettingsError, match=f"expected {expected}"):
        Crowd(**{option: value})
