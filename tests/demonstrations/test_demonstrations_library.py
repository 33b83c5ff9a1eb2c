"""Training reads recorded files as demonstrations and refuses those that do not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.demonstrations.episodes import SUFFIX, Arrays, Recording, RecordingError, encode
from sparring.pipeline.demonstrations.library import FEWEST_TO_SPLIT, Demonstrations, load
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

VECTOR = ObservationSpec(name="place", shape=(2,))
IMAGE = ObservationSpec(name="eye", shape=(3, 4, 4), dtype="uint8", kind="image")
SPEC = BehaviorSpec(observations=(VECTOR, IMAGE), actions=ActionSpec(continuous=1, discrete=(2, 3)))


def columns(lengths: list[int], seed: int = 0, masked: bool = False, spec: BehaviorSpec = SPEC) -> Arrays:
    """Returns random episodes of the given lengths."""
    random = np.random.default_rng(seed)
    e, r = len(lengths), sum(lengths)

    def seen(n: int, one: ObservationSpec) -> Any:
        return random.integers(0, 255, (n, *one.shape)).astype(one.dtype)

    found: Arrays = {
        "lengths": np.array(lengths, np.int32),
        "agents": np.arange(e, dtype=np.int64),
        "teams": np.zeros(e, np.int32),
        "simulators": np.zeros(e, np.int32),
        "groups": np.zeros(e, np.int64),
        "terminated": random.random(e) < 0.5,
        "continuous": random.uniform(-1, 1, (r, spec.actions.continuous)).astype(np.float32),
        "discrete": random.integers(0, spec.actions.discrete, (r, len(spec.actions.discrete))).astype(np.int32),
        "rewards": random.normal(size=r).astype(np.float32),
        "group_rewards": np.zeros(r, np.float32),
    }
    for at, one in enumerate(spec.observations):
        found |= {f"observation.{at}": seen(r, one), f"final_observation.{at}": seen(e, one)}
    if masked:
        found["masks"] = random.random((r, spec.actions.mask_size)) < 0.5
        first = np.cumsum((0, *spec.actions.discrete))[: len(spec.actions.discrete)]
        np.put_along_axis(found["masks"], first + found["discrete"], False, 1)  # the action that was taken is allowed
    return found


def write(folder: Path, name: str, content: Arrays, spec: BehaviorSpec = SPEC, behavior: str = "Other") -> Path:
    path = folder / f"{name}{SUFFIX}"
    path.write_bytes(encode(Recording(behavior=behavior, spec=spec, columns=content)))
    return path


def test_files_of_a_folder_are_joined_by_name(tmp_path: Path) -> None:
    """The steps of all files follow each other; names of behavior and observations may differ."""
    first, second = columns([2, 3], 1), columns([1], 2, masked=True)
    renamed = dataclasses.replace(SPEC, observations=(dataclasses.replace(VECTOR, name="x"), IMAGE))
    write(tmp_path, "b", second)
    write(tmp_path, "a", first | {"extra": np.zeros(3)}, renamed)
    (tmp_path / "notes.txt").write_text("no recording")
    found = load(tmp_path, "Ball", SPEC)
    assert (found.episodes, found.steps) == (3, 6)
    assert found.episode.tolist() == [0, 0, 1, 1, 1, 2]
    assert found.ended.tolist() == [False, True, False, False, True, True]
    for name in ("continuous", "discrete", "terminated"):
        np.testing.assert_array_equal(getattr(found, name), np.concatenate([first[name], second[name]]))
    assert found.masks is not None
    np.testing.assert_array_equal(found.masks, np.concatenate([np.zeros((5, 5), bool), second["masks"]]))


def test_observations_are_those_of_the_file(tmp_path: Path) -> None:
    content = columns([2, 1, 3])
    found = load(write(tmp_path, "a", content), "Ball", SPEC)
    for at in range(2):
        np.testing.assert_array_equal(found.observations[at], content[f"observation.{at}"])
    assert found.masks is None


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_a_split_keeps_episodes_whole(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], share: float, seed: int
) -> None:
    """Each episode is wholly in one part; the first part has at least one, and few episodes are not split."""
    found = load(write(tmp_path_factory.mktemp("split"), "a", columns(lengths, 3, masked=True)), "Ball", SPEC)
    first, held = found.split(share, seed)
    assert first.episodes + held.episodes == found.episodes
    assert first.episodes >= 1
    few = len(lengths) < FEWEST_TO_SPLIT
    assert held.episodes == (0 if few else min(round(share * len(lengths)), len(lengths) - 1))
    originals = {key(found, number): number for number in range(found.episodes)}
    numbers = [originals.pop(key(part, number)) for part in (first, held) for number in range(part.episodes)]
    assert numbers == sorted(numbers[: first.episodes]) + sorted(numbers[first.episodes :])
    again = found.split(share, seed)
    assert [key(part, n) for part in again for n in range(part.episodes)] == [
        key(part, n) for part in (first, held) for n in range(part.episodes)
    ]


def key(part: Demonstrations, number: int) -> bytes:
    """Returns all columns of one episode as bytes."""
    rows = part.episode == number
    assert part.masks is not None
    assert len(part.terminated) == part.episodes
    assert part.ended[rows].tolist() == [False] * (int(rows.sum()) - 1) + [True]
    stepwise = [*part.observations, part.continuous, part.discrete, part.masks]
    return b"".join([*(column[rows].tobytes() for column in stepwise), part.terminated[number].tobytes()])


def other(**values: Any) -> BehaviorSpec:
    return dataclasses.replace(SPEC, **values)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (other(observations=(VECTOR,)), "vector [2] float32"),
        (other(observations=(IMAGE, VECTOR)), "image [3, 4, 4] uint8, vector [2] float32"),
        (other(observations=(dataclasses.replace(VECTOR, kind="goal"), IMAGE)), "goal [2] float32"),
        (other(observations=(VECTOR, dataclasses.replace(IMAGE, dtype="float32"))), "differ only in their dtype"),
        (other(actions=ActionSpec(continuous=1, discrete=(3, 2))), "(3, 2)"),
        (other(actions=ActionSpec(continuous=2, discrete=(2, 3))), "2 continuous actions"),
    ],
)
def test_a_recording_of_another_spec_is_refused(tmp_path: Path, spec: BehaviorSpec, text: str) -> None:
    """Other observations (kind, shape, dtype, order) or actions are refused with the file and both specs."""
    path = write(tmp_path, "a", columns([2], spec=spec), spec)
    with pytest.raises(RecordingError) as caught:
        load(tmp_path, "Ball", SPEC)
    assert str(path) in str(caught.value)
    assert text in str(caught.value)
    assert "Ball" in caught.value.expected


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("rewards", np.nan, "NaN"),
        ("observation.0", np.inf, "observation.0"),
        ("continuous", 1.5, "size 1.5"),
        ("discrete", 3, "branch"),
        ("discrete", -1, "branch"),
    ],
)
def test_invalid_numbers_are_refused(tmp_path: Path, column: str, value: float, text: str) -> None:
    """One bad number would spoil a whole training, so the file is refused by name."""
    content = columns([2])
    content[column].reshape(-1)[0] = value
    path = write(tmp_path, "a", content)
    with pytest.raises(RecordingError, match=text) as caught:
        load(path, "Ball", SPEC)
    assert str(path) in str(caught.value)


def test_a_path_without_episodes_is_refused(tmp_path: Path) -> None:
    """A missing path, a folder without recordings and files without episodes are refused."""
    with pytest.raises(RecordingError, match="does not exist"):
        load(tmp_path / "none", "Ball", SPEC)
    with pytest.raises(RecordingError, match="a folder without"):
        load(tmp_path, "Ball", SPEC)
    write(tmp_path, "a", columns([]))
    with pytest.raises(RecordingError, match="no episode"):
        load(tmp_path, "Ball", SPEC)


def test_actions_slightly_beyond_their_range_are_clipped(tmp_path: Path) -> None:
    """Rounding may exceed [-1, 1], the range that training expects."""
    content = columns([2])
    content["continuous"][:, 0] = [1.0002, -1.0002]
    assert load(write(tmp_path, "a", content), "Ball", SPEC).continuous[:, 0].tolist() == [1, -1]


def test_a_choice_that_its_mask_forbids_is_refused(tmp_path: Path) -> None:
    """Its loss would be infinite, because the choice has probability 0."""
    content = columns([2, 3], 1, masked=True)
    content["masks"][3] = True
    with pytest.raises(RecordingError, match="a choice that its mask forbids"):
        load(write(tmp_path, "a", content), "Ball", SPEC)
