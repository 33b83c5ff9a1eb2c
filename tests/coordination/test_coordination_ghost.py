"""Steps that are played and not learned from: step counts balance, and the budget never stalls the run."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.messages.state import LearnerState
from tests.coordination.coordination_world import Pipeline
from tests.coordination.ledger_parts import FIRST, produced, state, terms, through_json


class PlayingPipeline(Pipeline):
    """The tiny pipeline with a player in the learner's place, which takes steps without training on them."""

    def __init__(self, rng: random.Random, **sizes: Any) -> None:
        self.played: list[int] = []
        super().__init__(rng, **sizes)

    @property
    def ready(self) -> bool:
        return False

    def receive_steps(self, steps: list[int]) -> None:
        self.played += steps

    def _learner_state(self) -> LearnerState:
        return replace(super()._learner_state(), ghost=len(self.played))


def playing_pipelines(*, processes: int = 2) -> st.SearchStrategy[PlayingPipeline]:
    return st.builds(
        lambda seed, buffer_size, overlap, simulators, horizon: PlayingPipeline(
            random.Random(seed), buffer_size=buffer_size, overlap=overlap, simulators=simulators, horizon=horizon
        ),
        seed=st.integers(0, 2**32),
        buffer_size=st.sampled_from([4, 16, 50]),
        overlap=st.sampled_from([0, 1]),
        simulators=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=processes),
        horizon=st.sampled_from([1, 5, 1000]),
    )


def play_on(pipeline: PlayingPipeline, budgets: int = 3) -> None:
    """Plays `budgets` more step budgets."""
    goal = len(pipeline.played) + budgets * pipeline.ledger.limit
    for _ in range(60 * budgets):
        if len(pipeline.played) >= goal:
            return
        for _ in range(200):
            pipeline.step()
            in_flight = pipeline.numbers - len(pipeline.played) - len(pipeline.lost_by)
            assert in_flight <= pipeline.ledger.limit + pipeline.frames + pipeline.unreported
    raise AssertionError(f"stalled with {pipeline.ledger.in_flight} in flight")


def check_step_counts(pipeline: PlayingPipeline) -> None:
    """Compares the settled ledger with the stages, once all losses are known."""
    pipeline.settle()
    played, lost, still_open = len(pipeline.played), len(pipeline.lost_by), len(pipeline.open())
    assert terms(pipeline.ledger) == (pipeline.numbers, 0, played, 0, lost, still_open)


@settings(max_examples=20)
@given(pipeline=playing_pipelines())
def test_playing_never_stalls_without_updates(pipeline: PlayingPipeline) -> None:
    """Ghost steps free the budget as trained ones do, and nothing is lost."""
    play_on(pipeline, 6)
    check_step_counts(pipeline)
    assert not pipeline.lost_by
    assert pipeline.ledger.losses == {}


@settings(max_examples=20)
@given(
    pipeline=playing_pipelines(),
    kills=st.lists(st.sampled_from(["coordination", "assembly", "stepping"]), min_size=1, max_size=4),
    before=st.integers(0, 300),
)
def test_playing_continues_after_crashes_and_step_counts_balance(
    pipeline: PlayingPipeline, kills: list[str], before: int
) -> None:
    """What a crash took is lost once; played steps stay ghost steps."""
    for kill in kills:
        for _ in range(before):
            pipeline.step()
        if kill == "coordination":
            pipeline.kill_coordination()
        elif kill == "assembly":
            pipeline.kill_assembly()
        else:
            pipeline.kill_stepping(pipeline.rng.randrange(pipeline.processes))
        play_on(pipeline)
    play_on(pipeline)
    check_step_counts(pipeline)


@settings(max_examples=20)
@given(pipeline=playing_pipelines(), before=st.integers(0, 300))
def test_a_restarted_coordination_counts_ghost_steps_once(pipeline: PlayingPipeline, before: int) -> None:
    """Steps may be played while it is down."""
    for _ in range(before):
        pipeline.step()
    pipeline.kill_coordination()
    play_on(pipeline)
    check_step_counts(pipeline)
    assert not pipeline.lost_by


def test_ghost_steps_free_as_many_steps_of_the_budget() -> None:
    """The allowance advances by the played steps."""
    ledger = StepLedger(least_update_steps=10, overlap=0)
    ledger.on_produced(FIRST, produced(0, 0, 0, 2))
    allowances = []
    for played in range(0, 60, 10):
        ledger.on_learner_state(state(ghost=played))
        allowance = ledger.allowances()[FIRST]
        allowances.append(allowance.steps)
        ledger.on_produced(FIRST, produced(allowance.steps, allowance.serial, allowance.steps, 2))
        assert ledger.in_flight == 10
    assert allowances == [10, 20, 30, 40, 50, 60]


def test_ghost_steps_survive_a_restart() -> None:
    """A restored ledger continues from the player's last report."""
    ledger = StepLedger(least_update_steps=10, overlap=1)
    ledger.on_produced(FIRST, produced(30, 0, 0, 2))
    ledger.on_learner_state(state(ghost=12))
    copy = StepLedger(least_update_steps=10, overlap=1).continue_from(through_json(ledger))
    assert terms(copy) == terms(ledger) == (30, 0, 12, 0, 0, 18)
    copy.on_learner_state(state(ghost=15))
    assert terms(copy) == (30, 0, 15, 0, 0, 15)
