"""Random scenes of self-play: no match ever meets two versions, and nothing is told of ghosts."""

from __future__ import annotations

import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.messages.codec import encode
from tests.stepping.matches_world import BehaviorIds, Kind, MatchScene, MatchSimulator, name_of, team_of

LAYOUTS: dict[str, BehaviorIds] = {
    "symmetric": ("A?team=0", "A?team=1"),
    "three": ("A?team=0", "A?team=1", "A?team=2"),
    "asymmetric": ("A?team=0", "B?team=1"),
    "mixed": ("A?team=0", "A?team=1", "B?team=2"),
}
KINDS: tuple[Kind, ...] = get_args(Kind)
kinds = pytest.mark.parametrize("kind", [*KINDS, None])
layouts = pytest.mark.parametrize("layout", LAYOUTS)


class Story:
    """A random scene.

    Args:
        kind: of all simulators; each its own where None.
        order: in which frames arrive.
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

    def come_back(self) -> None:
        """A simulator comes back, as a new one with its number, before its broken link is heard of."""
        former = self.rng.choice(list(self.scene.simulators))
        simulator = self.scene.simulators[former]
        again = MatchSimulator(
            simulator.number, random.Random(self.rng.random()), simulator.kind, simulator.sizes, simulator.several
        )
        self.scene.come_back(former, self.next, again)
        self.next += 1

    def assign(self) -> None:
        team = team_of(self.rng.choice(self.behavior_ids))
        self.scene.assign(self.scene.matchups.assignment(team, self.rng.randint(1, 3)))

    def go_on(self) -> None:
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
        scene.wake()

    def finish(self) -> None:
        """Everything is let go on once more, and all books are compared."""
        for name in self.scene.stepper.behaviors:
            self.scene.grant(name, 10**9)
        self.scene.wake()
        self.scene.check_steps()
        self.scene.check_results()


@layouts
@kinds
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), frames=st.integers(1, 25))
def test_every_action_of_a_match_is_chosen_by_the_policies_of_its_one_draw(
    layout: str, kind: Kind | None, seed: int, frames: int
) -> None:
    """And no match under way, whose team was learning when it began, loses a step or its result."""
    story = Story(seed, LAYOUTS[layout], kind)
    for _ in range(frames):
        story.go_on()
    story.finish()


@kinds
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), frames=st.integers(1, 25))
def test_so_are_those_of_simulators_that_come_back(kind: Kind | None, seed: int, frames: int) -> None:
    """With the number, the match ids and the groups of their former connection, which is heard to be broken later."""
    story = Story(seed, LAYOUTS["symmetric"], kind)
    for _ in range(frames):
        if story.scene.simulators and story.rng.random() < 0.2:
            story.come_back()
        story.go_on()
    story.finish()


@layouts
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), frames=st.integers(1, 25))
def test_it_holds_in_lockstep_too_where_the_order_of_arrival_changes_nothing(
    layout: str, seed: int, frames: int
) -> None:
    told = []
    for order in (seed, seed + 1):
        story = Story(seed, LAYOUTS[layout], None, lockstep=True, order=order)
        for _ in range(frames):
            story.go_on()
        story.finish()
        told.append([bytes(frame) for part in story.scene.parts for frame in encode(part)])
    assert told[0] == told[1]


@layouts
@kinds
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), frames=st.integers(1, 25))
def test_each_agent_carries_its_own_memory_whatever_others_carry(
    layout: str, kind: Kind | None, seed: int, frames: int
) -> None:
    """Policies that play at once carry 2 numbers, 3 and none; slots go from one to the other."""
    story = Story(seed, LAYOUTS[layout], kind, carried=(2, 3, 0))
    for _ in range(frames):
        story.go_on()
    story.finish()


@layouts
@kinds
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), frames=st.integers(1, 30))
def test_a_ghost_that_may_still_act_is_never_given_up(layout: str, kind: Kind | None, seed: int, frames: int) -> None:
    """Ghosts that are not in use are given up at each assignment, and all go on as before."""
    story = Story(seed, LAYOUTS[layout], kind, releasing=True)
    for _ in range(frames):
        story.go_on()
    story.finish()


def test_the_random_scenes_are_not_empty() -> None:
    """Over some seeds, all that can happen does: ghosts from elsewhere, changes of team in a match, slots given on."""
    elsewhere = changed = steps = ended = 0
    for seed in range(20):
        story = Story(seed, LAYOUTS["three"], None)
        for _ in range(25):
            story.go_on()
        story.finish()
        scene = story.scene
        played = {number for name in scene.names for one in scene.agent_episodes(name) for number in one.players}
        elsewhere += any(number < 0 for number in played)
        last = scene.stepper.matches.assignment
        assert last is not None
        agent_episodes = [one for simulator in scene.everyone() for one in simulator.living if one.taken]
        changed += sum(one.learns and one.contest.team != last.matchups[0].team for one in agent_episodes)
        steps += sum(scene.stepper.behaviors[name_of(behavior_id)].produced for behavior_id in story.behavior_ids)
        ended += len(scene.told_matches())
    assert elsewhere > 10
    assert changed > 10
    assert steps > 1000
    assert ended > 100
