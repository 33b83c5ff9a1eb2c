"""Structured logs."""

from __future__ import annotations

import json
import logging
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.monitoring import logs


class Early(logging.LogRecord):
    """A record of half a second after the epoch."""

    def __init__(self, *args: Any, **details: Any) -> None:
        super().__init__(*args, **details)
        self.created = 0.5


@pytest.fixture
def path(folder: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Path]:
    logging.setLogRecordFactory(Early)
    yield logs.configure(folder, "run-1", "learning-Ball", console=True)
    logs.close()
    logging.setLogRecordFactory(logging.LogRecord)


def lines(path: Path) -> list[dict[str, Any]]:
    """Ends the logs, so that all lines are written, and returns those of a file."""
    logs.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_log_line_names_run_service_and_behavior(path: Path) -> None:
    logs.get(behavior="Ball").info("checkpoint saved", step=24_000)
    assert path.parts[-2:] == ("logs", "learning-Ball.jsonl")
    assert lines(path) == [
        {
            "timestamp": "1970-01-01T00:00:00.500+00:00",
            "level": "info",
            "event": "checkpoint saved",
            "run_id": "run-1",
            "service": "learning-Ball",
            "behavior": "Ball",
            "step": 24_000,
            "logger": "sparring",
        }
    ]


def test_console_shows_warnings_and_notices_only(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = logs.get()
    log.info("routine")
    log.info("listening", notice=True, address="tcp://127.0.0.1:5005")
    log.warning("queue is full", queue="segments")
    assert [line["event"] for line in lines(path)] == ["routine", "listening", "queue is full"]
    assert capfd.readouterr().err.splitlines() == [
        "00:00:00  info     learning-Ball  listening  address=tcp://127.0.0.1:5005",
        "00:00:00  warning  learning-Ball  queue is full  queue=segments",
    ]


def test_standard_logging_and_warnings_go_to_the_same_file(path: Path) -> None:
    logging.getLogger("some.library").warning("slow by %d s", 3, extra={"host": "a", "token": "t"})
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", UserWarning, stacklevel=1)
    first, second = lines(path)
    assert (first["event"], first["logger"], first["host"], first["token"]) == (
        "slow by 3 s",
        "some.library",
        "a",
        "***",
    )
    assert (second["logger"], second["level"]) == ("py.warnings", "warning")
    assert "UserWarning: careful" in second["event"]


def test_traceback_is_in_the_file_and_not_on_the_console(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        int("bad shape")
    except ValueError:
        logs.get().exception("update failed")
    assert lines(path)[0]["exception"].endswith("'bad shape'")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("update failed")


def test_secrets_are_hidden_at_any_depth(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logs.get(credential="c1").warning("hello", peer={"Token": "t1", "keys": [{"secret_key": "k1", "n": 1}]}, key="k2")
    (line,) = lines(path)
    assert line["credential"] == line["key"] == "***"
    assert line["peer"] == {"Token": "***", "keys": [{"secret_key": "***", "n": 1}]}
    shown = capfd.readouterr().err
    assert not any(secret in shown for secret in ("c1", "t1", "k1", "k2"))


def test_every_value_is_valid_json(path: Path) -> None:
    logs.get().info("values", loss=float("nan"), mean=np.float32(0.5), path=Path("a"), shape=(2, 3))
    (line,) = lines(path)
    assert (line["loss"], line["mean"], line["path"], line["shape"]) == ("nan", 0.5, "a", [2, 3])


def test_second_configuration_replaces_the_first(path: Path, folder: Path) -> None:
    second = logs.configure(folder, "run-1", "assembly")
    logs.get().info("hello")
    assert len(lines(second)) == 1
    assert lines(path) == []


def test_console_shows_control_characters_as_text(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logs.get().warning("refused", name="\x1b]0;owned\x07\x9b2J")
    assert lines(path)[0]["name"] == "\x1b]0;owned\x07\x9b2J"
    assert capfd.readouterr().err == "00:00:00  warning  learning-Ball  refused  name=\\x1b]0;owned\\x07\\x9b2J\n"


class Stuck(logging.Handler):
    """A Stuck handler blocks until it is released, like a terminal that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.released, self.written = threading.Event(), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.released.wait()
        self.written.append(record.getMessage())


def test_blocked_console_blocks_no_caller_and_dropped_lines_are_counted() -> None:
    stuck = Stuck()
    writer = logs.LineWriter(stuck, waiting=2)
    logger = logging.Logger("own")
    logger.addHandler(writer)
    while writer.queue.empty():  # the thread holds the first line or has not begun
        logger.info("first")
    for number in range(10):
        logger.info("line %d", number)
    stuck.released.set()
    logger.info("last")
    while len(stuck.written) < 3:
        logger.info("later")
    writer.close()
    dropped = [line for line in stuck.written if "log_lines_dropped" in line]
    assert dropped
    assert not [line for line in stuck.written if line == "line 9"]


def test_disk_without_room_costs_counted_lines_and_prints_no_traceback(
    path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = threading.Event()
    original = logging.FileHandler.emit

    def emit(self: logging.FileHandler, record: logging.LogRecord) -> None:
        self.handleError(record) if full.is_set() else original(self, record)

    monkeypatch.setattr(logging.FileHandler, "emit", emit)
    full.set()
    logs.get().info("lost")
    logs.get().info("lost too")
    (writer,) = [one for one in logging.getLogger().handlers if isinstance(one, logs.LineWriter) and not one.filters]
    while writer.dropped < 2:
        pass
    full.clear()
    logs.get().info("written")
    found = lines(path)
    assert [line["event"] for line in found] == ["log_lines_dropped", "written"]
    assert found[0]["lines"] == 2
    assert "Traceback" not in capfd.readouterr().err


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=20), unique=True))
def test_log_file_names_stay_in_their_folder_and_are_unique(names: list[str]) -> None:
    files = [logs.file_name(name) for name in names]
    assert len(set(files)) == len(files)
    assert not any("/" in file or file in {"", ".", ".."} for file in files)
