"""Whole runs with drawn faults: a sample of what `scripts/simulate` does, and the seeds that have found something."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.world import world_broken
from tests.world.world_plan import draw
from tests.world.world_run import run_plan, run_seed

FOUND = {
    1: "segments that came damaged were acknowledged, and their steps were in no place of the books",
    3: "a board's last words followed a push that was lost, so nobody could take them",
    4: "a learner that was done took nothing more, and what assembly could not send at the end was in no place",
    6: "the same with what stepping could not send",
    44: "a restarted learner was heard before its queue: its lost steps stayed in flight, and the run stood still",
    93: "the same after a full disk",
    19: "what a checkpoint held came again after learner and coordination had died, and was taken again",
    173: "a message that came damaged three times was given up",
    210: "a new assembly took some of its predecessor's batches and skipped others",
    222: "weights that a full disk refused were forgotten, and played with later",
    271: "as 19, and the books went below 0; later, that less was lost than incidents told",
    313: "as 173",
    397: "coordination ended before the last word of stepping had come",
    56: "a part that died while the run stopped took its last words along",
    117: "as 56, of a learner",
    242: "as 56, of coordination, after stepping had ended",
    565: "a start of stepping was closed by segments of the one before it",
    785: "as 210",
    801: "what was dead when the run ended was not started again, and what it had held not counted",
    987: "a simulator believed a heartbeat of next to no seconds",
    3056: "what a dead learner had taken, and assembly had kept, was trained by the next, and lost in the books",
    4473: "what died just before the run ended was not waited for, and its steps were in no term",
    7398: "what coordination held, and an assembly that died with it could not send again, was in no term",
    8263: "stepping, paused while the run ended, had no time left for its last steps",
    4701: "a message that never became whole was taken for a sign of life by a simulator",
    5427: "steps that a dead assembly had handed on were counted where they were and where they had been",
    151: "a new coordination took for its predecessor's what a learner that goes on had taken: the books went below 0",
}
"""Seeds that found a bug, and which."""

BETWEEN = {"resend": (0, 20), "credit": (0, 20), "twice": (40, 60)}
"""Seeds of which one finds each broken queue."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", FOUND, ids=str)
def test_what_a_seed_has_found_stays_mended(seed: int) -> None:
    assert not run_seed(seed).violations


def test_a_seed_repeats_itself_to_the_last_message() -> None:
    """The digest is of all messages, with their times and contents."""
    plan = draw(2)
    assert plan.faults
    first, second = run_plan(plan), run_plan(plan)
    assert (first.digest, first.events) == (second.digest, second.events)
    assert first.events > 300


def test_another_seed_for_the_same_plan_is_another_history() -> None:
    plan = draw(2)
    assert run_plan(plan).digest != run_plan(replace(plan, seed=3)).digest


@pytest.mark.parametrize("kind", world_broken.KINDS)
def test_a_broken_queue_is_found(kind: str) -> None:
    """Within a few seeds; `scripts/simulate --broken KIND` shows the first."""
    with world_broken.queue(kind):
        assert any(run_seed(seed).violations for seed in range(*BETWEEN[kind]))
