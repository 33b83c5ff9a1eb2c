"""The outcome of a run: `summary.json`, from the last reports of its services."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from structlog.typing import FilteringBoundLogger

from sparring.pipeline.files import write_atomically
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.messages.channels import LEARNER_STATE, RUN, Topic
from sparring.pipeline.messages.state import LearnerState, RunState
from sparring.pipeline.monitoring.summary import BehaviorSummary, CheckpointSummary, Status, from_status, summary
from sparring.pipeline.queues.interface import Subscription
from sparring.services.supervision.topology import Topology

T = TypeVar("T")


class FinalReports:
    """Reads the latest reports of a run's services.

    Args:
        topics: by service.
    """

    def __init__(self, topics: Mapping[str, Subscription]) -> None:
        self._topics = topics

    def of(self, service: str, topic: Topic[T]) -> T | None:
        """Returns the latest record that a service has published on a topic; None before the first."""
        subscription = self._topics.get(service)  # a tournament has no learners
        return None if subscription is None else subscription.latest(topic)


def write_summary(
    topology: Topology,
    reports: FinalReports,
    log: FilteringBoundLogger,
    status: Status,
    error: str | None,
    wall_s: float,
) -> str:
    """Writes `summary.json`.

    Args:
        topology: of the run.
        reports: of its services.
        log: of the supervisor.
        status: of the run.
        error: why it failed.
        wall_s: duration of the run.

    Returns:
        The failure to write it, "" for none.
    """
    run = reports.of("coordination", RUN)
    folder = topology.run.directory
    behaviors = {}
    for name, monitored in _monitored(folder, log).items():
        learner = reports.of(f"learning-{name}", LEARNER_STATE)
        behaviors[name] = _with_final_counts(name, monitored, run, learner, log)
    kept = {name: _kept(topology, reports, name) for name in behaviors}
    content = summary(run_id=topology.run.id, status=status, wall_s=wall_s, error=error, behaviors=behaviors, kept=kept)
    try:
        write_atomically(folder / "summary.json", json.dumps(content, indent=2).encode())
    except OSError as refused:
        log.info("summary_not_written", notice=True, **content)
        return f"{folder / 'summary.json'} cannot be written: {refused}"
    return ""


def _kept(topology: Topology, reports: FinalReports, name: str) -> CheckpointSummary:
    run = reports.of("coordination", RUN)
    rated = {} if run is None else run.ratings
    state = reports.of(f"learning-{name}", LEARNER_STATE)
    host = topology.place(f"learning-{name}")
    here = host == topology.host
    folder = str(topology.run.directory) if here else f"{host}:{topology.run.id}"
    saved = None if state is None or not state.checkpoint else f"{folder}/{state.checkpoint}"
    # A learner that died or hangs has not saved at the end: a resumed run continues from its newest checkpoint.
    there = [] if saved or not here else CheckpointFolder(topology.run.directory, name).newest_first()
    return CheckpointSummary(
        checkpoint=next((str(path) for path in (saved, *there) if path is not None), None),
        weights_sha256=(state.weights_sha256 or None) if state is not None and saved else None,
        self_play=dataclasses.asdict(rated[name]) if name in rated else None,
    )


def _monitored(folder: Path, log: FilteringBoundLogger) -> dict[str, BehaviorSummary]:
    """Returns the monitor's last summaries."""
    try:
        return from_status(json.loads((folder / "status.json").read_text()))
    except FileNotFoundError:  # a run that failed before anything was counted
        log.info("summary_missing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("status_unreadable", error=repr(error))
    return {}


def _with_final_counts(
    name: str, monitored: BehaviorSummary, run: RunState | None, learner: LearnerState | None, log: FilteringBoundLogger
) -> BehaviorSummary:
    """Replaces the monitor's counts by the final ones of coordination and the learner."""
    if run is None or learner is None or name not in run.step_counts:
        return monitored
    found = dataclasses.replace(
        monitored,
        steps=learner.trained,
        updates=learner.updates,
        step_counts=dataclasses.asdict(run.step_counts[name]),
        losses=run.losses[name],
        unaccounted=run.unaccounted[name],
    )
    if not found.balanced:
        log.error("step_counts_unbalanced", behavior=name, **found.step_counts, notice=True)
    if found.unaccounted > 0:
        log.error("steps_unaccounted", behavior=name, steps=found.unaccounted, notice=True)
    return found
