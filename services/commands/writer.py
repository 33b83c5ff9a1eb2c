"""`sparring writer NAME --run DIR`: runs one writer of a run, for the supervisor.

consumes       the files of the run: `metrics.jsonl`, `matches.jsonl`, logs of learners and coordination
produces       what the writer makes of it; its state in `writers/`, whose time shows that it lives
waits for      new lines, every half second
unblocked by   time alone; it ends after the last line, once `summary.json` says that the run has ended
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from sparring.pipeline.bridges.explain import described_with_place
from sparring.pipeline.errors import FAILED, NOTICE, UNUSABLE, ServiceError, SparringError, described
from sparring.pipeline.files import DAMAGE, regular
from sparring.pipeline.monitoring import logs
from sparring.pipeline.monitoring.events import Event
from sparring.pipeline.monitoring.writers import RunInfo, load, settings_of
from sparring.pipeline.monitoring.writers.delivery import Delivery
from sparring.services.process.runtime import Run
from sparring.services.supervision.topology import load_run, origin_of

POLL_S: Final = 0.5
NICENESS: Final = 19


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("name", help="of the writer, as tensorboard")
    parser.add_argument("--run", type=Path, required=True, help="folder of a run that was prepared")
    parser.add_argument("--supervised", action="store_true", help="its supervisor ends it, and signals do not")


def run(args: argparse.Namespace) -> int:
    """Writes until the run has ended, or a signal comes where there is no supervisor.

    Raises:
        SparringError: the run's folder cannot be read.
    """
    directory, name = args.run.absolute(), args.name
    prepared, _ = load_run(directory)
    os.nice(NICENESS)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # of `stty tostop`, in the background
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if args.supervised else ():
        signal.signal(ignored, signal.SIG_IGN)  # it ends with the run, or is killed
    bounds = prepared.settings.pipeline.logs
    logs.configure(directory, prepared.id, f"writer-{name}", most_bytes=bounds.most_bytes, kept=bounds.kept)
    try:
        _write(prepared, name)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not args.supervised:
            raise
        known = isinstance(error, SparringError)
        logs.get().error("failed", error=described(error), exc_info=None if known else error)
        _say(described_with_place(error))  # the supervisor shows the last line
        return UNUSABLE if known else FAILED
    finally:
        logs.close()
    return 0


def _write(prepared: Run, name: str) -> None:
    settings, directory = prepared.settings, prepared.directory
    sys.path.extend(settings.pipeline.python_path)  # last: the user's modules must not shadow installed ones
    kind, limits = load(name), settings.pipeline.writer_limits
    if lacking := kind.missing():
        raise ServiceError(lacking)
    writer = kind(settings_of(kind, settings.active_writers[name]))
    whole = settings.model_dump(mode="json", exclude={"writers"})
    delivery = Delivery(
        name,
        writer,
        RunInfo(id=prepared.id, folder=directory, origin=origin_of(directory), settings=whole),
        logs.get(),
        time.monotonic,
        lambda text: _say(f"{NOTICE}writer {name}: {text}"),
        backlog=limits.backlog,
        failures=limits.failures,
        pause_s=settings.pipeline.restarts.period_s,
        late=prepared.resumed,
    )
    delivery.open()
    while True:
        end = _ending(directory)  # before the last lines are read
        moved = delivery.deliver(last=end is not None)
        if end is not None and not moved:
            delivery.end(end)
            return
        if not moved:
            time.sleep(POLL_S)


def _ending(directory: Path) -> Event | None:
    """Returns the last event, once the run has ended."""
    try:
        summary = json.loads(regular(directory / "summary.json").read_bytes())
        return Event("end", {"status": summary["status"], "error": summary.get("error") or ""})
    except DAMAGE:
        return None


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # standard error may be a file on a full disk
        os.write(2, f"{text}\n".encode(errors="replace"))
