"""The events of a run, as they are read from files that grow and are rotated."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.monitoring.events import EventFiles, Lines, present, scalars, unread
from sparring.pipeline.monitoring.intervals import Interval


class File:
    """A file of a run that is written and rotated; three rotated ones are kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(exist_ok=True)

    def write(self, *numbers: int, rest: str = "") -> None:
        with self.path.open("a") as file:
            file.writelines(f"{json.dumps({'n': number})}\n" for number in numbers)
            file.write(rest)

    def rotate(self) -> None:
        for number in (2, 1):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}.{number}").replace(f"{self.path}.{number + 1}")
        with contextlib.suppress(FileNotFoundError):
            self.path.replace(f"{self.path}.1")


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "metrics.jsonl")


def numbers(lines: Lines) -> list[int]:
    found: list[int] = []
    while batch := [line["n"] for line in lines.batch()]:
        found += batch
    return found


def test_lines_of_a_file_that_grows_and_is_rotated_are_read_once(file: File) -> None:
    lines = Lines(file.path)
    assert numbers(lines) == []
    file.write(1, 2, rest='{"n"')
    assert numbers(lines) == [1, 2]
    file.write(rest=": 3}\n")
    file.rotate()
    assert numbers(lines) == [3]
    file.write(4, 5)
    assert numbers(lines) == [4, 5]
    file.write(6)
    file.rotate()
    file.write(7)
    file.rotate()
    file.write(8)
    assert numbers(lines) == [6, 7, 8]
    assert numbers(lines) == []


def test_late_reader_begins_with_rotated_files_and_a_former_session_is_left_out(file: File) -> None:
    file.write(1)
    file.rotate()
    file.write(2)
    former = present(file.path.parent)
    file.write(3)
    file.rotate()
    file.write(4)
    Path(f"{file.path}.²").write_text("of another program")
    for known, expected in (({}, [1, 2, 3, 4]), (former, [3, 4])):
        lines = Lines(file.path, known)
        assert numbers(lines) == expected
        assert numbers(lines) == []


STEPS = st.lists(st.sampled_from(["write", "rotate", "read", "restart", "die"]), max_size=40)


@given(steps=STEPS)
def test_reader_that_is_restarted_at_its_position_reads_each_line_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    """Unless so many files are rotated before it reads that one of them is removed, which it counts."""
    file = File(tmp_path_factory.mktemp("run") / "metrics.jsonl")
    lines, written, found, rotated, gap = Lines(file.path), 0, list[int](), 0, False
    for step in [*steps, "read"]:
        if step == "write":
            file.write(written := written + 1)
        elif step == "rotate":
            rotated += 1
            gap |= rotated > 3
            file.rotate()
        elif step == "restart":
            lines = Lines(file.path, position=lines.position)
        elif step == "die":  # after one line
            found += [line["n"] for _, line in zip(range(1), lines.batch(), strict=False)]
            lines = Lines(file.path, position=lines.position)
        else:
            found += numbers(lines)
            rotated = 0
    if not gap:
        assert found == list(range(1, written + 1))
    assert found == sorted(set(found))


def test_file_that_was_removed_unread_is_counted_and_the_next_one_read(file: File) -> None:
    lines = Lines(file.path)
    file.write(1)
    assert numbers(lines) == [1]
    for number in range(2, 7):
        file.rotate()
        file.write(number)
    assert numbers(lines) == [3, 4, 5, 6]
    assert lines.gaps == 1


def test_line_that_is_no_object_is_counted_and_left_out(file: File) -> None:
    """Its writer was killed, or another program has written it."""
    file.write(1, rest='{"n": \n')
    file.write(2, rest="null\n[]\n")
    lines = Lines(file.path)
    assert numbers(lines) == [1, 2]
    assert lines.unreadable == 3


def test_lines_beyond_a_number_are_skipped_over_rotated_files(file: File) -> None:
    file.write(1, 2, 3)
    file.rotate()
    file.write(4, 5, rest="{")
    lines = Lines(file.path)
    assert lines.skip(5) == 0
    assert lines.skip(3) == 2
    assert numbers(lines) == [3, 4, 5]
    assert lines.skip(0) == 0


def test_file_that_is_cut_goes_on_where_it_is_written_anew(file: File) -> None:
    """Coordination cuts what was written after the state that it was restarted with."""
    lines = Lines(file.path)
    file.write(1, 2)
    assert numbers(lines) == [1, 2]
    with file.path.open("r+") as opened:
        opened.truncate(len('{"n": 1}\n'))
    file.write(2, 3)
    assert numbers(lines) in ([3], [2, 3])


def test_events_of_all_files_go_on_from_their_positions(tmp_path: Path, make_interval: Callable[..., Interval]) -> None:
    line = json.dumps(make_interval().plain()) + "\n"
    (tmp_path / "logs").mkdir()
    (tmp_path / "metrics.jsonl").write_text(2 * line)
    (tmp_path / "matches.jsonl").write_text('{"match": 1}\n')
    (tmp_path / "logs" / "learning-Ball.jsonl").write_text('{"event": "x"}\n{"event": "checkpoint_saved"}\n')
    (tmp_path / "logs" / "coordination.jsonl").write_text('{"event": "lesson"}\n')
    (tmp_path / "logs" / "assembly.jsonl").write_text('{"event": "lesson"}\n')
    files = EventFiles(tmp_path)
    kinds = ["interval", "interval", "match", "checkpoint", "lesson"]
    assert sorted(event.kind for event in files.events()) == sorted(kinds)
    assert [*files.events()] == []
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line)
    assert unread(tmp_path, files.positions) == 1
    assert unread(tmp_path, {}) == 6, "a writer that has never opened"
    assert [event.kind for event in EventFiles(tmp_path, positions=files.positions).events()] == ["interval"]


def test_statistics_of_simulators_have_their_own_names_and_replace_none_of_ours(
    make_interval: Callable[..., Interval],
) -> None:
    found = scalars(make_interval(simulators={"Level": 2.0, "Goals/Blue": 0.5, "Policy/Entropy": 9.0}).plain())
    assert (found["Level"], found["Goals/Blue"], found["Policy/Entropy"]) == (2.0, 0.5, 1.42)


def test_interval_without_episodes_has_no_reward(make_interval: Callable[..., Interval]) -> None:
    assert "Environment/Cumulative Reward" not in scalars(make_interval(reward=None).plain())
