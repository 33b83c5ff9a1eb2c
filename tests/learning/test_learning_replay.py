"""The replay against a plain list of steps: what is sampled, what follows it, and what survives the process."""

from __future__ import annotations

import shutil
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import CheckpointError
from sparring.pipeline.learning.buffer import SegmentBuffer
from sparring.pipeline.learning.replay import Replay
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.learning.learning_helpers import HYBRID, segments

PLAIN = BehaviorSpec(observations=(ObservationSpec(name="state", shape=(3,)),), actions=ActionSpec(continuous=1))


def batch(lengths, first=0, *, spec=HYBRID, sequence=0, **fields):
    """Returns segments whose first observation counts the rows from `first`, as the buffer gives them to a trainer."""
    buffer = SegmentBuffer(sequence)
    rewards = first + np.arange(sum(lengths), dtype=np.float32)
    buffer.add(segments(lengths, first=first, spec=spec, numbered=True, **{"rewards": rewards, **fields}))
    return buffer.take()


def stored(replay, *batches):
    for one in batches:
        replay.add(one, one.rewards)
    return replay


def sampled(replay, count=200, steps=1, seed=0):
    return replay.sample(count, steps, torch.Generator().manual_seed(seed))


def numbers(found):
    """Returns the numbers of the sampled rows, and of the observations that follow the segments."""
    return found.observations[0][:, 0], found.next_observations[0][:, 0]


LENGTHS = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(adds=LENGTHS, slots=st.integers(8, 40), steps=st.integers(1, 4), seed=st.integers(0, 9))
def test_sampled_steps_are_the_newest_ones_with_what_followed_each(adds, slots, steps, seed):
    """The reference is a list of slots, of which the last ones remain: a step needs those up to its segment's end."""
    replay, ring, first = Replay(HYBRID, slots), [], 0
    for at, lengths in enumerate(adds):
        ended = np.random.default_rng([seed, at]).random(len(lengths)) < 0.5
        stored(replay, batch(lengths, first, terminated=ended))
        for length, is_over in zip(lengths, ended, strict=True):
            for row in range(length):
                after = [first + later for later in range(row + 1, length)] + [first + length - 0.5]
                ring.append((first + row, after, is_over))
            ring.append(None)
            first += length
    expected = {row: (after, is_over) for row, after, is_over in filter(None, ring[-slots:])}
    found = sampled(replay, 60 * slots, steps)
    rows, following = numbers(found)
    begins = np.cumsum(found.lengths) - found.lengths
    assert set(rows[begins].tolist()) == set(expected)
    for begin, length, after, over in zip(begins, found.lengths, following, found.terminated, strict=True):
        later, is_over = expected[rows[begin]]
        assert length == min(steps, len(later))
        assert rows[begin + 1 : begin + length].tolist() == later[: length - 1]
        assert after == later[length - 1]
        assert over == (is_over and length == len(later))
    np.testing.assert_array_equal(found.rewards, rows)


def test_every_column_of_a_step_is_what_arrived():
    one = batch([4, 3], terminated=[True, False], interrupted=[False, True])
    found = sampled(stored(Replay(HYBRID, 16), one))
    rows, _ = numbers(found)
    at = rows.astype(int)
    for name in ("continuous", "discrete", "rewards"):
        np.testing.assert_array_equal(getattr(found, name), getattr(one, name)[at])
        assert getattr(found, name).dtype == getattr(one, name).dtype
    np.testing.assert_array_equal(found.observations[1], one.observations[1][at])
    np.testing.assert_array_equal(found.ended, np.isin(at, [3, 6]))
    np.testing.assert_array_equal(found.terminated, at == 3)
    assert not found.masks.any()


def test_masks_that_follow_a_step_are_those_of_the_next_and_those_of_a_truncated_end_are_not_needed():
    """The last step of an episode that was truncated has no masks after it: it is left out, unless it is alone."""
    after = np.eye(5, HYBRID.actions.mask_size, dtype=np.bool_)
    ends = {"terminated": [False, True, False, False, False], "interrupted": [False, False, True, True, False]}
    one = batch([5, 4, 3, 1, 1], **ends, masked=True, next_masks=after)
    found = sampled(stored(Replay(HYBRID, 20), one), 600)
    at, last = numbers(found)[0].astype(int), np.array([4, 8, 11, 12, 13])
    assert set(at.tolist()) == set(range(14)) - {11}
    np.testing.assert_array_equal(found.masks, one.masks[at])
    inside = ~np.isin(at, last)
    np.testing.assert_array_equal(found.next_masks[inside], one.masks[at[inside] + 1])
    np.testing.assert_array_equal(found.next_masks[~inside], after[np.searchsorted(last, at[~inside])])


def test_images_are_stored_as_bytes_and_no_observation_twice():
    shape = (3, 20, 20)
    spec = BehaviorSpec(
        observations=(ObservationSpec(name="eye", shape=shape, kind="image"),), actions=ActionSpec(discrete=(2,))
    )
    pixels = np.random.default_rng(0).random((50, *shape), np.float32)
    buffer = SegmentBuffer()
    buffer.add(segments([50], spec=spec, observations=(pixels,), rewards=np.arange(50, dtype=np.float32)))
    replay = Replay(spec, 51)
    found = sampled(stored(replay, buffer.take()))
    assert found.observations[0].dtype == np.uint8
    np.testing.assert_allclose(found.observations[0] / 255, pixels[found.rewards.astype(int)], atol=0.5 / 255 + 1e-6)
    assert replay.bytes == 51 * (3 * 20 * 20 + 1 + 2 + 4 + 4 + 1)
    assert pixels.nbytes > 3.8 * replay.bytes


@pytest.mark.parametrize("slots", [64, 30])
def test_sequences_start_where_the_memory_of_the_agent_was_stored(slots):
    lengths, length = [10, 4, 9], 4
    carried = np.arange(7, dtype=np.float32)[:, None] * np.ones(3, np.float32)
    one = batch(lengths, sequence=length, carried=carried)
    found = sampled(stored(Replay(HYBRID, slots, sequence_length=length, carried=3), one, one))
    rows, _ = numbers(found)
    begins = np.cumsum(found.lengths) - found.lengths
    starts, sizes = np.array([0, 4, 8, 10, 14, 18, 22]), np.array([4, 4, 2, 4, 4, 4, 1])
    which = np.searchsorted(starts, rows[begins])
    np.testing.assert_array_equal(starts[which], rows[begins])
    np.testing.assert_array_equal(sizes[which], found.lengths)
    np.testing.assert_array_equal(found.carried[:, 0], which)
    assert set(which.tolist()) == set(range(7))
    np.testing.assert_array_equal(found.starts(), begins)


def test_batch_larger_than_the_replay_leaves_its_last_steps():
    replay = stored(Replay(PLAIN, 6), batch([20], spec=PLAIN))
    assert set(numbers(sampled(replay))[0].tolist()) == {15, 16, 17, 18, 19}
    assert replay.stored == 20
    assert replay.share == 1.0


# ---------------------------------------------------------------- files


def opened(folder, slots=20, **changes):
    return Replay(PLAIN, slots, **{"folder": folder, "keep": True, **changes})


def restored(folder, counters, slots=20):
    found = opened(folder, slots)
    found.counters.copy_(counters)
    return found


def test_kept_replay_continues_with_the_steps_that_a_checkpoint_had(tmp_path):
    folder = tmp_path / "replay"
    replay = stored(opened(folder), batch([8], spec=PLAIN))
    saved = replay.counters.clone()
    again = restored(folder, saved)
    assert set(numbers(sampled(again))[0].tolist()) == set(range(8))
    assert again.stored == 8
    np.testing.assert_array_equal(sampled(again).rewards, sampled(replay).rewards)


def test_steps_after_the_last_checkpoint_are_neither_sampled_nor_are_those_that_they_have_overwritten(tmp_path):
    folder = tmp_path / "replay"
    replay = stored(opened(folder), batch([8], spec=PLAIN), batch([8], 8, spec=PLAIN))
    saved = replay.counters.clone()
    stored(replay, batch([8], 100, spec=PLAIN))  # seven of its nine slots overwrite steps 0 to 6
    again = restored(folder, saved)
    assert set(numbers(sampled(again))[0].tolist()) == {7, *range(8, 16)}
    stored(again, batch([4], 50, spec=PLAIN))
    assert set(numbers(sampled(again))[0].tolist()) == {7, *range(8, 16), *range(50, 54)}


def test_replay_of_another_lineage_begins_empty(tmp_path):
    folder = tmp_path / "replay"
    stored(opened(folder), *(batch([8], spec=PLAIN) for _ in range(9)))
    fresh = stored(opened(folder), batch([3], 70, spec=PLAIN))  # no checkpoint was written
    assert set(numbers(sampled(fresh))[0].tolist()) == {70, 71, 72}
    assert fresh.stored == 3


def test_replay_that_is_not_kept_leaves_no_file_and_counts_from_its_start(tmp_path):
    folder = tmp_path / "run" / "replay"
    replay = stored(opened(folder, keep=False), batch([8], spec=PLAIN))
    assert set(numbers(sampled(replay))[0].tolist()) == set(range(8))
    assert [*(tmp_path / "run").iterdir()] == []
    again = opened(folder, keep=False)
    again.counters.copy_(replay.counters)  # of a resumed run
    assert again.stored == 0
    assert stored(again, batch([2], 40, spec=PLAIN)).stored == 2
    assert set(numbers(sampled(again))[0].tolist()) == {40, 41}


def test_replay_of_another_spec_or_size_is_refused(tmp_path):
    folder = tmp_path / "replay"
    opened(folder)
    other = BehaviorSpec(observations=(ObservationSpec(name="state", shape=(4,)),), actions=PLAIN.actions)
    with pytest.raises(CheckpointError, match=r"observation.0.npy with float32 \[20, 3\].*float32 \[20, 4\]"):
        Replay(other, 20, folder=folder, keep=True)
    with pytest.raises(CheckpointError, match=r"buffer_size.*remove .*replay"):
        opened(folder, 30)


@pytest.mark.parametrize(
    "content", [0, 40, 360, b"PK\x03\x04 no archive", b"\x93NUMPY\x01\x00\x10\x00{'descr': ((((\n"]
)
def test_damaged_replay_is_refused(tmp_path, content):
    folder = tmp_path / "replay"
    stored(opened(folder), batch([8], spec=PLAIN))
    file = folder / "observation.0.npy"
    file.write_bytes(content if isinstance(content, bytes) else file.read_bytes()[:content])
    with pytest.raises(CheckpointError, match=r"observation.0.npy with what cannot be read"):
        opened(folder)


def test_disk_without_room_is_refused_with_the_bytes_it_has_and_needs(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000, 900, 100))
    with pytest.raises(CheckpointError, match=r"100 bytes of free disk.*expected 500 bytes"):
        opened(tmp_path / "replay")
    assert not (tmp_path / "replay").exists()
