"""Recorded episodes are read as they were played, and damaged or other files are refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save

from sparring.pipeline.demonstrations.episodes import FORMAT, VERSION, Recording, RecordingError, encode, read
from sparring.pipeline.evaluation import episodes as evaluated
from sparring.pipeline.evaluation.episodes import Recorder
from tests.evaluation.evaluation_helpers import SPEC, Episode, Split, ended, message, played, without_segments

Change = Callable[[dict[str, Any], dict[str, str]], Any]


def split(rng: random.Random, episode: Episode) -> list[Split]:
    """Splits an episode into segments at random."""
    inner = rng.sample(range(1, episode.length), min(rng.randrange(4), episode.length - 1))
    bounds = [0, *sorted(inner), episode.length]
    return [Split(episode, first, after) for first, after in itertools.pairwise(bounds)]


def shuffled(rng: random.Random, episodes: Iterable[Episode]) -> list[Split]:
    """Returns the segments of all episodes in a random order that keeps the order within each episode."""
    waiting = [split(rng, episode) for episode in episodes]
    out = []
    while waiting:
        one = rng.choice(waiting)
        out.append(one.pop(0))
        waiting = [left for left in waiting if left]
    return out


def masks(rng: random.Random, splits: list[Split]) -> Any:
    """Samples masks for all rows, or none, and stores them in the episodes too."""
    if rng.random() < 0.5:
        return None
    steps = sum(one.after - one.first for one in splits)
    sampled = np.random.default_rng(rng.randrange(2**32)).random((steps, SPEC.actions.mask_size)) < 0.3
    at = 0
    for one in splits:
        for step in range(one.first, one.after):
            one.episode.masks[step] = sampled[at]
            at += 1
    return sampled


def check(found: Recording, episodes: dict[int, Episode]) -> list[int]:
    """Compares the episodes of a file with those played; returns their numbers."""
    columns, numbers = found.columns, found.columns["agents"].tolist()
    assert (found.behavior, found.spec) == ("B", SPEC)
    after = np.cumsum(columns["lengths"])
    some_masked = any(mask is not None for number in numbers for mask in episodes[number].masks)
    assert ("masks" in columns) == some_masked
    for at, number in enumerate(numbers):
        episode, rows = episodes[number], slice(int(after[at] - columns["lengths"][at]), int(after[at]))
        scalars = {name: columns[name][at] for name in ("lengths", "teams", "simulators", "groups", "terminated")}
        assert scalars == {
            "lengths": episode.length,
            "teams": episode.team,
            "simulators": episode.simulator,
            "groups": episode.group,
            "terminated": episode.terminated,
        }
        expected = {
            "continuous": np.clip(episode.raw, -3, 3) / np.float32(3),
            "discrete": episode.discrete,
            "rewards": episode.rewards,
            "group_rewards": episode.group_rewards,
        }
        for index, column in enumerate(episode.observations):
            expected[f"observation.{index}"] = column
            np.testing.assert_array_equal(columns[f"final_observation.{index}"][at], episode.last[index])
        if some_masked:
            expected["masks"] = np.array(
                [np.zeros(SPEC.actions.mask_size, bool) if mask is None else mask for mask in episode.masks]
            )
        for name, column in expected.items():
            assert columns[name].dtype == column.dtype, name
            np.testing.assert_array_equal(columns[name][rows], column, name)
    assert np.abs(columns["continuous"]).max(initial=0) <= 1
    return numbers


@settings(max_examples=75)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 12),
    longest=st.sampled_from([1, 3, 20]),
    wanted=st.sampled_from([0, 1, 5, 100]),
    together=st.integers(1, 6),
    file_bytes=st.sampled_from([1, 500, 2**26]),
)
def test_recorded_episodes_are_read_as_they_were_played(
    seed: int, count: int, longest: int, wanted: int, together: int, file_bytes: int
) -> None:
    """Each wanted, reported episode is recorded once and completely, however it is split over segments and files.

    Its statistics may arrive with, before or after its last segment; a lost episode has a last segment, too.
    """
    rng = random.Random(seed)
    episodes = {number: played(rng, number, rng.randint(1, longest)) for number in range(1, count + 1)}
    splits = shuffled(rng, episodes.values())
    lost = {number for number in episodes if rng.random() < 0.2}  # their simulator disconnects before they end
    splits = [dataclasses.replace(one, lost=one.over) if one.episode.number in lost else one for one in splits]
    settled = [number for number in episodes if not wanted or number <= wanted]
    news = sorted(episodes, key=lambda _: rng.random())
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluated, "FILE_BYTES", file_bytes)
        recorder = Recorder(Path(folder) / "made", "B", SPEC, wanted)
        ends: list[int] = []
        arrived: set[int] = set()
        reported: set[int] = set()
        while splits or news:
            size = rng.randint(1, together)
            taken, splits = splits[:size], splits[size:]
            now, news = (news[:size], news[size:]) if rng.random() < 0.7 or not taken else ([], news)
            statistics = ended(
                [number for number in now if number not in lost], [number for number in now if number in lost]
            )
            recorder.add(
                message(taken, masked=masks(rng, taken), episodes=statistics) if taken else without_segments(statistics)
            )
            reported |= set(now)
            arrived |= {one.episode.number for one in taken if one.over}
            ends += sorted((arrived & reported & set(settled)) - lost - set(ends))
            if file_bytes == 1:
                assert recorder.episodes == len(ends)
        recorder.flush()
        found = [read(path) for path in recorder.files]
        assert (Path(folder) / "made").exists() == bool(ends)
        assert [number for one in found for number in check(one, episodes)] == ends
        assert recorder.episodes == len(ends)
        if file_bytes == 2**26:
            assert len(found) == (1 if ends else 0)
        assert recorder.files == sorted(Path(folder).glob("made/*"))


def test_actions_are_recorded_within_the_limit_of_the_policy(tmp_path: Path) -> None:
    whole = message([Split(played(random.Random(0), 1, 40), 0, 40)])
    recorder = Recorder(tmp_path, "B", SPEC, action_limit=0.5)
    recorder.add(whole)
    recorder.flush()
    found = read(recorder.files[0]).columns["continuous"]
    np.testing.assert_array_equal(found, np.clip(whole.continuous, -0.5, 0.5) * 2)
    assert (np.abs(whole.continuous) > 0.5).any()


def test_second_flush_writes_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "B", SPEC)
    recorder.add(message([Split(played(random.Random(0), 1, 2), 0, 2)]))
    recorder.flush()
    recorder.flush()
    assert [path.name for path in recorder.files] == ["B-00001.episodes.safetensors"]


def test_unwanted_episode_is_not_recorded(tmp_path: Path) -> None:
    whole = message([Split(played(random.Random(0), 9, 3), 0, 3)])
    recorder = Recorder(tmp_path / "made", "B", SPEC, wanted=8)
    recorder.add(whole)  # an episode that is not wanted
    recorder.flush()
    assert recorder.files == []
    assert not (tmp_path / "made").exists()


def test_discrete_behavior_has_continuous_columns_of_width_zero(tmp_path: Path) -> None:
    """Every column exists, even without content."""
    spec = dataclasses.replace(SPEC, actions=dataclasses.replace(SPEC.actions, continuous=0))
    episode = played(random.Random(1), 1, 4)
    episode.raw = episode.raw[:, :0]
    recorder = Recorder(tmp_path, "B", spec)
    recorder.add(message([Split(episode, 0, 4)]))
    recorder.flush()
    assert read(recorder.files[0]).columns["continuous"].shape == (4, 0)


# ---------------------------------------------------------------- other files


def good() -> tuple[dict[str, Any], dict[str, str]]:
    """Returns columns and metadata of a good file of two episodes, with masks."""
    rng = random.Random(5)
    splits = [Split(played(rng, number, 2 + number), 0, 2 + number) for number in (1, 2)]
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), "B", SPEC)
        recorder.add(message(splits, masked=np.zeros((7, 5), bool)))
        recorder.flush()
        columns = dict(read(recorder.files[0]).columns)
        with safe_open(recorder.files[0], "numpy") as file:
            return columns, dict(file.metadata())


def test_good_file_can_be_read_and_written_again(tmp_path: Path) -> None:
    columns, metadata = good()
    path = tmp_path / "file"
    path.write_bytes(save(columns, metadata))
    found = read(path)
    path.write_bytes(encode(found))
    again = read(path)
    assert (again.behavior, again.spec) == (found.behavior, found.spec)
    assert list(again.columns) == list(columns)
    assert all(again.columns[name].tobytes() == column.tobytes() for name, column in columns.items())
    assert (metadata["format"], metadata["version"]) == (FORMAT, VERSION)


def replace_column(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda columns, _: columns.update({name: np.ascontiguousarray(change(columns[name]))})


def set_metadata(name: str, value: str) -> Change:
    return lambda _, metadata: metadata.update({name: value})


SPECS = {
    "no JSON": "{",
    "too deep": 100_000 * "[",
    "another kind of JSON": "[1, 2]",
    "null": "null",
    "without actions": '{"observations": []}',
    "without observations": '{"observations": [], "actions": {"continuous": 1, "discrete": []}}',
    "an observation with a field too many": json.dumps(
        {
            "observations": [{"name": "a", "shape": [1], "colour": "red"}],
            "actions": {"continuous": 1, "discrete": []},
        }
    ),
    "a shape of no kind": json.dumps(
        {"observations": [{"name": "a", "shape": [1, 2]}], "actions": {"continuous": 1, "discrete": []}}
    ),
    "text for a number": json.dumps(
        {"observations": [{"name": "a", "shape": [1]}], "actions": {"continuous": "1", "discrete": []}}
    ),
}

BAD: dict[str, tuple[Change, str]] = {
    "another format": (set_metadata("format", "weights"), "format 'weights' version '1'"),
    "a later version": (set_metadata("version", "2"), "format 'sparring-episodes' version '2'"),
    "no format": (lambda _, metadata: metadata.pop("format"), "format None"),
    "no metadata at all": (lambda _, metadata: metadata.clear(), "format None version None"),
    "no behavior": (lambda _, metadata: metadata.pop("behavior"), "a spec that cannot be read"),
    "no spec": (lambda _, metadata: metadata.pop("spec"), "a spec that cannot be read"),
    "doubles for rewards": (
        replace_column("rewards", lambda c: c.astype(np.float64)),
        "float64 (7,) for column 'rewards'",
    ),
    "floats for an image": (
        replace_column("observation.0", lambda c: c.astype(np.float32)),
        "float32 (7, 3, 2, 2) for column 'observation.0' where uint8 (7, 3, 2, 2)",
    ),
    "short agents": (replace_column("agents", lambda c: c.astype(np.int32)), "int32 (2,) for column 'agents'"),
    "a step missing": (
        replace_column("discrete", lambda c: c[1:]),
        "int32 (6, 2) for column 'discrete' where int32 (7, 2)",
    ),
    "one action too few": (replace_column("continuous", lambda c: c[:, 1:]), "float32 (7, 1) for column 'continuous'"),
    "masks of another width": (replace_column("masks", lambda c: c[:, 1:]), "bool (7, 4) for column 'masks'"),
    "longer episodes than steps": (replace_column("lengths", lambda c: c + 1), "where float32 (9, 2) is expected"),
    "lengths in two dimensions": (replace_column("lengths", lambda c: c[:, None]), "column 'lengths' that is not one"),
    "lengths of no number": (replace_column("lengths", lambda c: np.float32([np.nan, 1])), "column 'lengths'"),
    "a negative length": (replace_column("lengths", lambda c: np.int32([-1, 8])), "column 'lengths'"),
    **{
        f"without {name}": (lambda columns, _, name=name: columns.pop(name), f"nothing for column '{name}'")
        for name in ("agents", "terminated", "group_rewards", "observation.1", "final_observation.0")
    },
    "without lengths": (lambda columns, _: columns.pop("lengths"), "column 'lengths' that is not one"),
    **{f"spec: {name}": (set_metadata("spec", text), "a spec that cannot be read") for name, text in SPECS.items()},
}


def refused(path: Path, message_part: str) -> None:
    with pytest.raises(RecordingError) as caught:
        read(path)
    error = caught.value
    assert str(path) in error.got
    assert message_part in error.got
    assert error.expected == "recorded episodes: a safetensors file of format 'sparring-episodes' version '1'"
    assert "record it again" in error.remedy


@pytest.mark.parametrize("what", BAD)
def test_file_of_another_format_is_refused(tmp_path: Path, what: str) -> None:
    """The error contains the finding, the column and the remedy."""
    change, message_part = BAD[what]
    columns, metadata = good()
    change(columns, metadata)
    path = tmp_path / "file"
    path.write_bytes(save(columns, metadata))
    refused(path, message_part)


@pytest.mark.parametrize("content", [b"", b"agents,returns\n1,2.5\n", b"\x00" * 100, b"\xff" * 100], ids=repr)
def test_file_that_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    refused(path, "")


def test_file_with_a_dtype_unknown_to_numpy_is_refused(tmp_path: Path) -> None:
    """Even if a library has added that dtype to numpy."""
    content = save(*good())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["rewards"] |= {"dtype": "BF16", "shape": [2 * header["rewards"]["shape"][0]]}
    changed = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])
    refused(tmp_path / "file", "bfloat16")


def test_file_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    """A full disk or an aborted copy leaves such files."""
    whole, path = save(*good()), tmp_path / "file"
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        refused(path, "")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "none", "")
    refused(tmp_path, "")
