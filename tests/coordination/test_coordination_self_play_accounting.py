"""Steps of ghosts in step accounting: produced and done at once, outside the step budget, over all restarts."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.messages.state import ProducedSteps
from tests.coordination.coordination_world import Pipeline
from tests.coordination.ledger_parts import FIRST, SECOND, new_ledger, produced, state, through_json


def with_ghosts(steps: int, ghosts: int, *, agents: int = 4) -> ProducedSteps:
    return produced(steps, agents=agents, ghosts=ghosts)


def test_steps_of_ghosts_count_as_produced_and_ghost_at_once() -> None:
    """They are never open, in flight or waiting, and need no flush."""
    ledger = new_ledger(20)
    ledger.on_produced(FIRST, with_ghosts(0, 10_000))
    found = ledger.step_counts()
    assert (found.produced, found.ghost, found.open) == (10_000, 10_000, 0)
    assert (ledger.in_flight, ledger.open) == (0, 0)
    assert not ledger.next_flush()


def test_steps_of_ghosts_take_no_budget() -> None:
    """A run with many ghost steps gets the same allowances as one without ghosts."""
    one, other = new_ledger(20), new_ledger(20)
    for steps in range(0, 40, 5):
        one.on_produced(FIRST, with_ghosts(steps, 1000 * steps))
        other.on_produced(FIRST, with_ghosts(steps, 0))
        assert one.next_flush() == other.next_flush()
        mine, others = one.allowances()[FIRST], other.allowances()[FIRST]
        assert (mine.serial, mine.steps) == (others.serial, others.steps)


def test_ghost_steps_of_a_dead_process_stay_counted() -> None:
    """Its successor counts from zero; the sum continues, and no ghost step is lost."""
    ledger = new_ledger(20)
    ledger.on_produced(FIRST, with_ghosts(5, 50))
    ledger.retire(FIRST)
    ledger.on_produced(SECOND, with_ghosts(0, 7))
    ledger.on_learner_state(state(reached={FIRST: 0, SECOND: 0}))
    found = ledger.step_counts()
    assert (found.ghost, found.lost, found.produced) == (57, 5, 62)


# ---------------------------------------------------------------- compared with plain sums


@dataclass
class Incarnation:
    """One incarnation of a stepping process, as the test counts it."""

    steps: int = 0
    ghosts: int = 0


@settings(max_examples=75)
@given(moves=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2), st.integers(0, 50)), min_size=1, max_size=60))
def test_step_counts_balance_over_any_history(moves: list[tuple[int, int, int]]) -> None:
    """Ghost steps are the sum of the highest received counts, whenever stepping and coordination crash."""
    ledger = new_ledger(20, processes=3)
    incarnations, sources = [1, 1, 1], [Incarnation(), Incarnation(), Incarnation()]
    known: dict[str, int] = {}
    saved = through_json(ledger)
    kept = dict(known)
    for move, at, amount in moves:
        name, source = f"stepping-{at}.5f3a-{incarnations[at]}", sources[at]
        if move in (0, 1):
            source.ghosts += amount
        elif move in (2, 3):
            ledger.on_produced(name, with_ghosts(source.steps, source.ghosts))
            known[name] = source.ghosts
        elif move == 4:
            if name in ledger.sources:
                ledger.retire(name)
            incarnations[at], sources[at] = incarnations[at] + 1, Incarnation()
        elif move == 5:
            saved, kept = through_json(ledger), dict(known)
        else:
            ledger, known = new_ledger(20, processes=3).continue_from(through_json(saved)), dict(kept)
        found = ledger.step_counts()
        assert ledger.ghosts == found.ghost == sum(known.values())
        assert found.produced == found.trained + found.ghost + found.stale + found.lost + found.open


# ---------------------------------------------------------------- in the tiny pipeline


class PipelineWithGhosts(Pipeline):
    """The tiny pipeline with ghosts, which play some steps in each tick; topics report them with all other counts."""

    def __init__(self, rng: random.Random, *, each: int, **sizes: Any) -> None:
        self.each = each
        self.dice = random.Random(each)
        self.played: dict[str, int] = {}
        self.received: dict[str, int] = {}
        super().__init__(rng, **sizes)

    def tick(self, stepping: Any) -> None:
        super().tick(stepping)
        self.played[stepping.source] = self.played.get(stepping.source, 0) + self.dice.randrange(self.each + 1)

    def publish(self, stepping: Any) -> None:
        super().publish(stepping)
        state = self.stepping_topic[stepping.service]
        report = replace(state.behaviors["B"], ghosts=self.played.get(state.source, 0))
        self.stepping_topic[stepping.service] = replace(state, behaviors={"B": report})

    def receive_produced(self, stepping: Any) -> None:
        super().receive_produced(stepping)
        state = self.stepping_topic.get(stepping.service)
        if state is not None:
            self.received[state.source] = max(self.received.get(state.source, 0), state.behaviors["B"].ghosts)


def granted(world: Pipeline) -> dict[str, tuple[int, int]]:
    return {name: (allowance.serial, allowance.steps) for name, allowance in world.ledger.allowances().items()}


def pipeline_sizes(data: Any) -> dict[str, Any]:
    return {
        "buffer_size": data.draw(st.sampled_from([4, 16, 50])),
        "overlap": data.draw(st.sampled_from([0, 1])),
        "simulators": data.draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=2), min_size=1, max_size=2)),
        "horizon": data.draw(st.sampled_from([1, 5, 1000])),
    }


@settings(max_examples=20)
@given(data=st.data(), seed=st.integers(0, 2**32), each=st.integers(0, 9))
def test_ghosts_change_no_other_term_of_the_pipeline(data: Any, seed: int, each: int) -> None:
    """Under the same schedule allowances, flushes, updates and all other counts are the same, step by step."""
    sizes = pipeline_sizes(data)
    one, other = (PipelineWithGhosts(random.Random(seed), each=some, **sizes) for some in (each, 0))
    for _ in range(250):
        one.step()
        other.step()
        assert granted(one) == granted(other)
        mine, others = one.ledger.step_counts(), other.ledger.step_counts()
        assert mine.ghost == sum(one.received.values())
        assert mine.produced - mine.ghost == others.produced - others.ghost
        assert (mine.trained, mine.stale, mine.lost, mine.open) == (
            others.trained,
            others.stale,
            others.lost,
            others.open,
        )
    assert one.updates == other.updates


@settings(max_examples=20)
@given(
    data=st.data(),
    seed=st.integers(0, 2**32),
    kills=st.lists(st.sampled_from(["stepping", "coordination", "assembly"]), min_size=1, max_size=4),
)
def test_step_counts_with_ghosts_balance_over_crashes(data: Any, seed: int, kills: list[str]) -> None:
    """Each produced step is trained, a ghost's, stale, lost or open; ghost steps of crashed processes stay counted."""
    world = PipelineWithGhosts(random.Random(seed), each=6, **pipeline_sizes(data))
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
            assert found.ghost == world.ledger.ghosts == sum(world.received.values())
