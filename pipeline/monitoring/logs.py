"""Writes structured logs: one JSON line per event, in RUN/logs/SERVICE.jsonl.

Every line has timestamp (UTC), level, event, run_id, service and logger; most have more. Warnings, errors and
events with `notice=True` also go to the console in one readable line. The standard library's logging and
warnings go to the same places. A thread of each place writes, so that neither a slow disk nor a console that nothing
reads blocks the program; lines that find its queue full are dropped and counted.

    logs.configure(run_dir, "balance-1", "learning-Balance", console=True)
    log = logs.get(behavior="Balance")
    log.info("checkpoint saved", step=24_000, notice=True)
"""

import contextlib
import logging
import logging.handlers
import math
import os
import queue
import re
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import quote

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from sparring.pipeline.errors import DiskFull, first_failure
from sparring.pipeline.files import Json, regular

MASK: Final = "***"
_SECRET: Final = re.compile(r"(.*_)?(credential|token|secret|key|password)", re.IGNORECASE | re.DOTALL)
_DEEP: Final = 7
_WAITING_LINES: Final = 10_000
_WRITABLE: Final = "expected a log that can be written; free disk space, or correct its permissions"
_CLOSE_S: Final = 2.0
"""The time for waiting lines at the end of a process."""


def configure(
    run_dir: Path, run_id: str, service: str, console: bool = False, *, most_bytes: int = 16 * 2**20, kept: int = 3
) -> Path:
    """Sends the logs of this process to the run's folder; a second call replaces the first.

    Args:
        run_dir: folder of the run; `logs/` is created in it.
        run_id: written into every line.
        service: name such as "learning-Ball", written into every line; names the file.
        console: whether warnings, errors and notices also go to standard error.
        most_bytes: size beyond which a file is rotated to FILE.1, FILE.2 and so on.
        kept: number of rotated files that are kept; 0 for no bound.

    Returns:
        The path of the file.

    Raises:
        DiskFull: the file cannot be written.
        ServiceError: something else is in its place.
    """
    close()
    path = run_dir / "logs" / f"{file_name(service)}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        regular(path)
        file = logging.handlers.RotatingFileHandler(path, maxBytes=most_bytes, backupCount=kept, encoding="utf-8")
    except OSError as refused:  # there is no log that could hold its traceback
        cause = first_failure(refused)
        raise cause if cause is not refused else DiskFull(f"got {refused}; {_WRITABLE}") from refused
    processors = _processors(run_id, service)
    _install(LineWriter(file), [*processors, structlog.processors.JSONRenderer(default=_readable)])
    if console:
        terminal = LineWriter(Terminal(2))
        terminal.addFilter(_matters)
        _install(terminal, [*processors, _line])
    logging.getLogger().setLevel(logging.INFO)
    logging.captureWarnings(True)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=False,
    )
    return path


class LineWriter(logging.handlers.QueueHandler):
    """A LineWriter formats records at once and lets a thread of its own pass them to another handler.

    A record that finds the queue full, or that the other handler cannot write, is dropped; the next line that can be
    written follows the number of dropped ones.

    Args:
        target: writes the lines, and may block.
        waiting: the largest number of lines that wait for it.

    Attributes:
        dropped: number of lines that were dropped since the last one that was written.
    """

    def __init__(self, target: logging.Handler, waiting: int = _WAITING_LINES) -> None:
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(waiting)
        self._target = target
        self._target.handleError = self.handleError  # type: ignore[method-assign]
        self._failed = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._write, name="log lines", daemon=True)
        self._thread.start()  # first: where that fails, no handler is left to be closed at exit
        super().__init__(self._lines)

    def enqueue(self, record: logging.LogRecord) -> None:
        """Puts a formatted record into the queue, or drops it."""
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name of the standard library)
        """Notes that a record cannot be written, in place of a traceback on standard error."""
        self._failed = True

    def _write(self) -> None:
        while (record := self._lines.get()) is not None:
            if (dropped := self.dropped) and self._writes(self.prepare(_dropped_lines(dropped))):
                self.dropped -= dropped
            if not self._writes(record):
                self.dropped += 1

    def _writes(self, record: logging.LogRecord) -> bool:
        self._failed = False
        self._target.handle(record)
        return not self._failed

    def close(self) -> None:
        """Writes the waiting lines, unless that takes too long."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():  # otherwise it still uses its target
            self._target.close()
        super().close()


def _dropped_lines(count: int) -> logging.LogRecord:
    content = {"name": "sparring", "levelno": logging.WARNING, "levelname": "WARNING", "msg": "log_lines_dropped"}
    return logging.makeLogRecord({**content, "lines": count})


class Terminal(logging.Handler):
    """Writes to a stream without buffer or lock: a blocked thread that held one would keep the process alive.

    On a terminal, to which several processes may write, every line begins with the removal of a line of progress, and
    is a single write: no line is ever over another.

    Args:
        descriptor: of standard output or standard error.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._is_terminal = os.isatty(descriptor)

    def createLock(self) -> None:  # noqa: N802 (the name of the standard library)
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, or on a terminal progress, which the terminal cuts off at its edge and has no end."""
        if record.levelno == PROGRESS and not self._is_terminal:
            return
        text = self.format(record)
        text = f"{_CUT_OFF}{text}{_FOLD}" if record.levelno == PROGRESS else f"{text}\n"
        try:
            content = memoryview(f"{_REMOVE if self._is_terminal else ''}{text}".encode(errors="backslashreplace"))
            while content:
                content = content[os.write(self._descriptor, content) :]
        except OSError:
            self.handleError(record)


PROGRESS: Final = 1
"""The level of the line of progress."""

_REMOVE: Final = "\r\x1b[K"
_CUT_OFF: Final = "\x1b[?7l"
_FOLD: Final = "\x1b[?7h"


def get(**bound: str | int) -> FilteringBoundLogger:
    """Returns a logger that adds `bound` to each of its lines, before and after `configure`."""
    logger: FilteringBoundLogger = structlog.get_logger("sparring", **bound)
    return logger


def close() -> None:
    """Flushes and closes the handlers that `configure` opened."""
    root = logging.getLogger()
    opened = [handler for handler in root.handlers if isinstance(handler, LineWriter)]
    for handler in opened:
        root.removeHandler(handler)
        handler.close()
    if opened:
        logging.captureWarnings(False)
        structlog.reset_defaults()


def file_name(name: str) -> str:
    """Returns `name` as one part of a path: letters, digits, space and -_.+ stay, the rest is percent-encoded.

    Different names stay different, and no name leads out of its folder.
    """
    encoded = quote(name, safe=" -_.+")
    return encoded if encoded.strip(". ") else encoded.replace(".", "%2E").replace(" ", "%20") or "%"


# ---------------------------------------------------------------- processors


def mask_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Masks the values of keys named credential, token, secret, key or password, or ending in "_" and one of these."""
    cleaned: EventDict = _cleaned(event, _DEEP)
    return cleaned


def _cleaned(value: Json, deep: int) -> Json:
    """Returns `value` without secrets, and with NaN and infinity, which JSON cannot represent, as text."""
    if isinstance(value, dict) and deep:
        known = {name: MASK if _SECRET.fullmatch(str(name)) else inner for name, inner in value.items()}
        return {name: _cleaned(inner, deep - 1) for name, inner in known.items()}
    if isinstance(value, (list, tuple)) and deep:
        return [_cleaned(inner, deep - 1) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _processors(run_id: str, service: str) -> list[Processor]:
    """Returns the processors of every event, the standard library's included, before it is rendered."""

    def identify(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        timestamp = datetime.fromtimestamp(event["_record"].created, UTC).isoformat(timespec="milliseconds")
        first = {"timestamp": timestamp, "level": event["level"], "event": event["event"]}
        return {**first, "run_id": run_id, "service": service, **event}

    return [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        identify,
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        mask_secrets,
    ]


def _install(handler: logging.Handler, processors: list[Processor]) -> None:
    foreign: list[Processor] = [structlog.stdlib.ExtraAdder()]
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=processors, foreign_pre_chain=foreign))
    logging.getLogger().addHandler(handler)


def _matters(record: logging.LogRecord) -> bool:
    notice = isinstance(record.msg, dict) and record.msg.get("notice") is True
    return notice or record.levelno >= logging.WARNING


def _line(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """Formats one event for a reader: time, level, service, event, then the rest; a traceback is in the file."""
    rest = {name: value for name, value in event.items() if name not in PLACED}
    parts = [str(event["timestamp"])[11:19], f"{event['level']:<7}", str(event["service"]), str(event["event"])]
    text = "  ".join(parts + [f"{name}={value}" for name, value in rest.items()])
    return printable(text)


def printable(text: str) -> str:
    """Returns `text` with control characters, which could command a terminal, as escape sequences of Python."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


PLACED: Final = frozenset({"timestamp", "level", "service", "event", "run_id", "logger", "notice", "exception"})
"""Keys of a line that are no facts of its event."""


def _readable(value: Json) -> Json:
    """Converts values that JSON cannot represent: numpy scalars to numbers, others such as paths to text."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else str(value)
