"""The outcome of a run: `summary.json`, from the last reports of its services."""

import dataclasses
import json

from sparring.pipeline.files import write_atomically
from sparring.pipeline.learning.checkpoints import CheckpointFolder, age
from sparring.pipeline.messages.channels import LEARNER_STATE, RUN
from sparring.pipeline.monitoring.summary import BehaviorSummary, from_status, summary
from sparring.services.supervision.active_run import ActiveRun


def write_summary(active: ActiveRun, wall_s: float) -> None:
    """Writes `summary.json` of a run that has ended after `wall_s` seconds; the run has failed where that fails."""
    run, path = active.topology.run, active.topology.run.directory / "summary.json"
    monitored, counted = _monitored(active), active.latest("coordination", RUN)
    names = {*monitored} | ({name for name, one in counted.step_counts.items() if one.produced} if counted else set())
    counts = {name: _with_final_counts(active, name, monitored.get(name, BehaviorSummary())) for name in sorted(names)}
    content = summary(
        run_id=run.id,
        status=active.status,
        wall_s=wall_s,
        error=active.error,
        behaviors={name: _with_checkpoint(active, name, one) for name, one in counts.items()},
    )
    try:
        write_atomically(path, json.dumps(content, indent=2).encode())
    except OSError as refused:
        active.log.info("summary_not_written", notice=True, **content)
        active.fail_late(f"{path} cannot be written: {refused}")
    active.log.info("run_ended", status=active.status, summary=str(path), wall_s=round(wall_s, 1), notice=True)


def _with_checkpoint(active: ActiveRun, name: str, counted: BehaviorSummary) -> BehaviorSummary:
    """Adds what a resumed run continues from; it logs the steps whose training is not in it."""
    topology, run = active.topology, active.latest("coordination", RUN)
    rated = {} if run is None else run.ratings
    state = active.latest(f"learning-{name}", LEARNER_STATE)
    named, host = "" if state is None else state.checkpoint, topology.place(f"learning-{name}")
    if host == topology.host:
        directory = topology.run.directory
        newest = next(iter(CheckpointFolder(directory, name).newest_first()), None)
        trained = 0 if newest is None else age(newest)[0]
        saved = bool(named) and age(directory / named)[0] == trained  # not so where a learner died or hangs at the end
        newest = directory / named if saved else newest
        checkpoint = None if newest is None else str(newest)
        if state is not None and state.trained > trained:
            lost = state.trained - trained
            active.log.warning("training_lost", behavior=name, steps=lost, newest=checkpoint, notice=True)
    else:
        checkpoint, saved = f"{host}:{topology.run.id}/{named}" if named else None, bool(named)
    return dataclasses.replace(
        counted,
        checkpoint=checkpoint,
        weights_sha256=(state.weights_sha256 or None) if state is not None and saved else None,
        self_play=dataclasses.asdict(rated[name]) if name in rated else None,
    )


def _monitored(active: ActiveRun) -> dict[str, BehaviorSummary]:
    """Returns the monitor's last summaries."""
    try:
        return from_status(json.loads((active.topology.run.directory / "status.json").read_text()))
    except FileNotFoundError:  # a run that failed before anything was counted
        active.log.info("summary_missing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        active.log.warning("status_unreadable", error=repr(error))
    return {}


def _with_final_counts(active: ActiveRun, name: str, monitored: BehaviorSummary) -> BehaviorSummary:
    """Replaces the monitor's counts by the final ones of coordination and the learner."""
    run, learner = active.latest("coordination", RUN), active.latest(f"learning-{name}", LEARNER_STATE)
    if run is None or learner is None or name not in run.step_counts:
        return monitored
    found = dataclasses.replace(
        monitored,
        steps=learner.trained,
        updates=learner.updates,
        step_counts=dataclasses.asdict(run.step_counts[name]),
        losses=run.losses[name],
        unaccounted=run.unaccounted[name] if run.final else None,
    )
    if not found.balanced:
        active.log.error("step_counts_unbalanced", behavior=name, **found.step_counts, notice=True)
    if found.unaccounted is not None and found.unaccounted > 0:
        active.log.error("steps_unaccounted", behavior=name, steps=found.unaccounted, notice=True)
    return found
