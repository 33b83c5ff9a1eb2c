"""The PettingZoo bridge handles parallel and turn-based environments, masks, teams and groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from mpe2 import simple_spread_v3
from pettingzoo import AECEnv, ParallelEnv

from sparring.pipeline.bridges.pettingzoo import make_pettingzoo
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.simulation.game import Game
from sparring.pipeline.specs import ActionSpec, SpecError

Reports = Sequence[BehaviorReport]


def random_actions(game: Game, reports: Reports, random: np.random.Generator) -> dict[str, BehaviorActions]:
    """Returns legal random actions for all decisions."""
    actions = {}
    for report in reports:
        if (decisions := report.decisions) is None:
            continue
        spec, n = game.behaviors()[report.behavior].actions, len(decisions.agents)
        chances = random.random((n, spec.mask_size))
        if decisions.masks is not None:
            chances[decisions.masks] = -1
        ends = np.cumsum(spec.discrete, dtype=int)
        parts = [chances[:, end - size : end].argmax(1) for end, size in zip(ends, spec.discrete, strict=True)]
        actions[report.behavior] = BehaviorActions(
            behavior=report.behavior,
            agents=decisions.agents,
            continuous=random.uniform(-1, 1, (n, spec.continuous)).astype(np.float32),
            discrete=np.array(parts, np.int32).reshape(-1, n).T.copy(),
        )
    return actions


def rows(reports: Reports, part: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields behavior, agent and its columns for each row of `decisions` or `ends`."""
    for report in reports:
        columns = getattr(report, part)
        if columns is not None:
            for row, agent in enumerate(columns.agents.tolist()):
                names = ("rewards", "group_rewards", "groups", "matches", "masks", "interrupted")
                values = {name: getattr(columns, name, None) for name in names}
                picked = {name: None if value is None else value[row] for name, value in values.items()}
                yield report.behavior, agent, picked | {"observed": columns.observations[0][row]}


# ---------------------------------------------------------------- parallel


def test_each_area_equals_the_bare_environment_with_its_seed() -> None:
    random, areas = np.random.default_rng(0), 2
    game = make_pettingzoo("mpe2.simple_spread_v3", areas)
    bare = [simple_spread_v3.parallel_env() for _ in range(areas)]
    reports = game.reset({}, 4)
    first = [env.reset(seed=4 + area)[0] for area, env in enumerate(bare)]
    for _, agent, row in rows(reports, "decisions"):
        np.testing.assert_array_equal(row["observed"], first[agent // 3][f"agent_{agent % 3}"])
    for _ in range(24):
        actions = random_actions(game, reports, random)
        choices = actions["simple_spread?team=0"].discrete[:, 0].reshape(areas, 3)
        reports = game.step(actions)
        outcomes = [env.step(dict(zip(env.agents, choices[a].tolist(), strict=True))) for a, env in enumerate(bare)]
        for _, agent, row in rows(reports, "decisions"):
            observations, rewards, *_ = outcomes[agent // 3]
            np.testing.assert_array_equal(row["observed"], observations[f"agent_{agent % 3}"])
            assert row["rewards"] == np.float32(rewards[f"agent_{agent % 3}"])


def test_a_limit_interrupts_and_the_next_episode_begins_in_the_same_report() -> None:
    game, random = make_pettingzoo("mpe2.simple_spread_v3", 2, max_cycles=5), np.random.default_rng(0)
    reports = game.reset({}, 0)
    for frame in range(1, 16):
        reports = game.step(random_actions(game, reports, random))
        assert [agent for _, agent, _ in rows(reports, "decisions")] == list(range(6))
        ended = list(rows(reports, "ends"))
        assert [agent for _, agent, _ in ended] == (list(range(6)) if frame % 5 == 0 else [])
        assert all(row["interrupted"] for _, _, row in ended)
        if ended:
            assert all(row["rewards"] == 0 for _, _, row in rows(reports, "decisions"))
    game.close()


def test_simple_spread_has_one_behavior_with_its_spaces() -> None:
    (identity, spec), *others = make_pettingzoo("mpe2.simple_spread_v3").behaviors().items()
    assert not others
    assert identity == "simple_spread?team=0"
    assert spec.observations[0].shape == (18,)
    assert spec.actions == ActionSpec(discrete=(5,))
    assert make_pettingzoo("mpe2.simple_spread_v3", continuous_actions=True).behaviors()[
        identity
    ].actions == ActionSpec(continuous=5)


def test_agents_of_an_area_form_a_group_and_a_shared_reward_is_a_group_reward() -> None:
    random = np.random.default_rng(0)
    own = make_pettingzoo("mpe2.simple_spread_v3", 2)
    shared = make_pettingzoo("mpe2.simple_spread_v3", 2, groups=True, shared_reward=True)
    reports = own.reset({}, 1)
    shared.reset({}, 1)
    actions = random_actions(own, reports, random)
    mine = {agent: row for _, agent, row in rows(own.step(actions), "decisions")}
    ours = {agent: row for _, agent, row in rows(shared.step(actions), "decisions")}
    for agent, row in ours.items():
        area = agent // 3
        assert mine[agent]["groups"] is None
        assert row["groups"] == 1 + area
        assert row["rewards"] == 0
        mean = np.mean([mine[3 * area + mate]["rewards"] for mate in range(3)])
        assert row["group_rewards"] == pytest.approx(mean, rel=1e-5)


def test_agent_types_become_the_given_behaviors_and_teams() -> None:
    adversary = make_pettingzoo("mpe2.simple_adversary_v3", behaviors="per_type")
    assert set(adversary.behaviors()) == {"adversary?team=0", "agent?team=0"}
    assert adversary.behaviors()["adversary?team=0"] != adversary.behaviors()["agent?team=0"]
    sides = make_pettingzoo("mpe2.simple_adversary_v3", behaviors="per_type", teams="per_type", groups=True)
    assert set(sides.behaviors()) == {"adversary?team=0", "agent?team=1"}
    found = {(behavior, row["groups"], row["matches"]) for behavior, _, row in rows(sides.reset({}, 1), "decisions")}
    assert found == {("adversary?team=0", 1, 1), ("agent?team=1", 2, 1)}
    each = make_pettingzoo("mpe2.simple_spread_v3", teams="each", behavior="Spread")
    assert list(each.behaviors()) == ["Spread?team=0", "Spread?team=1", "Spread?team=2"]


def test_agents_of_one_behavior_must_share_their_spaces() -> None:
    with pytest.raises(SpecError, match="behaviors=per_type"):
        make_pettingzoo("mpe2.simple_adversary_v3")


class Shrinking(ParallelEnv[str, Any, Any]):
    """Three agents that observe the frame; agent i ends after i + 1 steps, the last one by truncation."""

    def __init__(self) -> None:
        self.possible_agents = ["a_0", "a_1", "a_2"]

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Dict({"observation": spaces.Box(0, 9, (1,)), "action_mask": spaces.MultiBinary(4)})

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.MultiDiscrete([2, 2])

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents, self.frame = list(self.possible_agents), 0
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, Any]) -> Any:
        assert set(actions) == set(self.agents)
        assert all(action.tolist() == [1, 0] for action in actions.values())
        self.frame += 1
        observations = self._observe()
        over = {agent: int(agent[-1]) < self.frame for agent in self.agents}
        last = {agent: agent == "a_2" for agent in self.agents}
        result = (
            observations,
            {agent: float(self.frame) for agent in self.agents},
            {agent: over[agent] and not last[agent] for agent in self.agents},
            {agent: over[agent] and last[agent] for agent in self.agents},
            {agent: {} for agent in self.agents},
        )
        self.agents = [agent for agent in self.agents if not over[agent]]
        return result

    def _observe(self) -> dict[str, Any]:
        mask = np.array([0, 1, 1, 0], np.int8)
        return {a: {"observation": np.array([self.frame], np.float32), "action_mask": mask} for a in self.agents}

    def close(self) -> None:
        """Does nothing."""


class Relay(AECEnv[str, Any, Any]):
    """Three agents in turn with masks in the infos; each action earns 1 for every other agent.

    The second action ends `late` before it had a turn; the fifth truncates the others.
    """

    metadata: dict[str, Any] = {"name": "relay_v0"}  # noqa: RUF012  as PettingZoo has it

    def __init__(self) -> None:
        self.possible_agents = ["first", "second", "late"]

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, 99, (1,))

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3, start=10)

    def observe(self, agent: str) -> Any:
        return np.array([self.count], np.float32)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.agents, self.count = list(self.possible_agents), 0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {"action_mask": np.array([0, 1, 0], np.int8)} for agent in self.agents}
        self.agent_selection = "first"

    def step(self, action: Any) -> None:
        if self.terminations[self.agent_selection] or self.truncations[self.agent_selection]:
            self._was_dead_step(action)
            return
        assert action == 11
        mover, self.count = self.agent_selection, self.count + 1
        self._cumulative_rewards[mover] = 0.0
        for agent in self.agents:
            self._cumulative_rewards[agent] += float(agent != mover)
        if self.count == 2:
            self.terminations["late"] = True
        if self.count == 5:
            self.truncations = dict.fromkeys(self.agents, True)
        self.agent_selection = "second" if mover == "first" else "first"
        self._deads_step_first()


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers environments under module names, as PettingZoo does."""
    for name, attribute, factory in (("shrinking_v0", "parallel_env", Shrinking), ("relay_v0", "env", Relay)):
        module = ModuleType(name)
        setattr(module, attribute, factory)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "nothing_v0", ModuleType("nothing_v0"))


@pytest.mark.usefixtures("modules")
def test_agents_of_a_parallel_environment_end_one_by_one_and_begin_together() -> None:
    game, random = make_pettingzoo("shrinking_v0"), np.random.default_rng(0)
    reports = game.reset({}, 0)
    for _ in range(3):
        expected = [([1, 2], [(0, False)]), ([2], [(1, False)]), ([0, 1, 2], [(2, True)])]
        for frame, (deciding, ended) in enumerate(expected, 1):
            reports = game.step(random_actions(game, reports, random))
            assert [agent for _, agent, _ in rows(reports, "decisions")] == deciding
            assert [(agent, row["interrupted"]) for _, agent, row in rows(reports, "ends")] == ended
            assert all(row["rewards"] == frame and row["observed"] == frame for _, _, row in rows(reports, "ends"))
            for _, _, row in rows(reports, "decisions"):
                assert row["rewards"] == (frame if frame < 3 else 0)
                assert row["masks"].tolist() == [True, False, False, True]


class Sides(Shrinking):
    """Two teams of two, red against blue; the reds get 1 and 3, the blues lose as much, and each episode is a step."""

    def __init__(self) -> None:
        self.possible_agents = ["red_0", "blue_0", "red_1", "blue_1"]

    def step(self, actions: Mapping[str, Any]) -> Any:
        self.frame += 1
        rewards = dict(zip(self.agents, (1.0, -1.0, 3.0, -3.0), strict=True))
        over, never = (dict.fromkeys(self.agents, value) for value in (True, False))
        result = self._observe(), rewards, over, never, {agent: {} for agent in self.agents}
        self.agents = []
        return result


@pytest.mark.parametrize("shared", [False, True])
def test_each_team_of_an_area_shares_its_own_reward_and_wins_by_it(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setitem(sys.modules, "sides_v0", SimpleNamespace(parallel_env=Sides))
    game = make_pettingzoo("sides_v0", 2, teams="per_type", groups=True, shared_reward=shared, outcomes=True)
    reports = game.step(random_actions(game, game.reset({}, 0), np.random.default_rng(0)))
    for report in reports:
        (ended, sign) = (report.ends, 1 if report.behavior.endswith("team=0") else -1)
        assert ended is not None
        assert ended.outcomes is not None
        assert ended.outcomes.tolist() == [0.5 + 0.5 * sign] * 4
        if shared:
            assert ended.group_rewards is not None
            assert ended.group_rewards.tolist() == [2.0 * sign] * 4
        assert ended.rewards.tolist() == ([0.0] * 4 if shared else [1.0 * sign, 3.0 * sign] * 2)


# ---------------------------------------------------------------- turn-based


@pytest.mark.usefixtures("modules")
def test_turn_based_rewards_accumulate_and_an_agent_that_never_decided_does_not_end() -> None:
    game, random = make_pettingzoo("relay_v0", 2), np.random.default_rng(0)
    reports = game.reset({}, 0)
    turns = [
        ([(1, 1.0)], []), ([(0, 1.0)], []), ([(1, 1.0)], []), ([(0, 1.0)], []),
        ([(0, 0.0)], [(0, 0.0, True), (1, 1.0, True)]),
    ]  # fmt: skip
    for _ in range(2):
        for deciding, ended in turns:
            for _, _, row in rows(reports, "decisions"):
                assert row["masks"].tolist() == [True, False, True]
            reports = game.step(random_actions(game, reports, random))
            for area in range(2):
                own = [(a - 3 * area, row) for _, a, row in rows(reports, "decisions") if a // 3 == area]
                assert [(agent, row["rewards"]) for agent, row in own] == deciding
                over = [(a - 3 * area, row) for _, a, row in rows(reports, "ends") if a // 3 == area]
                assert [(agent, row["rewards"], row["interrupted"]) for agent, row in over] == ended


def test_tictactoe_is_played_by_its_rules() -> None:
    """Only legal moves are possible, both sides end together, and the winner earns what the loser loses."""
    game, random = make_pettingzoo("pettingzoo.classic.tictactoe_v3", 4, teams="each"), np.random.default_rng(0)
    assert set(game.behaviors()) == {"tictactoe?team=0", "tictactoe?team=1"}
    reports = game.reset({}, 0)
    results = []
    for _ in range(200):
        for _, _, row in rows(reports, "decisions"):
            board = row["observed"].reshape(3, 3, 2).sum(axis=2).astype(bool)
            np.testing.assert_array_equal(row["masks"], board.reshape(9), "occupied squares are forbidden")
        reports = game.step(random_actions(game, reports, random))
        ended: dict[int, dict[str, float]] = {}
        for behavior, _, row in rows(reports, "ends"):
            assert not row["interrupted"]
            ended.setdefault(row["matches"], {})[behavior] = row["rewards"]
        for rewards in ended.values():
            assert len(rewards) == 2
            assert sum(rewards.values()) == 0
            results.append(rewards["tictactoe?team=0"])
        going_on = {row["matches"] for _, _, row in rows(reports, "decisions")}
        assert len(going_on) == 4
        assert not going_on & ended.keys(), "the next contest is another match"
    assert {-1.0, 1.0} <= set(results)


def test_connect_four_has_two_teams_of_one_behavior_with_outcomes() -> None:
    """Full columns are forbidden, both sides end in one Step, and the outcome is 1, 0.5 or 0."""
    game = make_pettingzoo("pettingzoo.classic.connect_four_v3", 4, behavior="ConnectFour", teams="each", outcomes=True)
    assert list(game.behaviors()) == ["ConnectFour?team=0", "ConnectFour?team=1"]
    assert len(set(map(repr, game.behaviors().values()))) == 1
    random, over = np.random.default_rng(0), dict[int, list[float]]()
    reports = game.reset({}, 0)
    for _ in range(150):
        for _, _, row in rows(reports, "decisions"):
            full = row["observed"].reshape(6, 7, 2)[0].any(axis=1)
            np.testing.assert_array_equal(row["masks"], full)
            assert row["matches"] not in over, "the next contest is another match"
        reports = game.step(random_actions(game, reports, random))
        ended: dict[int, list[float]] = {}
        for report in reports:
            if report.ends is not None:
                np.testing.assert_array_equal(report.ends.outcomes, 0.5 + report.ends.rewards / 2)
                assert not report.ends.interrupted.any()
                for match, outcome in zip(report.ends.matches.tolist(), report.ends.outcomes.tolist(), strict=True):
                    ended.setdefault(match, []).append(outcome)
        assert not over.keys() & ended.keys()
        over |= ended
    assert len(over) > 10
    assert all(len(pair) == 2 and sum(pair) == 1 for pair in over.values())
    assert {1.0, 0.0} <= {pair[0] for pair in over.values()}, "either side wins at times"


def test_the_turn_based_form_of_a_parallel_game_gives_the_same_first_observations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("spread_turns_v3")
    module.env = simple_spread_v3.env  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spread_turns_v3", module)
    game, random = make_pettingzoo("spread_turns_v3", 2, max_cycles=4), np.random.default_rng(0)
    reports = game.reset({}, 3)
    bare = simple_spread_v3.parallel_env()
    first = bare.reset(seed=3)[0]["agent_0"]
    np.testing.assert_array_equal(next(rows(reports, "decisions"))[2]["observed"], first)
    ends = []
    for _ in range(4 * 3 * 2):
        reports = game.step(random_actions(game, reports, random))
        assert len(list(rows(reports, "decisions"))) == 2
        ends += [(agent, row["interrupted"]) for _, agent, row in rows(reports, "ends")]
    assert sorted(ends) == sorted([(agent, True) for agent in range(6)] * 2)


# ---------------------------------------------------------------- invalid input


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    "wrong",
    [
        {"env_id": "no.such.module_v1"},
        {"env_id": "nothing_v0"},
        {"env_id": "shrinking_v0", "gravity": 9.81},
        {"env_id": "shrinking_v0", "areas": 0},
        {"env_id": "shrinking_v0", "teams": "red"},
        {"env_id": "shrinking_v0", "behaviors": "many"},
        {"env_id": "shrinking_v0", "shared_reward": True},
        {"env_id": "relay_v0", "groups": True, "shared_reward": True},
        {"env_id": "relay_v0", "outcomes": True},
    ],
    ids=str,
)
def test_an_environment_that_cannot_be_made_is_refused_with_a_remedy(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"got .*; expected .*; "):
        make_pettingzoo(**wrong)
