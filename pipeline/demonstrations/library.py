"""This module loads demonstrations for training: all episodes of one or several files, as columns over all steps.

r steps of e episodes one after the other, C continuous actions, D branches, K choices of all branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.demonstrations import episodes
from sparring.pipeline.demonstrations.episodes import DemoActions, Pairing, Recording, RecordingError
from sparring.pipeline.files import Json
from sparring.pipeline.specs import Array, BehaviorSpec

UNITY_SUFFIX: Final = ".demo"
_MINARI: Final = "minari:"

FEWEST_TO_SPLIT: Final = 5
"""Fewest episodes of which some are held out; each of fewer is worth more for training than for evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstrationFile:
    """Describes one file that demonstrations were read from.

    Attributes:
        pairing: for a `.demo` file, how its actions were placed; None for any other.
    """

    path: str
    episodes: int
    steps: int
    pairing: Pairing | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstrations:
    """Holds recorded episodes of one behavior.

    Attributes:
        observations: one [r, *shape] per observation of the spec.
        continuous: [r, C] executed, in [-1, 1].
        discrete: [r, D] chosen index of each branch.
        masks: [r, K] True = forbidden; None if every choice was allowed.
        ended: [r] the last step of its episode.
        terminated: [e] the task ended; else the episode was interrupted.
        episode: [r] number of the episode, from 0.
        episodes: e.
        files: files that these episodes, or those they were chosen from, were read from.
    """

    observations: tuple[Array, ...]
    continuous: NDArray[np.float32]
    discrete: NDArray[np.int32]
    masks: NDArray[np.bool_] | None
    ended: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    episode: NDArray[np.int64]
    episodes: int
    files: tuple[DemonstrationFile, ...] = ()

    @property
    def steps(self) -> int:
        """Returns r, the number of steps of all episodes."""
        return len(self.episode)

    def chosen(self, numbers: Sequence[int] | NDArray[np.int64]) -> Demonstrations:
        """Returns the episodes of these numbers, in their present order, with new numbers."""
        kept = np.zeros(self.episodes, np.bool_)
        kept[numbers] = True
        rows = kept[self.episode]
        return replace(
            self,
            observations=tuple(column[rows] for column in self.observations),
            continuous=self.continuous[rows],
            discrete=self.discrete[rows],
            masks=None if self.masks is None else self.masks[rows],
            ended=self.ended[rows],
            terminated=self.terminated[kept],
            episode=(np.cumsum(kept) - 1)[self.episode[rows]],
            episodes=int(kept.sum()),
        )

    def split(self, share: float, seed: int) -> tuple[Demonstrations, Demonstrations]:
        """Divides whole episodes into those to train on, at least one, and those that are held out.

        Args:
            share: share of the episodes to hold out, 0 to 1, rounded; none of fewer than `FEWEST_TO_SPLIT` episodes.
            seed: of the choice.
        """
        held = min(round(share * self.episodes), self.episodes - 1) if self.episodes >= FEWEST_TO_SPLIT else 0
        order = np.random.default_rng(seed).permutation(self.episodes)
        return self.chosen(order[held:]), self.chosen(order[:held])


def load(path: str | Path, behavior: str, spec: BehaviorSpec, actions: DemoActions = "auto") -> Demonstrations:
    """Reads the demonstrations that a behavior learns from.

    The names of the behavior and of its observations may differ in a file.

    Args:
        path: a file, or a folder of them: all `*.episodes.safetensors` and `*.demo` in it, by name.
        behavior: name, for messages.
        spec: observations and actions of the behavior.
        actions: which decision's action accompanies an observation in `.demo` files; `auto` detects it in each file.

    Raises:
        RecordingError: no file was found, a file cannot be read, or was recorded with another spec.
    """
    columns, files = read_columns(path, behavior, spec, actions)
    return _demonstrations(columns, spec, files)


def spec_of(path: str | Path, actions: DemoActions = "auto") -> BehaviorSpec:
    """Returns the spec of recorded episodes, that of the first file; arguments and errors are those of `load`."""
    return read_any(files_of(Path(path))[0], actions).spec


def read_columns(
    path: str | Path, behavior: str, spec: BehaviorSpec, actions: DemoActions = "auto"
) -> tuple[episodes.Arrays, tuple[DemonstrationFile, ...]]:
    """Returns the columns of all episodes, and their files; arguments and errors are those of `load`."""
    parts, files = [], []
    known = {*episodes.PER_EPISODE, *episodes.step_columns(spec)}  # another program's file may hold more columns
    known |= {f"final_{name}" for name in known if name.startswith("observation.")}
    for file in files_of(Path(path)):
        recording = read_any(file, actions)
        _check_spec(file, recording.spec, behavior, spec)
        _check_values(file, recording)
        lengths = recording.columns["lengths"]
        steps = int(lengths.sum(dtype=np.int64))
        files.append(DemonstrationFile(path=str(file), episodes=len(lengths), steps=steps, pairing=recording.pairing))
        if len(lengths):
            parts.append({name: column for name, column in recording.columns.items() if name in known})
    if not parts:
        raise RecordingError(
            got=f"no episode in {path}",
            expected=f"at least one of {behavior}",
            remedy="record some, or correct demo_path",
        )
    return episodes.stacked(parts), tuple(files)


def files_of(path: Path) -> list[Path]:
    """Returns a file or a data set of Minari itself, or the files of recorded episodes in a folder, by name.

    Raises:
        RecordingError: no such file exists.
    """
    if path.is_file() or str(path).startswith(_MINARI):
        return [path]
    files = sorted(path.iterdir()) if path.is_dir() else []
    found = [one for one in files if one.name.endswith((episodes.SUFFIX, UNITY_SUFFIX)) and one.is_file()]
    if not found:
        raise RecordingError(
            got=f"{path}, " + ("a folder without recorded episodes" if path.is_dir() else "which does not exist"),
            expected=f"a file of recorded episodes, or a folder with *{episodes.SUFFIX} or *{UNITY_SUFFIX} files",
            remedy="correct the path, or record some with sparring record",
        )
    return found


def read_any(path: Path, actions: DemoActions = "auto") -> Recording:
    """Reads a file of ours or, by its suffix, a `.demo` file of Unity; after `minari:`, a data set of Minari.

    Args:
        path: of the file.
        actions: which decision's action accompanies an observation in a `.demo` file.

    Raises:
        RecordingError: the file is neither.
    """
    if path.suffix.lower() == UNITY_SUFFIX:
        from sparring.pipeline.demonstrations import unity  # needs the packages of the extra `unity`

        return unity.read(path, actions=actions)
    if str(path).startswith(_MINARI):
        from sparring.pipeline.demonstrations import minari  # needs the packages of the extra `minari`

        return minari.read(str(path).removeprefix(_MINARI))
    return episodes.read(path)


def describe(recording: Recording) -> dict[str, Json]:
    """Describes a file as plain values for JSON: specs, episodes, steps, returns, lengths, share terminated; and for a
    `.demo` file, how its actions were placed.

    Returns are sums of the agent's own rewards; those of groups are added if there are any.
    """
    columns = recording.columns
    lengths = columns["lengths"].astype(np.int64)
    episode = np.repeat(np.arange(len(lengths)), lengths)
    found: dict[str, Json] = {
        "behavior": recording.behavior,
        **asdict(recording.spec),
        "episodes": len(lengths),
        "steps": len(episode),
    }
    if recording.pairing is not None:
        found["demo_actions"] = asdict(recording.pairing)
    if len(lengths):
        found["returns"] = _spread(np.bincount(episode, columns["rewards"]))
        if columns["group_rewards"].any():
            found["group_returns"] = _spread(np.bincount(episode, columns["group_rewards"]))
        found["lengths"] = _spread(lengths)
        found["terminated"] = float(columns["terminated"].mean())
    return found


def _spread(values: Array) -> dict[str, float | None]:
    deviation = float(values.std(ddof=1)) if len(values) > 1 else None
    ends = {"min": float(values.min()), "max": float(values.max())}
    return {"mean": float(values.mean()), "deviation": deviation} | ends


def _check_spec(file: Path, found: BehaviorSpec, behavior: str, spec: BehaviorSpec) -> None:
    """Refuses a file whose observations (kind, shape, dtype, order) or actions are others; names may differ."""
    remedy = "name other files in demo_path, or record them again with the simulator used for training"
    if len(found.observations) == len(spec.observations):
        for own, wanted in zip(found.observations, spec.observations, strict=True):
            if own.kind == wanted.kind == "image" and own.shape == wanted.shape and own.dtype != wanted.dtype:
                remedy = (
                    f"the images of {own.name!r} differ only in their dtype: let the simulator send {own.dtype}, or "
                    "record them again"
                )
    for recorded, expected in zip(_listed(found), _listed(spec), strict=True):
        if recorded != expected:
            raise RecordingError(
                got=f"{file} with {recorded}", expected=f"{expected}, as {behavior} has", remedy=remedy
            )


def _listed(spec: BehaviorSpec) -> tuple[str, str]:
    observations = ", ".join(f"{one.kind} {list(one.shape)} {one.dtype}" for one in spec.observations)
    actions = f"{spec.actions.continuous} continuous actions and branches {spec.actions.discrete}"
    return f"observations {observations}", actions


def _check_values(file: Path, recording: Recording) -> None:
    """Refuses values that no simulator may send: a single one would spoil a whole training."""
    columns, branches = recording.columns, recording.spec.actions.discrete
    continuous, discrete = columns["continuous"], columns["discrete"]
    infinite = [name for name, one in columns.items() if one.dtype == np.float32 and not np.isfinite(one).all()]
    problem = None
    if infinite:
        problem = f"NaN or infinity in column {infinite[0]!r}", "finite numbers"
    elif (most := float(np.abs(continuous).max(initial=0))) > 1 + episodes.SLACK:
        problem = f"a continuous action of size {most:g}", "actions in [-1, 1]"
    elif ((discrete < 0) | (discrete >= np.array(branches, np.int32))).any():
        problem = "a choice beyond its branch", f"choices of the branches {branches}, from 0"
    elif "masks" in columns:
        chosen = np.cumsum((0, *branches))[: len(branches)] + discrete
        if np.take_along_axis(columns["masks"], chosen, 1).any():
            problem = "a choice that its mask forbids", "allowed choices"
    if problem:
        got, expected = problem
        remedy = "record it again, or leave the file out"
        raise RecordingError(got=f"{file}: {got}", expected=expected, remedy=remedy)


def _demonstrations(
    columns: episodes.Arrays, spec: BehaviorSpec, files: tuple[DemonstrationFile, ...]
) -> Demonstrations:
    lengths = columns["lengths"].astype(np.int64)
    ended = np.zeros(int(lengths.sum()), np.bool_)
    ended[np.cumsum(lengths) - 1] = True
    return Demonstrations(
        observations=tuple(columns[f"observation.{at}"] for at in range(len(spec.observations))),
        continuous=np.clip(columns["continuous"], -1, 1),
        discrete=columns["discrete"],
        masks=columns.get("masks"),
        ended=ended,
        terminated=columns["terminated"],
        episode=np.repeat(np.arange(len(lengths)), lengths),
        episodes=len(lengths),
        files=files,
    )
