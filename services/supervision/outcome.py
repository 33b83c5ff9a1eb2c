"""What came of a run: `summary.json`, from what its services said last."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from sparring.pipeline.files import write_atomically
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.messages.state import AssemblyState, LearnerState, RunState, StepCounts
from sparring.pipeline.monitoring.summary import BehaviorSummary, CheckpointSummary, Status, from_status, summary
from sparring.pipeline.queues.interface import Subscription
from sparring.services.supervision.topology import Topology


class FinalReports:
    """What the services of a run said last.

    Args:
        topics: by service.
    """

    def __init__(self, topics: Mapping[str, Subscription]) -> None:
        self._boards = topics

    def of(self, service: str, key: str, kind: type[Any]) -> Any:
        """The latest record of a kind that a service has said; None where it has said none."""
        topic = self._boards.get(service)  # a tournament has no learners
        record = None if topic is None else topic.latest.get(key)
        return record if isinstance(record, kind) else None


class SummaryWriter:
    """Writes the summary of a run.

    Args:
        topology: of the run.
        words: of its services.
        log: of the supervisor.
    """

    def __init__(self, topology: Topology, words: FinalReports, log: Any) -> None:
        self._topology = topology
        self._run = topology.run
        self._words = words
        self._log = log

    def write(self, status: Status, error: str | None, wall_s: float, died: Mapping[str, bool]) -> str:
        """Writes `summary.json`.

        Args:
            status: of the run.
            error: why it failed.
            wall_s: how long it took.
            died: as in `closed`.

        Returns:
            What went wrong with that, "" for nothing.
        """
        figures = self._figures(died)
        content = summary(
            run_id=self._run.id,
            status=status,
            wall_s=wall_s,
            error=error,
            behaviors=figures,
            kept={name: self._kept(name) for name in figures},
        )
        path, failure = self._run.directory / "summary.json", ""
        try:
            write_atomically(path, json.dumps(content, indent=2).encode())
        except OSError as refused:
            failure = f"{path} cannot be written: {refused}"
            self._log.info("unwritten_summary", notice=True, **content)
        return failure

    def _kept(self, name: str) -> CheckpointSummary:
        run = self._words.of("coordination", "run", RunState)
        rated = {} if run is None else run.ratings
        state = self._words.of(f"learning-{name}", "state", LearnerState)
        host = self._topology.place(f"learning-{name}")
        here = host == self._topology.host
        folder = str(self._run.directory) if here else f"{host}:{self._run.id}"
        saved = None if state is None or not state.checkpoint else f"{folder}/{state.checkpoint}"
        # One that died or hangs has saved nothing at the end: what a resumed run goes on from is the newest there.
        there = [] if saved or not here else CheckpointFolder(self._run.directory, name).newest_first()
        return CheckpointSummary(
            checkpoint=next((str(path) for path in (saved, *there) if path is not None), None),
            weights_sha256=(state.weights_sha256 or None) if state is not None and saved else None,
            self_play=dataclasses.asdict(rated[name]) if name in rated else None,
        )

    def _figures(self, died: Mapping[str, bool]) -> dict[str, BehaviorSummary]:
        """The monitor's figures, with the steps that are still open counted in each stage."""
        try:
            figures = from_status(json.loads((self._run.directory / "status.json").read_text()))
        except FileNotFoundError:  # a run that failed before anything was counted
            self._log.info("no_figures")
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._log.warning("figures_missing", error=repr(error))
            return {}
        return {name: self._with_step_counts(name, figure, died) for name, figure in figures.items()}

    def _with_step_counts(self, name: str, figures: BehaviorSummary, died: Mapping[str, bool]) -> BehaviorSummary:
        run = self._words.of("coordination", "run", RunState)
        learner = self._words.of(f"learning-{name}", "state", LearnerState)
        if run is None or learner is None or name not in run.step_counts:
            return figures
        step_counts = closed(
            run.step_counts[name], held(name, run, learner, self._words.of("assembly", "state", AssemblyState)), died
        )
        if (steps := step_counts["lost"] - run.step_counts[name].lost) > 0:
            self._log.warning("steps_lost", behavior=name, stage=", ".join(died), steps=steps, cause="died at the end")
        found = dataclasses.replace(figures, steps=learner.trained, updates=learner.updates, step_counts=step_counts)
        if not found.balanced:
            self._log.error("books_do_not_balance", behavior=name, **found.step_counts, notice=True)
        return found


def held(name: str, run: RunState, learner: LearnerState, assembly: AssemblyState | None) -> dict[str, int]:
    """Steps of behavior `name` that each service said it held."""
    sources = {} if assembly is None else assembly.held.get(name, {})
    return {
        "assembly": sum(source.open + source.closed for source in sources.values()),
        "coordination": run.routed[name],
        f"learning-{name}": learner.buffered + learner.training,
    }


def closed(step_counts: StepCounts, held: Mapping[str, int], died: Mapping[str, bool]) -> dict[str, int]:
    """The books of a behavior when a run has ended, some of whose services may have died meanwhile.

    What is in no place of those that are there was lost with those that died; what was found beyond what the books
    knew had been produced, too.

    Args:
        step_counts: as coordination said last.
        held: steps by service, likewise.
        died: services that died while the run ended, and whether they were not started again since; without any, the
            books show what is in its places, even if they do not balance.
    """
    terms = dataclasses.asdict(step_counts) | {"open": sum(n for name, n in held.items() if not died.get(name))}
    missing = 2 * terms["produced"] - sum(terms.values())
    if died:
        terms["lost"] += max(0, missing)
        terms["produced"] += max(0, -missing)
    return terms
