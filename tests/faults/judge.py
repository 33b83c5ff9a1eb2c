"""The conditions that a run must satisfy after a fault."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.faults.trial import AGENTS, AREAS, BEHAVIOR, BUFFER, LEARNER, Trial, Violation, in_flight

ANY = None


@dataclass(frozen=True)
class AllowedEffects:
    """What a fault may do to a run that completes.

    Attributes:
        failed: name (prefix) of the process that fails and restarts; "" for none.
        times: most failures of that process, and at least one unless it is 0; ANY for no limit.
        certain: whether that process must fail.
        lost: stage that may lose steps; "" for none.
        unreceived: most steps that simulators counted and stepping never received; they are lost at both ends.
        counted: whether every simulator reported its count.
    """

    failed: str = ""
    times: int | None = 1
    certain: bool = True
    lost: str = ""
    unreceived: int = 0
    counted: bool = True


def killed(part: str) -> AllowedEffects:
    """Returns what the design's table allows after a process was killed."""
    if part.startswith(("simulator", "watcher")):
        return AllowedEffects(failed="simulator-0", counted=False)
    if part == "stepping-0":
        # The simulator alone may have counted the step in flight of each agent.
        return AllowedEffects(failed=part, lost="stepping", unreceived=2**30)
    return AllowedEffects(failed=part, lost=part.partition("-")[0] if part in ("assembly", LEARNER) else "")


def judge(trial: Trial, allowed: AllowedEffects, *, status: str = "completed") -> int:
    """Judges a run that has ended and returns its lost steps.

    Raises:
        Violation: the run broke a condition.
    """
    summary = trial.training.summary
    expect(summary["status"] == status, f"status {summary['status']}: {summary['error']}")
    step_counts = summary["behaviors"][BEHAVIOR]["step_counts"]
    expect_balance(step_counts)
    _judge_lost(trial, allowed, step_counts, summary["behaviors"][BEHAVIOR]["losses"])
    _judge_failures(trial, allowed)
    _judge_versions(trial)
    _judge_end(trial, summary["behaviors"][BEHAVIOR], status)
    return int(step_counts["lost"])


def _judge_lost(trial: Trial, allowed: AllowedEffects, step_counts: dict[str, int], losses: dict[str, int]) -> None:
    """Checks that only the allowed stage lost steps, and that each of them has a cause."""
    expect(sum(losses.values()) == step_counts["lost"], f"{step_counts['lost']} steps lost, by cause {losses}")
    causes = {allowed.lost} | ({"both_ends"} if allowed.unreceived else set())
    expect(losses.keys() <= causes, f"steps lost by {losses}, allowed {allowed.lost or 'nowhere'}")
    expect(step_counts["stale"] == step_counts["ghost"] == 0, f"step counts {step_counts}")
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


def _judge_counts(trial: Trial, allowed: AllowedEffects, step_counts: dict[str, int], starts: int) -> None:
    """Compares the simulators' own counts with step accounting, which recovers what stepping never received."""
    both_ends = trial.training.summary["behaviors"][BEHAVIOR]["losses"].get("both_ends", 0)
    unknown = min(allowed.unreceived, starts * (in_flight(trial.mode) + AGENTS))
    expect(both_ends <= unknown, f"{both_ends} steps lost at both ends, allowed {unknown}")
    unaccounted = trial.training.simulator_steps() - step_counts["produced"]
    if not allowed.counted:
        expect(unaccounted <= 0, f"simulators counted {unaccounted} steps more")
        return
    expect(unaccounted == 0, f"simulators counted {unaccounted} steps more than were produced")
    expect(trial.training.summary["behaviors"][BEHAVIOR]["unaccounted"] == 0, "the run reports unaccounted steps")
    differ = trial.log("stepping-0", "step_counts_differ")
    expect(not differ or unknown > 0, f"counts differ: {differ}")


def _judge_rolled_back(trial: Trial, lost: int, starts: int) -> None:
    """Checks that a learner lost exactly the updates since its checkpoint and the steps that it held."""
    restored = trial.restored()
    expect(len(restored) >= 1, "the learner was not restored")
    updates = sum(max(0, one["version"] - 1 - one["saved"]) for one in restored)
    # In lockstep an update trains all that was produced, and a frame may exceed the buffer.
    each = BUFFER if trial.mode == "overlap" else BUFFER + AGENTS
    least, most = updates * BUFFER, updates * each + starts * in_flight(trial.mode)
    expect(least <= lost <= most, f"{lost} steps lost, expected {least} to {most}: {restored}")


def judge_restored(trial: Trial, before: list[str], trained: int) -> None:
    """Checks that the restarted learner resumed from the newest checkpoint.

    Args:
        trial: the run.
        before: names of the checkpoints at the time of the fault, newest first.
        trained: steps trained at the time of the fault.
    """
    restored = trial.restored()[-1]
    if not before:
        expect(restored["event"] == "nothing_to_restore", f"restored {restored} without a checkpoint")
        return
    steps = {int(name.split("-")[1]) for name in before}
    expect(restored["trained"] >= max(steps), f"restored {restored}, the newest checkpoint was {before[0]}")
    expect(restored["trained"] <= trained + 4 * BUFFER, f"restored {restored}, trained {trained} before")


def _judge_failures(trial: Trial, allowed: AllowedEffects) -> None:
    """Checks that only the expected process failed."""
    failed = [one["part"] for one in trial.log("supervisor", "failed")]
    others = [part for part in failed if not (allowed.failed and part.startswith(allowed.failed))]
    expect(not others, f"{others} failed too: {trial.log('supervisor', 'failed')}")
    if allowed.failed and allowed.certain and allowed.times != 0:
        expect(len(failed) >= 1, f"{allowed.failed} did not fail")
    if allowed.times is not ANY:
        expect(len(failed) <= allowed.times, f"{allowed.failed} failed {len(failed)} times")


def _judge_versions(trial: Trial) -> None:
    """Checks that versions only rose."""
    numbers = [number for _, number in trial.versions]
    back = [pair for pair in pairwise(numbers) if pair[1] < pair[0]]
    expect(not back, f"versions went back: {back}")
    for one in trial.restored():
        expect(one["version"] > one["saved"] or one["saved"] == 0, f"a version was published twice: {one}")


def _judge_end(trial: Trial, summary: dict[str, Any], status: str) -> None:
    """Checks that the last checkpoint can be read and holds the steps of the summary."""
    last = trial.folder.load_latest()
    expect(last.trained == summary["steps"], f"checkpoint of {last.trained} steps, summary says {summary['steps']}")
    if status == "completed":
        expect(summary["steps"] >= trial.max_steps, f"{summary['steps']} of {trial.max_steps} steps")
        expect(summary["step_counts"]["open"] <= in_flight(trial.mode), f"open at the end: {summary['step_counts']}")


def expect_balance(step_counts: dict[str, int]) -> None:
    """Checks that each produced step is counted exactly once."""
    expect(
        step_counts["produced"] == sum(value for term, value in step_counts.items() if term != "produced"),
        f"step counts {step_counts}",
    )


def expect(held: bool, otherwise: str) -> None:
    """Raises Violation with the text `otherwise` unless `held`."""
    if not held:
        raise Violation(otherwise)


__all__ = ["ANY", "AREAS", "AllowedEffects", "expect", "expect_balance", "judge", "judge_restored", "killed"]
