"""This module reads data sets of Minari, which hold episodes of Gymnasium environments.

`minari:NAME` in place of a file names a data set that Minari has in its folder, `$MINARI_DATASETS_PATH`. Nothing is
downloaded.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparring.pipeline.bridges.actions import Actions
from sparring.pipeline.bridges.making import import_optional
from sparring.pipeline.bridges.observations import Observations
from sparring.pipeline.demonstrations.episodes import Arrays, Recording, RecordingError, stacked
from sparring.pipeline.errors import described
from sparring.pipeline.specs import Array, BehaviorSpec

Space = Any
"""Space of Gymnasium."""


def read(name: str) -> Recording:
    """Reads a data set.

    Args:
        name: of the data set, as `minari list local` shows it.

    Raises:
        RecordingError: there is none of this name, it is damaged, or its actions are of another kind than a
            simulator's.
        SpecError: a space is not supported.
        SettingsError: the package is missing.
    """
    minari = import_optional("minari", "minari")
    try:
        dataset = minari.load_dataset(name)
    except Exception as error:  # the library asserts what a damaged one lacks
        raise RecordingError(
            got=f"minari:{name}, which cannot be read ({described(error)})",
            expected="the name of a data set in Minari's folder, $MINARI_DATASETS_PATH",
            remedy=f"correct the name, or run `minari download {name}` first",
        ) from error
    observations, space = Observations(dataset.observation_space), dataset.action_space
    spec = BehaviorSpec(observations=observations.specs, actions=Actions(space).spec)
    parts: list[Arrays] = []
    try:
        for one in dataset.iterate_episodes():
            parts.append(_episode(one, observations, space, spec))  # noqa: PERF401 - counted where one fails
    except RecordingError:
        raise
    except Exception as error:  # also of the libraries that read files
        raise RecordingError(
            got=f"minari:{name}, whose episode {len(parts)} cannot be read ({described(error)})",
            expected="a whole data set",
            remedy="download it again, or record it",
        ) from error
    if not parts:
        raise RecordingError(got=f"minari:{name} without an episode", expected="one at least", remedy="record some")
    return Recording(behavior=name, spec=spec, columns=stacked(parts))


def _episode(episode: Any, observations: Observations, space: Space, spec: BehaviorSpec) -> Arrays:
    """Returns the columns of one episode.

    Raises:
        RecordingError: the actions are of another kind than a simulator's.
        ValueError: the columns do not fit together.
    """
    steps = len(episode.rewards)
    seen = observations.batch(_nested(episode.observations))
    continuous, discrete = _actions(np.asarray(episode.actions), space, spec)
    lengths = [*map(len, seen), len(continuous) + 1, len(discrete) + 1]
    if not steps or {*lengths} != {steps + 1}:
        raise ValueError(f"{steps} rewards, {len(continuous)} actions and {len(seen[0])} observations")
    none = np.zeros(1, np.int32)
    return {
        "lengths": np.array([steps], np.int32),
        "agents": np.array([episode.id], np.int64),
        "teams": none,
        "simulators": none,
        "groups": none.astype(np.int64),
        "terminated": np.array([bool(episode.terminations[-1])]),
        "continuous": continuous,
        "discrete": discrete,
        "rewards": np.asarray(episode.rewards, np.float32),
        "group_rewards": np.zeros(steps, np.float32),
        **{f"observation.{at}": column[:steps] for at, column in enumerate(seen)},
        **{f"final_observation.{at}": column[steps:] for at, column in enumerate(seen)},
    }


def _nested(value: Any) -> Any:
    """Returns nested observations as arrays."""
    if isinstance(value, Mapping):
        return {key: _nested(one) for key, one in value.items()}
    return tuple(map(_nested, value)) if isinstance(value, tuple) else np.asarray(value)


def _actions(taken: Array, space: Space, spec: BehaviorSpec) -> tuple[Array, Array]:
    """Returns actions of an environment as a simulator receives them: continuous ones in [-1, 1], choices from 0.

    Raises:
        RecordingError: the space consists of others.
    """
    rows, kind = len(taken), type(space).__name__
    if kind == "Box":
        low, high = (np.asarray(one, np.float64).ravel() for one in (space.low, space.high))
        scaled = 2 * (taken.reshape(rows, -1) - low) / (high - low) - 1
        return np.clip(scaled, -1, 1).astype(np.float32), np.empty((rows, 0), np.int32)
    if kind not in ("Discrete", "MultiDiscrete"):
        raise RecordingError(
            got=f"actions of the space {kind}", expected="Box, Discrete or MultiDiscrete", remedy="flatten the space"
        )
    chosen = taken.reshape(rows, -1) - np.asarray(space.start).ravel()
    if not np.array_equal(chosen, np.trunc(chosen)):
        raise RecordingError(
            got=f"fractional actions of the space {kind}", expected="whole numbers", remedy="record it again"
        )
    return np.empty((rows, spec.actions.continuous), np.float32), chosen.astype(np.int32)
