"""Demonstrations as training uses them: all episodes of one or several files, as columns over all steps.

r steps of e episodes one after the other, C continuous actions, D branches, K choices of all branches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.demonstrations import episodes
from sparring.pipeline.demonstrations.episodes import PER_EPISODE, PER_STEP, SUFFIX, Arrays, Recording, RecordingError
from sparring.pipeline.demonstrations.pairing import DemoActions, Pairing
from sparring.pipeline.specs import BehaviorSpec, ObservationSpec

UNITY_SUFFIX: Final = ".demo"

FEWEST_TO_SPLIT: Final = 5
"""Of fewer episodes none is held out: each of them is worth more to learn from than to judge by."""

_SLACK: Final = 1e-3
"""What rounding may add to an action at the end of its range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstrationFile:
    """One file that demonstrations were read from.

    Attributes:
        pairing: of a `.demo` file, how its actions were placed; None for any other.
    """

    path: str
    episodes: int
    steps: int
    pairing: Pairing | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstrations:
    """Recorded episodes of one behavior.

    Attributes:
        observations: one [r, *shape] per observation of the spec.
        next_observations: one [r, *shape] each: of the following step; at an episode's last step what was seen after
            it.
        continuous: [r, C] executed, in [-1, 1].
        discrete: [r, D] chosen index of each branch.
        masks: [r, K] True = forbidden; None where nothing was.
        ended: [r] the last step of its episode.
        terminated: [e] the task ended; else the episode was cut.
        rewards: [r] the agent's own reward of the step.
        episode: [r] number of the episode, from 0.
        episodes: e.
        files: that all of them, or those that these were chosen from, were read from.
    """

    observations: tuple[NDArray[Any], ...]
    next_observations: tuple[NDArray[Any], ...]
    continuous: NDArray[np.float32]
    discrete: NDArray[np.int32]
    masks: NDArray[np.bool_] | None
    ended: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    rewards: NDArray[np.float32]
    episode: NDArray[np.int64]
    episodes: int
    files: tuple[DemonstrationFile, ...] = ()

    @property
    def steps(self) -> int:
        """Steps of all episodes, r."""
        return len(self.rewards)

    @property
    def returns(self) -> NDArray[np.float64]:
        """[e] Sum of the rewards of each episode."""
        return np.bincount(self.episode, self.rewards, self.episodes).astype(np.float64)

    def chosen(self, numbers: Sequence[int] | NDArray[np.int64]) -> Demonstrations:
        """The episodes of these numbers, in the order that they have here, numbered anew."""
        kept = np.zeros(self.episodes, np.bool_)
        kept[numbers] = True
        rows = kept[self.episode]
        return Demonstrations(
            observations=tuple(column[rows] for column in self.observations),
            next_observations=tuple(column[rows] for column in self.next_observations),
            continuous=self.continuous[rows],
            discrete=self.discrete[rows],
            masks=None if self.masks is None else self.masks[rows],
            ended=self.ended[rows],
            terminated=self.terminated[kept],
            rewards=self.rewards[rows],
            episode=(np.cumsum(kept) - 1)[self.episode[rows]],
            episodes=int(kept.sum()),
            files=self.files,
        )

    def split(self, share: float, seed: int) -> tuple[Demonstrations, Demonstrations]:
        """Whole episodes to train on, at least one, and others that are held out.

        Args:
            share: of the episodes that is held out, 0 to 1, rounded; nothing of fewer than `FEWEST_TO_SPLIT` episodes.
            seed: of the choice.
        """
        held = min(round(share * self.episodes), self.episodes - 1) if self.episodes >= FEWEST_TO_SPLIT else 0
        order = np.random.default_rng(seed).permutation(self.episodes)
        return self.chosen(order[held:]), self.chosen(order[:held])


def load(path: str | Path, behavior: str, spec: BehaviorSpec, actions: DemoActions = "auto") -> Demonstrations:
    """Reads the demonstrations that a behavior learns from.

    The behavior's name in a file may be another one; names of observations may be too.

    Args:
        path: a file, or a folder of them: all `*.episodes.safetensors` and `*.demo` in it, by name.
        behavior: name, for messages.
        spec: of the behavior.
        actions: which decision's action stands beside an observation in the `.demo` files, each of which is judged by
            itself under `auto`.

    Raises:
        RecordingError: nothing is there, a file cannot be read, or was recorded with another spec.
    """
    parts, files = [], []
    for file in files_of(Path(path)):
        recording = read_any(file, actions)
        _check_spec(file, recording.spec, behavior, spec)
        _check_values(file, recording)
        files.append(_file(file, recording))
        if len(recording.columns["lengths"]):
            parts.append({name: column for name, column in recording.columns.items() if name in _known(spec)})
    if not parts:
        raise RecordingError(
            got=f"no episode in {path}",
            expected=f"one of {behavior} at least",
            remedy="record some, or correct demo_path",
        )
    return _demonstrations(episodes.stacked(parts), spec, tuple(files))


def _file(path: Path, recording: Recording) -> DemonstrationFile:
    lengths = recording.columns["lengths"]
    steps = int(lengths.sum(dtype=np.int64))
    return DemonstrationFile(path=str(path), episodes=len(lengths), steps=steps, pairing=recording.pairing)


def files_of(path: Path) -> list[Path]:
    """The files that a path means: itself, or those of recorded episodes in the folder, by name.

    Raises:
        RecordingError: there is none.
    """
    if path.is_file():
        return [path]
    there = sorted(path.iterdir()) if path.is_dir() else []
    found = [one for one in there if one.name.endswith((SUFFIX, UNITY_SUFFIX)) and one.is_file()]
    if not found:
        raise RecordingError(
            got=f"{path}, " + ("a folder without recorded episodes" if path.is_dir() else "which is not there"),
            expected=f"a file of recorded episodes, or a folder with *{SUFFIX} or *{UNITY_SUFFIX} files",
            remedy="correct the path, or record some with sparring record",
        )
    return found


def read_any(path: Path, actions: DemoActions = "auto") -> Recording:
    """Reads a file of ours or, by its suffix, a `.demo` file of Unity.

    Args:
        path: of the file.
        actions: which decision's action stands beside an observation in a `.demo` file.

    Raises:
        RecordingError: it is neither.
    """
    if path.suffix.lower() == UNITY_SUFFIX:
        from sparring.pipeline.demonstrations import unity  # needs what the extra `unity` brings

        return unity.read(path, actions=actions)
    return episodes.read(path)


def describe(recording: Recording) -> dict[str, Any]:
    """What a file holds, as plain values for JSON: specs, episodes, steps, returns, lengths, share terminated; and
    of a `.demo` file, how its actions were placed.

    Returns are sums of the agent's own rewards; those of groups come beside them where there are any.
    """
    columns, spec = recording.columns, recording.spec
    lengths = columns["lengths"].astype(np.int64)
    episode = np.repeat(np.arange(len(lengths)), lengths)
    found: dict[str, Any] = {
        "behavior": recording.behavior,
        "observations": [
            {"name": one.name, "kind": one.kind, "shape": list(one.shape), "dtype": one.dtype}
            for one in spec.observations
        ],
        "actions": {"continuous": spec.actions.continuous, "discrete": list(spec.actions.discrete)},
        "episodes": len(lengths),
        "steps": len(episode),
    }
    if recording.pairing is not None:
        found["demo_actions"] = dataclasses.asdict(recording.pairing)
    if len(lengths):
        found["returns"] = _spread(np.bincount(episode, columns["rewards"]))
        if columns["group_rewards"].any():
            found["group_returns"] = _spread(np.bincount(episode, columns["group_rewards"]))
        found["lengths"] = _spread(lengths)
        found["terminated"] = float(columns["terminated"].mean())
    return found


def _spread(values: NDArray[Any]) -> dict[str, float | None]:
    deviation = float(values.std(ddof=1)) if len(values) > 1 else None
    ends = {"min": float(values.min()), "max": float(values.max())}
    return {"mean": float(values.mean()), "deviation": deviation} | ends


def _known(spec: BehaviorSpec) -> set[str]:
    """Columns that are used; a file of another program may hold more."""
    seen = {f"{of}.{at}" for of in ("observation", "final_observation") for at in range(len(spec.observations))}
    return {*PER_EPISODE, *PER_STEP, "masks", *seen}


def _check_spec(file: Path, found: BehaviorSpec, behavior: str, spec: BehaviorSpec) -> None:
    theirs, ours = [_of(one) for one in found.observations], [_of(one) for one in spec.observations]
    remedy = "name other files in demo_path, or record them again with the simulator that is trained in"
    if len(theirs) == len(ours):
        for own, wanted in zip(found.observations, spec.observations, strict=True):
            if own.kind == wanted.kind == "image" and own.shape == wanted.shape and own.dtype != wanted.dtype:
                remedy = (
                    f"the images of {own.name!r} differ in their numbers alone: let the simulator send {own.dtype}, or "
                    "record them again"
                )
    if theirs != ours:
        raise RecordingError(
            got=f"{file} with observations {_listed(found)}",
            expected=f"{_listed(spec)}, as {behavior} has",
            remedy=remedy,
        )
    if found.actions != spec.actions:
        raise RecordingError(
            got=f"{file} with {found.actions.continuous} continuous actions and branches {found.actions.discrete}",
            expected=f"{spec.actions.continuous} and {spec.actions.discrete}, as {behavior} has",
            remedy=remedy,
        )


def _of(one: ObservationSpec) -> tuple[Any, ...]:
    return one.kind, one.shape, one.dtype


def _listed(spec: BehaviorSpec) -> str:
    return ", ".join(f"{one.kind} {list(one.shape)} {one.dtype}" for one in spec.observations)


def _check_values(file: Path, recording: Recording) -> None:
    """Refuses what no simulator may send, and one bad number of which would spoil a whole training."""
    for name, column in recording.columns.items():
        if column.dtype == np.float32 and not np.isfinite(column).all():
            raise _bad(file, f"NaN or infinity in column {name!r}", "finite numbers")
    continuous, discrete = recording.columns["continuous"], recording.columns["discrete"]
    if continuous.size and (most := float(np.abs(continuous).max())) > 1 + _SLACK:
        raise _bad(file, f"a continuous action of size {most:g}", "actions in [-1, 1]")
    branches = recording.spec.actions.discrete
    if ((discrete < 0) | (discrete >= np.array(branches, np.int32))).any():
        raise _bad(file, "a choice that its branch does not have", f"choices of the branches {branches}, from 0")
    masks = recording.columns.get("masks")
    if masks is not None and len(discrete):
        chosen = np.cumsum((0, *branches))[: len(branches)] + discrete
        if np.take_along_axis(masks, chosen, 1).any():
            raise _bad(file, "a choice that its mask forbids", "choices that were allowed")


def _bad(file: Path, got: str, expected: str) -> RecordingError:
    return RecordingError(got=f"{file}: {got}", expected=expected, remedy="record it again, or leave the file out")


def _demonstrations(columns: Arrays, spec: BehaviorSpec, files: tuple[DemonstrationFile, ...]) -> Demonstrations:
    lengths = columns["lengths"].astype(np.int64)
    last = np.cumsum(lengths) - 1
    ended = np.zeros(int(lengths.sum()), np.bool_)
    ended[last] = True
    places = range(len(spec.observations))
    seen = tuple(columns[f"observation.{at}"] for at in places)
    return Demonstrations(
        observations=seen,
        next_observations=tuple(_following(seen[at], columns[f"final_observation.{at}"], last) for at in places),
        continuous=np.clip(columns["continuous"], -1, 1),
        discrete=columns["discrete"],
        masks=columns.get("masks"),
        ended=ended,
        terminated=columns["terminated"],
        rewards=columns["rewards"],
        episode=np.repeat(np.arange(len(lengths)), lengths),
        episodes=len(lengths),
        files=files,
    )


def _following(seen: NDArray[Any], final: NDArray[Any], last: NDArray[np.int64]) -> NDArray[Any]:
    following = np.empty_like(seen)
    following[:-1] = seen[1:]
    following[last] = final
    return following
