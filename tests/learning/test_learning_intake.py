"""A learner counts every step of a source once: as received, or as lost with its cause."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.learning.intake import Intake
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import EARLIER
from tests.learning.learning_helpers import segments

FIRST, SECOND = "stepping-0.1", "stepping-0.2"


def message(reached: int, steps: int = 2, source: str = FIRST) -> Segments:
    """Returns a record of some steps, with which its source has come to `reached`."""
    return replace(segments([steps] if steps else []), source=source, reached=reached)


def test_a_gap_before_a_message_was_lost_with_assembly() -> None:
    """A message without steps reveals a gap, too."""
    intake = Intake(restarted=False)
    intake.add(message(2))
    intake.add(message(9))
    assert (intake.reached, intake.lost) == ({FIRST: 9}, {"assembly": 5})
    intake.add(message(12, steps=0))
    assert intake.lost == {"assembly": 8}


def test_a_gap_before_the_first_message_after_a_restart_was_lost_with_the_learner() -> None:
    """Later gaps of the same source are those of assembly."""
    intake = Intake(restarted=True)
    intake.add(message(10))
    intake.add(message(15))
    intake.add(message(4, source=SECOND))
    assert (intake.reached, intake.lost) == ({FIRST: 15, SECOND: 4}, {"learning": 10, "assembly": 3})


def test_steps_that_were_buffered_when_a_checkpoint_was_made_are_lost_with_it() -> None:
    """The checkpoint holds 6 of 10 received steps as trained or stale; what came after it is lost, too."""
    first = Intake(restarted=False)
    first.add(message(10, steps=10))
    second = Intake(restarted=True)
    second.restore(json.loads(json.dumps(first.to_plain())), resolved=6)
    assert (second.reached, second.lost) == ({FIRST: 10}, {"learning": 4})
    first.add(message(30, steps=20))
    second.add(message(33, steps=3))
    assert (second.reached, second.lost) == ({FIRST: 33}, {"learning": 24})


def test_steps_of_a_checkpoint_without_counts_were_produced_by_others() -> None:
    """Such as a checkpoint that a user copied into the run."""
    intake = Intake(restarted=True)
    intake.restore({}, resolved=40)
    assert (intake.reached, intake.lost) == ({EARLIER: 40}, {})


@given(
    events=st.lists(
        st.tuples(st.sampled_from([FIRST, SECOND]), st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=20
    ),
    trained=st.lists(st.integers(0, 9), min_size=20, max_size=20),
)
def test_reached_steps_are_trained_buffered_or_lost_over_any_restarts(
    events: list[tuple[str, int, int, bool]], trained: list[int]
) -> None:
    """Steps are lost on the way at random, and the learner restarts from its latest checkpoint at random."""
    intake, resolved, buffered = Intake(restarted=False), 0, 0
    saved, kept = intake.to_plain(), 0
    reached = {FIRST: 0, SECOND: 0}
    for (source, missing, steps, crashes), most in zip(events, trained, strict=False):
        if crashes:
            intake, resolved, buffered = Intake(restarted=True), kept, 0
            intake.restore(saved, resolved)
        reached[source] += missing + steps
        intake.add(message(reached[source], steps, source))
        buffered += steps
        done = min(most, buffered)
        resolved, buffered = resolved + done, buffered - done
        assert sum(intake.reached.values()) == resolved + buffered + sum(intake.lost.values())
        assert intake.reached[source] == reached[source]
        saved, kept = intake.to_plain(), resolved
