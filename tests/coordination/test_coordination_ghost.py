"""Steps that are played and not learned from: step counts balance, and the budget never stalls the run."""

from __future__ import annotations

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.messages.state import LearnerState
from tests.coordination.coordination_parts import produced, segments
from tests.coordination.coordination_world import Pipeline


class PlayingPipeline(Pipeline):
    """The tiny pipeline with a player in the learner's place that takes steps without training on them.

    It reports taken steps later, so that it can crash between the two.
    """

    def __init__(self, rng: random.Random, **sizes: int | list[list[int]]) -> None:
        self.played: list[int] = []  # by this incarnation
        self.played_before: list[int] = []
        super().__init__(rng, **sizes)  # type: ignore[arg-type]

    def take(self) -> None:
        if not self.routed:
            return
        message = self.routed.popleft()
        self.acknowledged += len(message.steps)
        self.acknowledged_messages += 1
        key = (message.record.origin, message.record.source)
        if message.record.sequence > self.latest_sequences.get(key, 0):
            self.latest_sequences[key] = message.record.sequence
            self.played += message.steps

    def begin_update(self) -> None:
        self.learner_topic = self._learner_state()

    def finish_update(self) -> None:
        self.learner_topic = self._learner_state()

    def _learner_state(self) -> LearnerState:
        return LearnerState(
            behavior="B",
            start=f"learning-B.{self.learner_incarnation}",
            version=1,
            updates=0,
            trained=0,
            taken=len(self.played),
            ghost=len(self.played),
        )

    def kill_player(self) -> None:
        """Crashes the player with the taken steps that it has not reported."""
        reported = self.ledger.ghost - len(self.played_before)
        self.truly_lost.update(self.played[reported:])
        self.played_before += self.played[:reported]
        self.played, self.latest_sequences = [], {}
        self.learner_incarnation += 1
        self.acknowledged_earlier = self.acknowledged
        self.learner_topic = self._learner_state()


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
    goal = pipeline.ledger.ghost + budgets * pipeline.ledger.budget
    for _ in range(60 * budgets):
        if pipeline.ledger.ghost >= goal:
            return
        for _ in range(200):
            pipeline.step()
            done = len(pipeline.played_before) + len(pipeline.played) + len(pipeline.truly_lost)
            in_flight = pipeline.numbers - done
            assert in_flight <= pipeline.ledger.budget + pipeline.frames + pipeline.unreported
    raise AssertionError(f"stalled with {pipeline.ledger.in_flight} in flight")


def check_step_counts(pipeline: PlayingPipeline) -> None:
    """Compares the settled ledger with the stages, once all losses are known."""
    pipeline.settle()
    ledger = pipeline.ledger.step_counts()
    assert (ledger.trained, ledger.stale) == (0, 0)
    assert ledger.produced == ledger.ghost + ledger.lost + ledger.open
    assert ledger.ghost == len(pipeline.played_before) + len(pipeline.played)
    assert ledger.open == len(pipeline.open())
    assert (
        pipeline.numbers - ledger.produced == len(pipeline.truly_lost) - ledger.lost
    )  # steps lost before they were reported are in neither count


@settings(max_examples=60)
@given(pipeline=playing_pipelines())
def test_playing_never_stalls_without_updates(pipeline: PlayingPipeline) -> None:
    """Ghost steps free the budget as trained ones do, and nothing is lost."""
    play_on(pipeline, 6)
    check_step_counts(pipeline)
    assert not pipeline.truly_lost
    assert not pipeline.ledger.incidents


@settings(max_examples=60)
@given(
    pipeline=playing_pipelines(),
    kills=st.lists(st.sampled_from(["player", "assembly", "stepping"]), min_size=1, max_size=4),
    before=st.integers(0, 300),
)
def test_playing_continues_after_crashes_and_step_counts_balance(
    pipeline: PlayingPipeline, kills: list[str], before: int
) -> None:
    """Steps that the player took and did not report are lost; reported ones stay ghost steps."""
    for kill in kills:
        for _ in range(before):
            pipeline.step()
        if kill == "player":
            pipeline.kill_player()
        elif kill == "assembly":
            pipeline.kill_assembly()
        else:
            pipeline.kill_stepping(pipeline.rng.randrange(pipeline.processes))
        play_on(pipeline)
    play_on(pipeline)
    check_step_counts(pipeline)


@settings(max_examples=40)
@given(pipeline=playing_pipelines(), before=st.integers(0, 300))
def test_a_restarted_coordination_counts_ghost_steps_once(pipeline: PlayingPipeline, before: int) -> None:
    """Steps may be played while it is down."""
    for _ in range(before):
        pipeline.step()
    pipeline.kill_coordination()
    play_on(pipeline)
    check_step_counts(pipeline)
    assert not pipeline.truly_lost


def state(start: int, taken: int, ghost: int | None = None) -> LearnerState:
    return LearnerState(
        behavior="B",
        start=f"learning-B.{start}",
        version=1,
        updates=0,
        trained=0,
        taken=taken,
        ghost=taken if ghost is None else ghost,
    )


def terms(ledger: StepLedger) -> tuple[int, int, int, int]:
    counts = ledger.step_counts()
    assert counts.produced == counts.trained + counts.ghost + counts.stale + counts.lost + counts.open
    return counts.produced, counts.ghost, counts.lost, counts.open


def test_a_restarted_player_counts_from_zero_and_old_counts_stay() -> None:
    """It took 30 steps and reported 20: those are ghost steps, 10 are lost, and the new incarnation adds its own."""
    ledger = StepLedger(buffer_size=64, overlap=0)
    ledger.stepped("stepping-0.1", produced(50, 0, 0, 4))
    message = segments("stepping-0.1", "assembly.1", 1, steps=40, began=0, received=50, orphaned=0)
    ledger.routed(message)
    ledger.learner(state(1, 20), taken_earlier=0)
    assert terms(ledger) == (50, 20, 0, 30)
    assert ledger.learner(state(2, 0), taken_earlier=30) == 10
    assert terms(ledger) == (50, 20, 10, 20)
    assert ledger.learner(state(2, 5), taken_earlier=30) == 0
    assert terms(ledger) == (50, 25, 10, 15)
    (incident,) = ledger.take_new_incidents()
    assert (incident.stage, incident.start, incident.steps) == ("learning", "learning-B.2", 10)


def test_a_player_whose_first_report_is_late_loses_nothing() -> None:
    """Its topic holds the latest state only."""
    ledger = StepLedger(buffer_size=64, overlap=0)
    ledger.stepped("stepping-0.1", produced(50, 0, 0, 4))
    assert ledger.learner(state(1, 40), taken_earlier=0) == 0
    assert terms(ledger) == (50, 40, 0, 10)
    assert ledger.learner(state(2, 3), taken_earlier=40) == 0
    assert terms(ledger) == (50, 43, 0, 7)


def test_ghost_steps_free_as_many_steps_of_the_budget() -> None:
    """The allowance advances by the played steps."""
    ledger = StepLedger(buffer_size=10, overlap=0)
    ledger.stepped("stepping-0.1", produced(0, 0, 0, 2))
    allowances = []
    for played in range(0, 60, 10):
        ledger.learner(state(1, played), taken_earlier=0)
        allowance = ledger.allowances()["stepping-0.1"]
        allowances.append(allowance.steps)
        ledger.stepped("stepping-0.1", produced(allowance.steps, allowance.serial, allowance.steps, 2))
        assert ledger.in_flight == 10
    assert allowances == [10, 20, 30, 40, 50, 60]


def test_ghost_steps_survive_a_restart() -> None:
    """A restored ledger continues from the player's last report."""
    ledger = StepLedger(buffer_size=10, overlap=1)
    ledger.stepped("stepping-0.1", produced(30, 0, 0, 2))
    ledger.learner(state(1, 12), taken_earlier=0)
    copy = StepLedger(buffer_size=10, overlap=1)
    copy.restore(json.loads(json.dumps(ledger.to_plain())))
    assert terms(copy) == terms(ledger) == (30, 12, 0, 18)
    copy.learner(state(1, 15), taken_earlier=0)
    assert terms(copy) == (30, 15, 0, 15)
