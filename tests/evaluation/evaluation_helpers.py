"""Episodes as plain arrays, and the segments that contain them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.segments import Episodes, Segments
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

SPEC = BehaviorSpec(
    observations=(
        ObservationSpec(name="eye", shape=(3, 2, 2), dtype="uint8", kind="image"),
        ObservationSpec(name="body", shape=(2,)),
    ),
    actions=ActionSpec(continuous=2, discrete=(3, 2)),
)


def ended(
    reported: Sequence[int] = (),
    unreported: Sequence[int] = (),
    *,
    lengths: Sequence[int] | None = None,
    teams: Sequence[int] | None = None,
) -> Episodes:
    """Returns statistics of ended agent episodes; each value follows from the number of the episode."""
    numbers = np.array(reported, np.int64)
    return Episodes(
        returns=numbers.astype(np.float32) / 7,
        lengths=(numbers % 5 + 1 if lengths is None else np.array(lengths)).astype(np.int32),
        group_returns=np.empty(0, np.float32),
        teams=(numbers % 2 if teams is None else np.array(teams)).astype(np.int32),
        outcomes=(numbers % 3).astype(np.float32) / 2,
        agents=numbers,
        shared_returns=-numbers.astype(np.float32),
        groups=numbers % 3,
        unreported=np.array(unreported, np.int64),
    )


@dataclass
class Episode:
    """One agent episode in plain arrays; an entry of `masks` is None if the step has no mask."""

    number: int
    team: int
    group: int
    simulator: int
    terminated: bool
    observations: tuple[NDArray[Any], ...]
    last: tuple[NDArray[Any], ...]
    raw: NDArray[np.float32]
    discrete: NDArray[np.int32]
    masks: list[NDArray[np.bool_] | None]
    rewards: NDArray[np.float32]
    group_rewards: NDArray[np.float32]

    @property
    def length(self) -> int:
        return len(self.rewards)


def played(rng: random.Random, number: int, length: int) -> Episode:
    """Returns an episode of random content."""
    numbers = np.random.default_rng(rng.randrange(2**32))
    return Episode(
        number=number,
        team=rng.randrange(3),
        group=rng.choice([0, 5, 2**40]),
        simulator=rng.randrange(9),
        terminated=rng.random() < 0.5,
        observations=(
            numbers.integers(0, 256, (length, 3, 2, 2)).astype(np.uint8),
            numbers.normal(size=(length, 2)).astype(np.float32),
        ),
        last=(numbers.integers(0, 256, (3, 2, 2)).astype(np.uint8), numbers.normal(size=2).astype(np.float32)),
        raw=(4 * numbers.normal(size=(length, 2))).astype(np.float32),
        discrete=np.stack([numbers.integers(0, 3, length), numbers.integers(0, 2, length)], 1).astype(np.int32),
        masks=[None] * length,
        rewards=numbers.normal(size=length).astype(np.float32),
        group_rewards=numbers.normal(size=length).astype(np.float32),
    )


@dataclass
class Split:
    """Steps `first` to `after` of an episode as a segment; if `lost`, its simulator disconnected before the end."""

    episode: Episode
    first: int
    after: int
    lost: bool = False

    @property
    def over(self) -> bool:
        return self.after == self.episode.length

    @property
    def following(self) -> tuple[NDArray[Any], ...]:
        episode = self.episode
        return episode.last if self.over else tuple(column[self.after] for column in episode.observations)


def ended_in(splits: Iterable[Split]) -> Episodes:
    """Returns the statistics that the last segments of episodes report; lost episodes have none."""
    return ended(
        [one.episode.number for one in splits if one.over and not one.lost],
        [one.episode.number for one in splits if one.lost],
    )


def message(
    splits: Sequence[Split], *, masked: NDArray[np.bool_] | None = None, episodes: Episodes | None = None
) -> Segments:
    """Returns the segments as a decoded record; `masked` are the masks of all rows."""
    rows = [[column[split.first : split.after] for column in split.episode.observations] for split in splits]
    steps = sum(split.after - split.first for split in splits)
    over = np.array([split.over for split in splits], bool)
    terminated = np.array([split.over and split.episode.terminated and not split.lost for split in splits], bool)
    record = Segments(
        behavior="B",
        source="s.1",
        origin="a.1",
        reached=0,
        flush=0,
        lengths=np.array([split.after - split.first for split in splits], np.int32),
        observations=tuple(np.concatenate(list(column)) for column in zip(*rows, strict=True)),
        next_observations=tuple(
            np.stack(list(column)) for column in zip(*(split.following for split in splits), strict=True)
        ),
        continuous=_steps(splits, "raw"),
        discrete=_steps(splits, "discrete"),
        log_probs=np.zeros(steps, np.float32),
        masks=masked,
        rewards=_steps(splits, "rewards"),
        group_rewards=_steps(splits, "group_rewards"),
        versions=np.ones(steps, np.int64),
        terminated=terminated,
        interrupted=np.array([split.lost for split in splits], bool) | (over & ~terminated),
        group_ended=over,
        teams=_each(splits, "team", np.int32),
        groups=_each(splits, "group", np.int64),
        agents=_each(splits, "number", np.int64),
        simulators=_each(splits, "simulator", np.int32),
        episodes=ended_in(splits) if episodes is None else episodes,
    )
    wired: Segments = decode([bytes(frame) for frame in encode(record)])
    return wired


def without_segments(episodes: Episodes) -> Segments:
    """Returns a record without segments, which only reports ended episodes."""
    one = message([Split(played(random.Random(0), 1, 1), 0, 1)], episodes=episodes)
    columns = {name: getattr(one, name) for name in one.__slots__}
    empty: dict[str, Any] = {name: value[:0] for name, value in columns.items() if isinstance(value, np.ndarray)}
    empty |= {name: tuple(each[:0] for each in columns[name]) for name in ("observations", "next_observations")}
    return dataclasses.replace(one, **empty)


def _steps(splits: Iterable[Split], name: str) -> NDArray[Any]:
    return np.concatenate([getattr(split.episode, name)[split.first : split.after] for split in splits])


def _each(splits: Iterable[Split], name: str, dtype: Any) -> NDArray[Any]:
    return np.array([getattr(split.episode, name) for split in splits], dtype)
