"""The end of a run: stops its parts along the flow, after every service that still runs has reported its state.

consumes       the state that each service publishes
produces       stop signals, and kills of what does not end in time; `summary.json`, from the last reports
waits for      the reports of restarted services; the end of each part
unblocked by   these, or the deadlines `pipeline.stop_timeout_s`
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio

from sparring.pipeline.files import DAMAGE, Json, regular, write_atomically
from sparring.pipeline.learning.checkpoints import CheckpointFolder, age
from sparring.pipeline.messages.channels import ASSEMBLY_STATE, LEARNER_STATE, RUN, STEPPING_STATE
from sparring.pipeline.monitoring.summary import BehaviorSummary, from_status, from_summary, summary
from sparring.services.process import forking
from sparring.services.supervision.active_run import ActiveRun, Part

TURN_S: Final = 0.05
_COPYING_S: Final = 60.0
_SIMULATORS_S: Final = 5.0
_MONITOR_LIMITS: Final = 3
"""The monitor draws curves at the lowest priority, which takes long on a busy machine."""
_KILLED_S: Final = 5.0
_SHOWN_S: Final = 5.0
"""A stop takes no longer than this without a word."""


async def stop_in_order(active: ActiveRun) -> None:
    """Stops the parts of a run along the flow, so that each stage can send on what it holds.

    Learners stop before coordination, so that an update that was under way then is in its step accounting.
    """
    limit_s, topology = active.settings.stop_timeout_s, active.topology
    reported_by = active.clock() + limit_s
    services = [plan.name for plan in topology.services]
    stepping = [name for name in services if name in topology.run.stepping]
    states = [active.latest(name, STEPPING_STATE) for name in stepping]
    connected = any(state is not None and state.simulators for state in states)  # these end at the Bye of stepping
    await _stop(active, stepping, limit_s, reported_by)
    simulators = [plan.name for plan in topology.simulators]
    await _stop(active, simulators, _SIMULATORS_S, reported_by, ask=not connected)
    late = {"coordination": 1, "monitor": 2}
    for name in sorted((name for name in services if name not in stepping), key=lambda name: late.get(name, 0)):
        await _stop(active, [name], limit_s * (_MONITOR_LIMITS if name == "monitor" else 1), reported_by)


async def _stop(active: ActiveRun, names: list[str], limit_s: float, reported_by: float, *, ask: bool = True) -> None:
    """Stops some parts, once all services that are still to run have reported their state."""
    left_s, shown_at = reported_by - active.clock(), active.clock() + _SHOWN_S
    with anyio.move_on_after(left_s):
        services = [part for part in active.parts.values() if part.name in active.topology.run.services]
        while silent := [part.name for part in services if not _has_reported(active, part)]:
            if active.clock() >= shown_at:
                shown_at = math.inf
                active.log.info("waiting_for", parts=silent, at_most_s=round(left_s), notice=True)
            await anyio.sleep(TURN_S)
    parts = [active.parts[name] for name in names if name in active.parts]  # a learner may be about to be added
    for part in parts:
        part.stopping = True
        if part.hosted is not None and ask:
            part.hosted.stop()
    await _wait_until_ended(parts, min(limit_s, _SHOWN_S))
    if slow := [part for part in parts if not part.ended.is_set()]:
        names = [part.name for part in slow]
        active.log.info("waiting_for", parts=names, at_most_s=round(limit_s), notice=limit_s > _SHOWN_S)
        await _wait_until_ended(slow, limit_s - _SHOWN_S)
    copied = [part for part in parts if getattr(part.hosted, "copying", False)]  # from another machine
    await _wait_until_ended(copied, _COPYING_S)
    late = [part for part in parts if not part.ended.is_set()]
    for part in late:
        # Where the run has failed, its cause is on the console.
        log = active.log.info if active.status == "failed" else active.log.warning
        log("stopped_by_force", part=part.name, seconds=limit_s)
        if part.hosted is not None:
            part.hosted.stop() if not ask else part.hosted.kill()
        else:
            forking.abandon()
    await _wait_until_ended(late, _KILLED_S)
    for part in late:  # a simulator that ignores SIGTERM, or is stopped
        part.kill()
    for part in parts if ask and not active.hurried else ():
        if not part.failure or part in late:
            continue
        active.fail_at_the_end(part, part.failure)


async def _wait_until_ended(parts: list[Part], limit_s: float) -> None:
    with anyio.move_on_after(limit_s):
        for part in parts:
            await part.ended.wait()


def _has_reported(active: ActiveRun, part: Part) -> bool:
    """Returns whether a service is no longer to run, or has reported its state since it died last.

    The incarnation of one that was restarted is then in all reports. In a resumed run coordination must have reported
    once, because it alone knows what the sessions before have counted.
    """
    if part.ended.is_set() or not active.is_wanted(part):
        return True
    if part.down:
        return False
    if part.starts == 1:
        knows = active.topology.run.resumed and part.name == "coordination" and part.hosted is not None
        return not knows or active.latest(part.name, RUN) is not None
    stepping, assembly = active.latest(part.name, STEPPING_STATE), active.latest(part.name, ASSEMBLY_STATE)
    run, learner = active.latest(part.name, RUN), active.latest(part.name, LEARNER_STATE)
    counted, own = active.latest("coordination", RUN), active.incarnation(part.name, part.starts)
    known = {stepping and stepping.source, assembly and assembly.origin, run and run.start, learner and learner.start}
    known.add(counted and counted.incarnations.get(part.name))
    return known <= {own, None}


# ---------------------------------------------------------------- summary.json

_SUMMARY: Final = "summary.json"
_FORMER: Final = "summary.former.json"
"""Summary of the session before, while a resumed run goes on: what a session without a report of its own ends with."""


def set_former_aside(directory: Path) -> None:
    """Renames the summary of the session before, if there is one, because `summary.json` says that a run has ended."""
    with contextlib.suppress(OSError):  # a folder in its place fails the end of the run, as in any session
        (directory / _SUMMARY).replace(directory / _FORMER)


def write_summary(active: ActiveRun, wall_s: float) -> None:
    """Writes `summary.json` of a run that has ended after `wall_s` seconds; the run has failed where that fails."""
    active.check_folder()
    if active.gone:
        active.log.info("run_ended", status=active.status, summary="not written", wall_s=round(wall_s, 1), notice=True)
        return
    run, path = active.topology.run, active.topology.run.directory / _SUMMARY
    known, counted = _known(active), active.latest("coordination", RUN)
    names = {*known} | ({name for name, one in counted.step_counts.items() if one.produced} if counted else set())
    counts = {name: _with_final_counts(active, name, known.get(name, BehaviorSummary())) for name in sorted(names)}
    content = summary(
        run_id=run.id,
        status=active.status,
        wall_s=wall_s,
        error=active.error,
        behaviors={name: _with_checkpoint(active, name, one) for name, one in counts.items()},
    )
    ending = {"status": active.status, "summary": str(path), "wall_s": round(wall_s, 1)}
    try:
        write_atomically(path, json.dumps(content, indent=2).encode())
        (run.directory / _FORMER).unlink(missing_ok=True)
    except OSError as refused:
        active.log.info("summary_not_written", notice=True, **content)
        active.fail_late(f"{path} cannot be written: {refused}")
        ending |= {"status": active.status, "summary": "not written"}
    active.log.info("run_ended", **ending, notice=True)


def _with_checkpoint(active: ActiveRun, name: str, counted: BehaviorSummary) -> BehaviorSummary:
    """Adds what a resumed run continues from; it logs the steps whose training is not in it."""
    state = active.latest(f"learning-{name}", LEARNER_STATE)
    named, directory = "" if state is None else state.checkpoint, active.topology.run.directory
    newest = next(iter(CheckpointFolder(directory, name).newest_first()), None)
    trained = 0 if newest is None else age(newest)[0]
    saved = bool(named) and age(directory / named)[0] == trained  # not so where a learner died or hangs at the end
    newest = directory / named if saved else newest
    checkpoint = None if newest is None else str(newest)
    if state is not None and state.trained > trained:
        lost = state.trained - trained
        active.log.warning("training_lost", behavior=name, steps=lost, newest=checkpoint, notice=True)
    return dataclasses.replace(
        counted,
        checkpoint=checkpoint,
        weights_sha256=(state.weights_sha256 or None) if state is not None and saved else None,
    )


def _known(active: ActiveRun) -> dict[str, BehaviorSummary]:
    """Returns what the monitor has seen last, or how the session before ended where the monitor has seen no more.

    A monitor that was killed shortly before the end of that session knows less than its summary.
    """
    seen, former = _results(active, "status.json", from_status), _results(active, _FORMER, from_summary)
    for name in former.keys() & (seen.keys() | active.topology.run.settings.behaviors):
        if name not in seen or former[name].produced >= seen[name].produced:
            seen[name] = former[name]
    return seen


def _results(
    active: ActiveRun, name: str, parse: Callable[[Json], dict[str, BehaviorSummary]]
) -> dict[str, BehaviorSummary]:
    """Returns the results in a file of the run; none where it is missing or damaged."""
    try:
        return parse(json.loads(regular(active.topology.run.directory / name).read_text()))
    except FileNotFoundError:  # a run that failed before anything was counted, or a first session
        active.log.info("results_missing", file=name)
    except DAMAGE as error:
        active.log.warning("results_unreadable", file=name, error=repr(error))
    return {}


def _with_final_counts(active: ActiveRun, name: str, known: BehaviorSummary) -> BehaviorSummary:
    """Replaces what is known by the final counts of coordination and the learner, where they have some."""
    run, learner = active.latest("coordination", RUN), active.latest(f"learning-{name}", LEARNER_STATE)
    if run is None or name not in run.step_counts:
        return known
    found = dataclasses.replace(
        known,
        steps=run.step_counts[name].trained if learner is None else learner.trained,
        updates=known.updates if learner is None else learner.updates,
        step_counts=dataclasses.asdict(run.step_counts[name]),
        losses=run.losses[name],
        unaccounted=run.unaccounted.get(name) if run.final else None,
        episodes=run.episodes.get(name, known.episodes),
        reward_mean_last100=run.reward_mean_last100.get(name, known.reward_mean_last100),
        self_play=dataclasses.asdict(run.ratings[name]) if name in run.ratings else None,
    )
    if not found.balanced:
        active.log.error("step_counts_unbalanced", behavior=name, **found.step_counts, notice=True)
    if found.unaccounted:
        active.log.error("steps_unaccounted", behavior=name, steps=found.unaccounted, notice=True)
    return found
