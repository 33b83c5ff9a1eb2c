"""Random self-play: no match ever mixes two matchups, and ghosts are never reported."""

from __future__ import annotations

import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.messages.codec import encode
from tests.stepping.matches_scene import MatchScene
from tests.stepping.matches_simulator import BehaviorIds, Kind, MatchSimulator, name_of, team_of

LAYOUTS: dict[str, BehaviorIds] = {
    "symmetric": ("A?team=0", "A?team=1"),
    "three": ("A?team=0", "A?team=1", "A?team=2"),
    "asymmetric": ("A?team=0", "B?team=1"),
    "mixed": ("A?team=0", "A?team=1", "B?team=2"),
}
KINDS: tuple[Kind, ...] = get_args(Kind)
KINDS_OR_NONE = st.sampled_from([*KINDS, None])
MEMORIES = st.sampled_from([(0, 0, 0), (2, 3, 0)])
layouts = pytest.mark.parametrize("layout", LAYOUTS)


class RandomMatches:
    """Random simulators, assignments and allowances around a stepper.

    Args:
        kind: of all simulators; None chooses one for each.
        order: seed of the order in which frames arrive.
    """

    def __init__(
        self,
        seed: int,
        behavior_ids: BehaviorIds,
        kind: Kind | None,
        *,
        lockstep: bool = False,
        releasing: bool = False,
        carried: tuple[int, int, int] = (0, 0, 0),
        order: int = 0,
    ) -> None:
        self.rng, self.order = random.Random(seed), random.Random(order)
        self.behavior_ids, self.kind, self.lockstep = behavior_ids, kind, lockstep
        simulators = self.rng.randint(1, 4)
        self.scene = MatchScene(
            behavior_ids, lockstep=lockstep, expected=simulators, releasing=releasing, carried=carried
        )
        self.next = 0
        for _ in range(simulators):
            self.connect()
        self.assign()

    def connect(self) -> None:
        sizes = {behavior_id: self.rng.randint(1, 3) for behavior_id in self.behavior_ids}
        kind: Kind = self.rng.choice(KINDS) if self.kind is None else self.kind
        rng = random.Random(self.rng.random())
        simulator = MatchSimulator(self.next, rng, kind, sizes, contests=self.rng.randint(1, 3))
        self.scene.connect(self.next, simulator)
        self.next += 1

    def reconnect(self) -> None:
        """Reconnects a simulator under its own number before the stepper notices its broken connection."""
        former = self.rng.choice(list(self.scene.simulators))
        simulator = self.scene.simulators[former]
        again = MatchSimulator(
            simulator.number, random.Random(self.rng.random()), simulator.kind, simulator.sizes, simulator.concurrent
        )
        self.scene.reconnect(former, self.next, again)
        self.next += 1

    def assign(self) -> None:
        team = team_of(self.rng.choice(self.behavior_ids))
        self.scene.assign(self.scene.matchups.assignment(team, self.rng.randint(1, 3)))

    def advance(self) -> None:
        scene, rng = self.scene, self.rng
        ready = scene.ready()
        self.order.shuffle(ready)
        for key in ready:
            if self.lockstep or rng.random() < 0.7:
                scene.send(key)
        if rng.random() < 0.2:
            self.assign()
        if not self.lockstep and scene.simulators and rng.random() < 0.04:
            scene.disconnect(rng.choice(list(scene.simulators)))
        if not self.lockstep and rng.random() < 0.04:
            self.connect()
        if rng.random() < 0.2:
            for name, behavior in scene.stepper.behaviors.items():
                scene.grant(name, behavior.produced + rng.choice([0, 3, 10**6]))
        scene.tick()

    def finish(self) -> None:
        """Grants every allowance once more, and compares all steps and results."""
        for name in self.scene.stepper.behaviors:
            self.scene.grant(name, 10**9)
        self.scene.tick()
        self.scene.check_steps()
        self.scene.check_results()


@layouts
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), frames=st.integers(1, 25), kind=KINDS_OR_NONE, carried=MEMORIES)
def test_policies_of_one_matchup_choose_every_action_of_a_match(
    layout: str, seed: int, frames: int, kind: Kind | None, carried: tuple[int, int, int]
) -> None:
    """No match whose team learned when it began loses a step or its result, and no agent its memory.

    Policies that play at once carry 2 numbers, 3 and none, and reuse each other's slots.
    """
    run = RandomMatches(seed, LAYOUTS[layout], kind, carried=carried)
    for _ in range(frames):
        run.advance()
    run.finish()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), frames=st.integers(1, 25), kind=KINDS_OR_NONE)
def test_policies_of_one_matchup_choose_every_action_after_a_reconnect(
    seed: int, frames: int, kind: Kind | None
) -> None:
    """The new connection reuses number, match ids and groups before the stepper notices the broken one."""
    run = RandomMatches(seed, LAYOUTS["symmetric"], kind)
    for _ in range(frames):
        if run.scene.simulators and run.rng.random() < 0.2:
            run.reconnect()
        run.advance()
    run.finish()


@layouts
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), frames=st.integers(1, 25))
def test_lockstep_results_do_not_depend_on_the_order_of_arrival(layout: str, seed: int, frames: int) -> None:
    encoded = []
    for order in (seed, seed + 1):
        run = RandomMatches(seed, LAYOUTS[layout], None, lockstep=True, order=order)
        for _ in range(frames):
            run.advance()
        run.finish()
        encoded.append([bytes(frame) for part in run.scene.parts for frame in encode(part)])
    assert encoded[0] == encoded[1]


@layouts
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), frames=st.integers(1, 30), kind=KINDS_OR_NONE)
def test_a_ghost_that_may_still_act_is_never_released(layout: str, seed: int, frames: int, kind: Kind | None) -> None:
    """Releasing unused ghosts at each assignment changes nothing."""
    run = RandomMatches(seed, LAYOUTS[layout], kind, releasing=True)
    for _ in range(frames):
        run.advance()
    run.finish()


def test_the_random_matches_cover_every_event() -> None:
    """Some seeds reach external opponents, changes of the learning team during a match, and many results."""
    external = changed = steps = ended = 0
    for seed in range(20):
        run = RandomMatches(seed, LAYOUTS["three"], None)
        for _ in range(25):
            run.advance()
        run.finish()
        scene = run.scene
        played = {number for name in scene.names for one in scene.agent_episodes(name) for number in one.players}
        external += any(number < 0 for number in played)
        last = scene.stepper.matches.assignment
        assert last is not None
        episodes = [one for simulator in scene.everyone() for one in simulator.living if one.taken]
        changed += sum(one.learns and one.contest.team != last.matchups[0].team for one in episodes)
        steps += sum(scene.stepper.behaviors[name_of(behavior_id)].produced for behavior_id in run.behavior_ids)
        ended += len(scene.reported_matches())
    assert external > 10
    assert changed > 10
    assert steps > 1000
    assert ended > 100
