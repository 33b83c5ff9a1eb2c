"""This module reads ML-Agents' `.demo` files as recorded episodes.

A pair of the file holds

    the agent's observation and the choices that are forbidden now,
    the reward since its decision before, and whether the episode is over,
    an action: that of the decision before, or its own. `pairing.py` distinguishes the two generations of files.

So a step here is a pair's observation and mask with the *next* pair's reward and end, and with the action of the next
pair or of its own. k pairs of an episode are k - 1 steps and its final observation. ML-Agents' own loader gives every
observation the action of its own pair: in files of the first kind, that which led to it, one decision late.

* If actions are a pair's own, an agent that is done may already observe the start of its next episode (ML-Agents reset
  agents before it collected observations): a pair that is done but has an action ends one episode and begins the next.
  The observation after the last step is not in the file then, and the last observation replaces it.
* An episode of a single pair has no step and is left out. One that is not over when the file ends is interrupted after
  its last pair. `max_step_reached` is an interruption too, not a termination.
* Pairs belong together by the agent's id; episodes are in the order of their ends.
* Continuous actions are clipped to [-1, 1], the range of a trained policy; Unity's heuristics may exceed it.
* Columns: `agents` are Unity's ids, `simulators` are 0, `teams` come from the behavior's name `Name?team=N`.
* Observations: see `pipeline/bridges/unity/observations.py`; messages: `messages.proto` beside it, and their positions:
  `framing.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.bridges.unity import RECORD_AGAIN, UnreadableData
from sparring.pipeline.bridges.unity.actions import action_spec
from sparring.pipeline.bridges.unity.observations import SensorReader, arrays, decoded, sensors
from sparring.pipeline.demonstrations.episodes import Arrays, Recording, RecordingError
from sparring.pipeline.demonstrations.framing import content
from sparring.pipeline.demonstrations.pairing import ActionsOf, DemoActions, UnknownPairing, action_values, pairing_of
from sparring.pipeline.specs import ActionSpec, Array, BehaviorId, BehaviorSpec, SpecError

_WHOLE: Final = "demonstrations of Unity: a whole .demo file"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """Holds one pair: an observation, the outcome of the decision before it, and an action.

    Attributes:
        number: of the pair in the file, from 0.
        mask: [K] or [0].
        action: message.
    """

    number: int
    agent: int
    group: int
    observations: list[Array]
    mask: NDArray[np.bool_]
    reward: float
    group_reward: float
    done: bool
    interrupted: bool
    action: Any


def read(path: Path, *, actions: DemoActions = "auto") -> Recording:
    """Reads a `.demo` file.

    Args:
        path: of the file.
        actions: which decision's action a pair holds: `previous`, `own`, or the detected one (`pairing.py`).

    Raises:
        RecordingError: the file is no `.demo` file, truncated, inconsistent, without a whole step or of unknown
            generation, or a library that reads it is missing.
    """
    try:
        return _recording(path.read_bytes(), path.stem, actions)
    except UnknownPairing as error:
        raise _refused(path, str(error), error.remedy, error.expected) from error
    except UnreadableData as error:
        raise _refused(path, str(error), error.remedy) from error
    except SpecError as error:
        raise _refused(path, f"{error.got}, where {error.expected} is needed", RECORD_AGAIN) from error
    except OSError as error:
        raise _refused(path, str(error), "correct the path") from error


def _refused(path: Path, got: str, remedy: str, expected: str = _WHOLE) -> RecordingError:
    return RecordingError(got=f"{path}: {got}", expected=expected, remedy=remedy)


def _recording(data: bytes, stem: str, wanted: DemoActions) -> Recording:
    found = content(data)
    behavior = BehaviorId.parse(found.brain.brain_name) if found.brain.brain_name else BehaviorId(name=stem)
    if not found.pairs:
        raise UnreadableData("no step")
    actions_spec = action_spec(found.brain)
    all_sensors = sensors(decoded(found.pairs[0].agent_info.observations))
    spec = BehaviorSpec(observations=tuple(sensor.spec for sensor in all_sensors), actions=actions_spec)
    pairs = [_pair(i, message, all_sensors, actions_spec) for i, message in enumerate(found.pairs)]
    pairing = pairing_of(found.pairs, wanted)
    episodes = [episode for episode in _episodes(pairs, pairing.actions) if len(episode) > 1]
    if not episodes:
        raise UnreadableData(f"no whole step in {len(found.pairs)} pairs")
    columns = _of_episodes(episodes, behavior.team, spec) | _of_steps(episodes, spec, pairing.actions)
    return Recording(behavior=behavior.name, spec=spec, columns=columns, pairing=pairing)


def _pair(number: int, message: Any, all_sensors: tuple[SensorReader, ...], spec: ActionSpec) -> _Pair:
    info = message.agent_info
    if not np.isfinite((info.reward, info.group_reward)).all():
        raise UnreadableData(f"rewards {info.reward} and {info.group_reward} of the group in pair {number}")
    if len(info.action_mask) not in (0, spec.mask_size):
        raise UnreadableData(f"a mask of {len(info.action_mask)} in pair {number} for branches {spec.discrete}")
    try:
        observations = arrays(all_sensors, decoded(info.observations))
    except UnreadableData as error:
        raise UnreadableData(f"{error} in pair {number}", error.remedy) from error
    return _Pair(
        number=number,
        agent=info.id,
        group=info.group_id,
        observations=observations,
        mask=np.frombuffer(info.action_mask, np.uint8) != 0,
        reward=info.reward,
        group_reward=info.group_reward,
        done=info.done,
        interrupted=info.max_step_reached,
        action=message.action_info,
    )


def _episodes(pairs: Iterable[_Pair], actions: ActionsOf) -> list[list[_Pair]]:
    """Returns the pairs of each episode, in the order of their ends; a pair that decides when done is in two."""
    ended: list[list[_Pair]] = []
    running: dict[int, list[_Pair]] = {}
    for pair in pairs:
        running.setdefault(pair.agent, []).append(pair)
        if pair.done:
            ended.append(running.pop(pair.agent))
            if actions == "own" and any(action_values(pair.action)):
                running[pair.agent] = [pair]
    return [*ended, *running.values()]


def _of_episodes(episodes: list[list[_Pair]], team: int, spec: BehaviorSpec) -> Arrays:
    last = [episode[-1] for episode in episodes]
    columns: Arrays = {
        "lengths": np.array([len(episode) - 1 for episode in episodes], np.int32),
        "agents": np.array([pair.agent for pair in last], np.int64),
        "teams": np.full(len(last), team, np.int32),
        "simulators": np.zeros(len(last), np.int32),
        "groups": np.array([pair.group for pair in last], np.int64),
        "terminated": np.array([pair.done and not pair.interrupted for pair in last], np.bool_),
    }
    beginnings = {episode[0].number for episode in episodes}
    final = [episode[-2] if episode[-1].number in beginnings else episode[-1] for episode in episodes]
    for at in range(len(spec.observations)):
        columns[f"final_observation.{at}"] = np.stack([pair.observations[at] for pair in final])
    return columns


def _of_steps(episodes: list[list[_Pair]], spec: BehaviorSpec, actions: ActionsOf) -> Arrays:
    steps = [step for episode in episodes for step in itertools.pairwise(episode)]
    chosen = [_action(after if actions == "previous" else pair, spec.actions) for pair, after in steps]
    columns: Arrays = {
        "continuous": np.stack([continuous for continuous, _ in chosen]),
        "discrete": np.stack([discrete for _, discrete in chosen]),
        "rewards": np.array([after.reward for _, after in steps], np.float32),
        "group_rewards": np.array([after.group_reward for _, after in steps], np.float32),
    }
    for at in range(len(spec.observations)):
        columns[f"observation.{at}"] = np.stack([pair.observations[at] for pair, _ in steps])
    if any(pair.mask.any() for pair, _ in steps):
        free = np.zeros(spec.actions.mask_size, np.bool_)
        columns["masks"] = np.stack([pair.mask if len(pair.mask) else free for pair, _ in steps])
    return columns


def _action(pair: _Pair, spec: ActionSpec) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Returns the [C] continuous and [D] discrete action of a pair."""
    continuous: Any = _numbers(pair.action.continuous_actions, pair.number)
    discrete: Any = pair.action.discrete_actions
    if not continuous and not discrete:  # before version 1.3 of the communication protocol
        old = _numbers(pair.action.vector_actions_deprecated, pair.number)
        continuous, discrete = (old, ()) if spec.continuous else ((), old)
    if (len(continuous), len(discrete)) != (spec.continuous, len(spec.discrete)):
        found = f"{len(continuous)} continuous and {len(discrete)} discrete actions"
        raise UnreadableData(f"{found} in pair {pair.number} for {spec.continuous} and {len(spec.discrete)}")
    if not np.isfinite(values := np.array(continuous, np.float32)).all():
        raise UnreadableData(f"continuous actions {values.tolist()} in pair {pair.number}")
    choices = tuple(zip(discrete, spec.discrete, strict=True))
    if not all(0 <= choice < branch and choice == int(choice) for choice, branch in choices):
        raise UnreadableData(f"choices {list(discrete)} in pair {pair.number} for branches {spec.discrete}")
    return np.clip(values, -1, 1), np.array(discrete, np.int32)


def _numbers(packed: bytes, number: int) -> list[float]:
    if len(packed) % 4:
        raise UnreadableData(f"{len(packed)} bytes of actions in pair {number}, which are no float32")
    plain: list[float] = np.frombuffer(packed, "<f4").tolist()
    return plain
