"""What came of a run: `summary.json`, from what its services said last."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.files import write_atomically
from pipeline.learning.checkpoints import CheckpointFolder
from pipeline.messages.service import AssemblyState, LearnerState, RunState
from pipeline.monitoring.summary import Figures, Kept, Status, from_status, summary
from pipeline.queues.interface import Subscription
from services.topology import Topology


class LastWords:
    """What the services of a run said last.

    Args:
        boards: by service.
    """

    def __init__(self, boards: Mapping[str, Subscription]) -> None:
        self._boards = boards

    def of(self, service: str, key: str, kind: type[Any]) -> Any:
        """The latest record of a kind that a service has said; None where it has said none."""
        board = self._boards.get(service)  # a tournament has no learners
        record = None if board is None else board.latest.get(key)
        return record if isinstance(record, kind) else None


class Outcome:
    """Writes the summary of a run.

    Args:
        topology: of the run.
        words: of its services.
        log: of the supervisor.
    """

    def __init__(self, topology: Topology, words: LastWords, log: Any) -> None:
        self._topology = topology
        self._run = topology.run
        self._words = words
        self._log = log

    def write(self, status: Status, error: str | None, wall_s: float, died: Sequence[str] = ()) -> str:
        """Writes `summary.json`.

        Args:
            status: of the run.
            error: why it failed.
            wall_s: how long it took.
            died: services that died while it ended, so that their last words are missing.

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
            failure = f"{path} can not be written: {refused}"
            self._log.info("unwritten_summary", notice=True, **content)
        return failure

    def _kept(self, name: str) -> Kept:
        run = self._words.of("coordination", "run", RunState)
        rated = {} if run is None else run.ratings
        state = self._words.of(f"learning-{name}", "state", LearnerState)
        host = self._topology.place(f"learning-{name}")
        here = host == self._topology.host
        folder = str(self._run.directory) if here else f"{host}:{self._run.id}"
        saved = None if state is None or not state.checkpoint else f"{folder}/{state.checkpoint}"
        # One that died or hangs has saved nothing at the end: what a resumed run goes on from is the newest there.
        there = [] if saved or not here else CheckpointFolder(self._run.directory, name).newest_first()
        return Kept(
            checkpoint=next((str(path) for path in (saved, *there) if path is not None), None),
            weights_sha256=(state.weights_sha256 or None) if state is not None and saved else None,
            self_play=dataclasses.asdict(rated[name]) if name in rated else None,
        )

    def _figures(self, died: Sequence[str]) -> dict[str, Figures]:
        """The monitor's figures, with the steps that are still open counted in each stage."""
        try:
            figures = from_status(json.loads((self._run.directory / "status.json").read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._log.warning("figures_missing", error=repr(error))
            return {}
        return {name: self._with_books(name, figure, died) for name, figure in figures.items()}

    def _with_books(self, name: str, figures: Figures, died: Sequence[str]) -> Figures:
        run = self._words.of("coordination", "run", RunState)
        learner = self._words.of(f"learning-{name}", "state", LearnerState)
        if run is None or learner is None or name not in run.books:
            return figures
        assembly = self._words.of("assembly", "state", AssemblyState)
        held = {} if assembly is None else assembly.held.get(name, {})
        open_steps = sum(source.open + source.closed for source in held.values())
        open_steps += run.routed[name] + learner.buffered + learner.training
        books = run.books[name]
        counted = {term: getattr(books, term) for term in ("produced", "trained", "ghost", "stale", "lost")}
        ended = closed({**counted, "open": open_steps}, died)
        if ended["lost"] > counted["lost"]:
            steps = ended["lost"] - counted["lost"]
            self._log.warning("steps_lost", behavior=name, stage=", ".join(died), steps=steps, cause="died at the end")
        found = dataclasses.replace(figures, steps=learner.trained, updates=learner.updates, books=ended)
        if not found.balanced:
            self._log.error("books_do_not_balance", behavior=name, **found.books, notice=True)
        return found


def closed(books: Mapping[str, int], died: Sequence[str]) -> dict[str, int]:
    """The books of a run that has ended, some of whose services may have died meanwhile.

    What is in no other place was lost with them, and what was found beyond what they said had been produced by them.

    Args:
        books: steps by column, as far as the services said.
        died: these services; without any the books are as they are.
    """
    missing = books["produced"] - sum(steps for column, steps in books.items() if column != "produced")
    if not died:
        return dict(books)
    return {**books, "lost": books["lost"] + max(0, missing), "produced": books["produced"] + max(0, -missing)}
