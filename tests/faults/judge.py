"""What must hold of a run after a fault."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.faults.trial import AGENTS, AREAS, BEHAVIOR, BUFFER, LEARNER, Trial, Violation, in_flight

ANY = None


@dataclass(frozen=True)
class Allowed:
    """What a fault may do to a run that completes.

    Attributes:
        failed: part that fails and is restarted; "" for none.
        times: how often at most; ANY for no limit. At least once, unless 0.
        certain: it has to fail.
        lost: stage that may lose steps; "" for none.
        unheard: steps that a simulator may have counted and nobody else have heard of.
        counted: every simulator lived to tell its count.
    """

    failed: str = ""
    times: int | None = 1
    certain: bool = True
    lost: str = ""
    unheard: int = 0
    counted: bool = True


def killed(part: str) -> Allowed:
    """What the design's table allows the death of a part."""
    if part.startswith(("simulator", "watcher")):
        return Allowed(failed="simulator-0", counted=False)
    if part == "stepping-0":
        # The step in flight of each agent may have been counted by its simulator alone.
        return Allowed(failed=part, lost="stepping", unheard=2**30)
    return Allowed(failed=part, lost=part.partition("-")[0] if part in ("assembly", LEARNER) else "")


def judge(trial: Trial, allowed: Allowed, *, status: str = "completed") -> int:
    """Judges a run that has ended; returns its lost steps.

    Raises:
        Violation: it did what it must not.
    """
    summary = trial.training.summary
    expect(summary["status"] == status, f"status {summary['status']}: {summary['error']}")
    step_counts = summary["behaviors"][BEHAVIOR]["step_counts"]
    expect_balance(step_counts)
    _judge_lost(trial, allowed, step_counts)
    _judge_failures(trial, allowed)
    _judge_versions(trial)
    _judge_end(trial, summary["behaviors"][BEHAVIOR], status)
    return int(step_counts["lost"])


def _judge_lost(trial: Trial, allowed: Allowed, step_counts: dict[str, int]) -> None:
    """Nothing but what the row allows, and every step by an incident."""
    incidents = trial.log("coordination", "steps_lost")
    told = sum(one["steps"] for one in incidents)
    expect(told == step_counts["lost"], f"{step_counts['lost']} steps lost, of which incidents tell {told}")
    stages = {one["stage"] for one in incidents}
    expect(
        stages <= {allowed.lost}, f"steps lost in {sorted(stages)}, allowed {allowed.lost or 'nowhere'}: {incidents}"
    )
    expect(step_counts["stale"] == step_counts["ghost"] == 0, f"books {step_counts}")
    most = in_flight(trial.mode)
    starts = 1 if allowed.times is ANY else max(1, allowed.times)
    if allowed.lost == "learning":
        _judge_rolled_back(trial, step_counts["lost"], starts)
    elif allowed.lost:
        expect(
            step_counts["lost"] <= starts * most,
            f"{step_counts['lost']} steps lost, at most {starts} x {most} can be in flight",
        )
    _judge_counts(trial, allowed, step_counts, starts)


def _judge_counts(trial: Trial, allowed: Allowed, step_counts: dict[str, int], starts: int) -> None:
    """The simulators' own counts."""
    unheard = trial.training.simulator_steps() - step_counts["produced"]
    if not allowed.counted:
        expect(unheard <= allowed.unheard, f"simulators counted {unheard} steps more, allowed {allowed.unheard}")
        return
    unknown = min(allowed.unheard, starts * (in_flight(trial.mode) + AGENTS))
    expect(0 <= unheard <= unknown, f"simulators counted {unheard} steps more than the books, allowed {unknown}")
    differ = trial.log("stepping-0", "step_counts_differ")
    expect(not differ or unknown > 0, f"counts differ: {differ}")


def _judge_rolled_back(trial: Trial, lost: int, starts: int) -> None:
    """A learner goes on from its checkpoint, and what it loses is what was trained since then and what it held."""
    restored = trial.restored()
    expect(len(restored) >= 1, "the learner was not restored")
    updates = sum(max(0, one["version"] - 1 - one["saved"]) for one in restored)
    # In lockstep an update takes all that was produced, which a frame may carry over the buffer.
    each = BUFFER if trial.mode == "overlap" else BUFFER + AGENTS
    least, most = updates * BUFFER, updates * each + starts * in_flight(trial.mode)
    expect(least <= lost <= most, f"{lost} steps lost, expected {least} to {most}: {restored}")


def judge_restored(trial: Trial, before: list[str], trained: int) -> None:
    """The learner's last start went on from a checkpoint that was there, and that was no older than it may be.

    Args:
        trial: its run.
        before: names of the checkpoints that were there at its death, newest first.
        trained: steps at its death.
    """
    restored = trial.restored()[-1]
    if not before:
        expect(restored["event"] == "nothing_to_restore", f"restored {restored} without a checkpoint")
        return
    steps = {int(name.split("-")[1]) for name in before}
    expect(restored["trained"] >= max(steps), f"restored {restored}, the newest checkpoint was {before[0]}")
    expect(restored["trained"] <= trained + 4 * BUFFER, f"restored {restored}, trained {trained} before")


def _judge_failures(trial: Trial, allowed: Allowed) -> None:
    """Only the part that was meant has failed."""
    failed = [one["part"] for one in trial.log("supervisor", "failed")]
    others = [part for part in failed if not (allowed.failed and part.startswith(allowed.failed))]
    expect(not others, f"{others} failed too: {trial.log('supervisor', 'failed')}")
    if allowed.failed and allowed.certain and allowed.times != 0:
        expect(len(failed) >= 1, f"{allowed.failed} did not fail")
    if allowed.times is not ANY:
        expect(len(failed) <= allowed.times, f"{allowed.failed} failed {len(failed)} times")


def _judge_versions(trial: Trial) -> None:
    """Versions only rise."""
    numbers = [number for _, number in trial.versions]
    back = [pair for pair in pairwise(numbers) if pair[1] < pair[0]]
    expect(not back, f"versions went back: {back}")
    for one in trial.restored():
        expect(one["version"] > one["saved"] or one["saved"] == 0, f"a version was given again: {one}")


def _judge_end(trial: Trial, figures: dict[str, Any], status: str) -> None:
    """The last checkpoint can be read and is the one the summary names."""
    last = trial.folder.load_latest()
    expect(last.trained == figures["steps"], f"checkpoint of {last.trained} steps, summary says {figures['steps']}")
    if status == "completed":
        expect(figures["steps"] >= trial.max_steps, f"{figures['steps']} of {trial.max_steps} steps")
        expect(figures["step_counts"]["open"] <= in_flight(trial.mode), f"open at the end: {figures['books']}")


def expect_balance(step_counts: dict[str, int]) -> None:
    """Every step is in one place."""
    expect(
        step_counts["produced"] == sum(value for term, value in step_counts.items() if term != "produced"),
        f"books {step_counts}",
    )


def expect(held: bool, otherwise: str) -> None:
    """Raises Violation unless it holds."""
    if not held:
        raise Violation(otherwise)


__all__ = ["ANY", "AREAS", "Allowed", "expect", "expect_balance", "judge", "judge_restored", "killed"]
