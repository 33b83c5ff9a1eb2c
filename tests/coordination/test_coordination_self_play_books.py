"""Ghosts' steps in the books: produced and done with at once, outside of any budget, over all restarts."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.messages.state import ProducedSteps
from tests.coordination.coordination_parts import produced, segments
from tests.coordination.coordination_world import Pipeline


def new_ledger(**said: Any) -> StepLedger:
    return StepLedger(buffer_size=20, overlap=1, **said)


def told(steps: int, ghosts: int, *, agents: int = 4) -> ProducedSteps:
    return replace(produced(steps, 0, 0, agents), ghosts=ghosts)


def test_ghosts_steps_are_produced_and_ghost_at_once() -> None:
    """They are never open, in flight or waiting, and no cut is made for them."""
    ledger = new_ledger()
    ledger.stepped("stepping-0.1", told(0, 10_000))
    found = ledger.step_counts()
    assert (found.produced, found.ghost, found.open) == (10_000, 10_000, 0)
    assert (ledger.in_flight, ledger.waiting) == (0, 0)
    assert not ledger.next_flush()


def test_ghosts_steps_take_no_budget() -> None:
    """A run whose ghosts have played for long gets the same permits as one without ghosts."""
    one, other = new_ledger(), new_ledger()
    for steps in range(0, 40, 5):
        one.stepped("stepping-0.1", told(steps, 1000 * steps))
        other.stepped("stepping-0.1", told(steps, 0))
        assert one.next_flush() == other.next_flush()
        mine, others = one.allowances()["stepping-0.1"], other.allowances()["stepping-0.1"]
        assert (mine.serial, mine.steps) == (others.serial, others.steps)


def test_what_comes_late_takes_nothing_back() -> None:
    """Boards and segments tell of ghosts in any order: the highest count of a source is right."""
    ledger = new_ledger()
    ledger.stepped("stepping-0.1", told(0, 50))
    late = replace(segments("stepping-0.1", "assembly.1", 1, steps=0, began=0, received=0, orphaned=0), ghosts=30)
    ledger.routed(late)
    assert ledger.ghosts == 50
    ledger.routed(replace(late, sequence=2, ghosts=70))
    ledger.stepped("stepping-0.1", told(0, 60))
    assert ledger.ghosts == ledger.step_counts().ghost == 70


def test_what_a_dead_process_had_played_stays_in_the_books() -> None:
    """Its successor counts from zero; the sum goes on, and nothing of it is lost."""
    ledger = new_ledger()
    ledger.stepped("stepping-0.1", told(5, 50))
    ledger.source_gone("stepping-0.1")
    ledger.stepped("stepping-0.2", told(0, 7))
    ledger.source_closed("stepping-0.1")
    found = ledger.step_counts()
    assert (found.ghost, found.lost, found.produced) == (57, 5, 62)


# ---------------------------------------------------------------- beside plain sums


@dataclass
class Played:
    """One start of a stepping process, as the test knows it."""

    steps: int = 0
    ghosts: int = 0
    heard: int = 0


@settings(max_examples=150)
@given(moves=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2), st.integers(0, 50)), min_size=1, max_size=60))
def test_the_sum_holds_over_any_history(moves: list[tuple[int, int, int]]) -> None:
    """Stepping and coordination die at any moment: ghosts are the highest counts that were heard, added up."""
    ledger = new_ledger(processes=3)
    starts, sources = [1, 1, 1], [Played(), Played(), Played()]
    known: dict[str, int] = {}
    saved = json.dumps(ledger.to_plain())
    kept = dict(known)
    for move, at, amount in moves:
        name, source = f"stepping-{at}.{starts[at]}", sources[at]
        if move in (0, 1):
            source.ghosts += amount
        elif move in (2, 3):
            ledger.stepped(name, told(source.steps, source.ghosts))
            known[name] = source.ghosts
        elif move == 4:
            ledger.source_gone(name)
            starts[at], sources[at] = starts[at] + 1, Played()
        elif move == 5:
            saved, kept = json.dumps(ledger.to_plain()), dict(known)
        else:
            ledger, known = new_ledger(processes=3), dict(kept)
            ledger.restore(json.loads(saved))
        found = ledger.step_counts()
        assert ledger.ghosts == found.ghost == sum(known.values())
        assert found.produced == found.trained + found.ghost + found.stale + found.lost + found.open


# ---------------------------------------------------------------- in the tiny pipeline


class Ghostly(Pipeline):
    """The tiny pipeline, in which ghosts play beside those that learn.

    With each tick they play some steps; boards tell of them as they tell of all else.
    """

    def __init__(self, rng: random.Random, *, each: int, **sizes: Any) -> None:
        self.each = each
        self.dice = random.Random(each)
        self.played: dict[str, int] = {}
        self.heard_of: dict[str, int] = {}
        super().__init__(rng, **sizes)

    def wake(self, stepping: Any) -> None:
        super().wake(stepping)
        self.played[stepping.source] = self.played.get(stepping.source, 0) + self.dice.randrange(self.each + 1)

    def publish(self, stepping: Any) -> None:
        super().publish(stepping)
        source, said = self.board_stepping[stepping.service]
        if said is not None:
            self.board_stepping[stepping.service] = source, replace(said, ghosts=self.played.get(source, 0))

    def hear_stepping(self, stepping: Any) -> None:
        super().hear_stepping(stepping)
        source, said = self.board_stepping.get(stepping.service, ("", None))
        if said is not None:
            self.heard_of[source] = max(self.heard_of.get(source, 0), said.ghosts)


def granted(world: Pipeline) -> dict[str, tuple[int, int]]:
    return {name: (allowance.serial, allowance.steps) for name, allowance in world.ledger.allowances().items()}


def sizes(data: Any) -> dict[str, Any]:
    return {
        "buffer_size": data.draw(st.sampled_from([4, 16, 50])),
        "overlap": data.draw(st.sampled_from([0, 1])),
        "simulators": data.draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=2), min_size=1, max_size=2)),
        "horizon": data.draw(st.sampled_from([1, 5, 1000])),
    }


@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**32), each=st.integers(0, 9))
def test_with_ghosts_a_pipeline_does_what_it_does_without(data: Any, seed: int, each: int) -> None:
    """The same schedule: permits, cuts, updates and all other terms of the books are the same, step by step."""
    said = sizes(data)
    one, other = Ghostly(random.Random(seed), each=each, **said), Ghostly(random.Random(seed), each=0, **said)
    for _ in range(250):
        one.step()
        other.step()
        assert granted(one) == granted(other)
        mine, others = one.ledger.step_counts(), other.ledger.step_counts()
        assert mine.ghost == sum(one.heard_of.values())
        assert mine.produced - mine.ghost == others.produced - others.ghost
        assert (mine.trained, mine.stale, mine.lost, mine.open) == (
            others.trained,
            others.stale,
            others.lost,
            others.open,
        )
    assert one.updates == other.updates


@settings(max_examples=40)
@given(
    data=st.data(),
    seed=st.integers(0, 2**32),
    kills=st.lists(st.sampled_from(["stepping", "coordination", "assembly"]), min_size=1, max_size=4),
)
def test_over_crashes_the_books_with_ghosts_balance(data: Any, seed: int, kills: list[str]) -> None:
    """Every step produced is trained, a ghost's, stale, lost or open; what ghosts of the dead played stays."""
    world = Ghostly(random.Random(seed), each=6, **sizes(data))
    for kill in kills:
        for _ in range(120):
            world.step()
        world.save()
        before = world.ledger.ghosts
        if kill == "stepping":
            world.kill_stepping(seed % world.processes)
        else:
            getattr(world, f"kill_{kill}")()
        assert world.ledger.ghosts == before
        for _ in range(120):
            world.step()
            found = world.ledger.step_counts()
            assert found.produced == found.trained + found.ghost + found.stale + found.lost + found.open
            assert found.ghost == world.ledger.ghosts == sum(world.heard_of.values())
