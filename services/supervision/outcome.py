"""The outcome of a run: `summary.json`, from the last reports of its services."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from sparring.pipeline.files import write_atomically
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.messages.channels import LEARNER_STATE, RUN, Topic
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


class SummaryWriter:
    """Writes the summary of a run.

    Args:
        topology: of the run.
        reports: of its services.
        log: of the supervisor.
    """

    def __init__(self, topology: Topology, reports: FinalReports, log: Any) -> None:
        self._topology = topology
        self._run = topology.run
        self._reports = reports
        self._log = log

    def write(self, status: Status, error: str | None, wall_s: float) -> str:
        """Writes `summary.json`.

        Args:
            status: of the run.
            error: why it failed.
            wall_s: duration of the run.

        Returns:
            The failure to write it, "" for none.
        """
        behaviors = self._behaviors()
        content = summary(
            run_id=self._run.id,
            status=status,
            wall_s=wall_s,
            error=error,
            behaviors=behaviors,
            kept={name: self._checkpoint(name) for name in behaviors},
        )
        path, failure = self._run.directory / "summary.json", ""
        try:
            write_atomically(path, json.dumps(content, indent=2).encode())
        except OSError as refused:
            failure = f"{path} cannot be written: {refused}"
            self._log.info("summary_not_written", notice=True, **content)
        return failure

    def _checkpoint(self, name: str) -> CheckpointSummary:
        run = self._reports.of("coordination", RUN)
        rated = {} if run is None else run.ratings
        state = self._reports.of(f"learning-{name}", LEARNER_STATE)
        host = self._topology.place(f"learning-{name}")
        here = host == self._topology.host
        folder = str(self._run.directory) if here else f"{host}:{self._run.id}"
        saved = None if state is None or not state.checkpoint else f"{folder}/{state.checkpoint}"
        # A learner that died or hangs has not saved at the end: a resumed run continues from its newest checkpoint.
        there = [] if saved or not here else CheckpointFolder(self._run.directory, name).newest_first()
        return CheckpointSummary(
            checkpoint=next((str(path) for path in (saved, *there) if path is not None), None),
            weights_sha256=(state.weights_sha256 or None) if state is not None and saved else None,
            self_play=dataclasses.asdict(rated[name]) if name in rated else None,
        )

    def _behaviors(self) -> dict[str, BehaviorSummary]:
        """Returns the monitor's summaries with the final counts of coordination and learners."""
        try:
            summaries = from_status(json.loads((self._run.directory / "status.json").read_text()))
        except FileNotFoundError:  # a run that failed before anything was counted
            self._log.info("summary_missing")
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._log.warning("status_unreadable", error=repr(error))
            return {}
        return {name: self._with_step_counts(name, one) for name, one in summaries.items()}

    def _with_step_counts(self, name: str, monitored: BehaviorSummary) -> BehaviorSummary:
        run = self._reports.of("coordination", RUN)
        learner = self._reports.of(f"learning-{name}", LEARNER_STATE)
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
            self._log.error("step_counts_unbalanced", behavior=name, **found.step_counts, notice=True)
        if found.unaccounted > 0:
            self._log.error("steps_unaccounted", behavior=name, steps=found.unaccounted, notice=True)
        return found
