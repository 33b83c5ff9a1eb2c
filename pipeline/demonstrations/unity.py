"""This module reads ML-Agents' `.demo` files as recorded episodes.

    byte 0   length, metadata      32 bytes and the length's one are reserved for them
    byte 33  length, parameters of the behavior
    then     length, pair          as often as the metadata say
    then     the metadata again, without a length: the recorder writes them here too when it closes

A recorder that was never closed leaves 0 for the number of pairs and no second metadata: all pairs in the file count.

A pair holds

    the agent's observation and the choices that are forbidden now,
    the reward since its decision before, and whether the episode is over,
    an action: that of the decision before, or its own (see below).

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
* Observations: see `pipeline/bridges/unity/observations.py`; messages: `messages.proto` beside it.

Two generations of files exist:

    previous   the recorder writes a pair before its decision is made: the action is that of the decision before
               (pull request 1999 of ML-Agents; ExpertPyramid.demo)
    own        the action is that of the pair's own observation, and the file's last pair has none
               (older files; Expert3DBall.demo, ExpertBasic.demo)

In both, reward and end of a pair are those of the step that led to its observation. No field of a file names its
generation. They differ in which pair has no action to hold: in `previous` the first of an episode, in `own` the last of
the file. The rule, in this order:

1. own: the file's last pair has no action, and no pair is without one if its episode continues.
2. previous: no pair but the first of an episode is without an action. Every episode begins with an action that is
   missing, zero, or a repetition of the pair before, which an agent holds until its first decision; at least one is
   missing or zero. The file's first episode may begin otherwise: a recording may begin in the middle of one.
3. Any other file is refused, until a setting names its generation.

n pairs of a file, e episodes, r steps, K choices of all branches.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.bridges.unity import RECORD_AGAIN, UnreadableData
from sparring.pipeline.bridges.unity.actions import action_spec
from sparring.pipeline.bridges.unity.messages import parsed
from sparring.pipeline.bridges.unity.observations import SensorReader, arrays, decoded, sensors
from sparring.pipeline.demonstrations.episodes import Arrays, DemoActions, Pairing, Recording, RecordingError
from sparring.pipeline.files import regular
from sparring.pipeline.specs import ActionSpec, Array, BehaviorId, BehaviorSpec, SpecError

FORCED: Final = "set by demo_actions"
PARAMETERS_AT: Final = 33
VERSIONS: Final = (0, 1)

_WHOLE: Final = "demonstrations of Unity: a whole .demo file"
_LONGEST_LENGTH: Final = 5
"""Bytes of a length: 7 bits each, 32 in all."""

Message = Any
"""A message, whose class protobuf makes from a table when the program runs."""

Episode = list[int]
"""Numbers of the pairs of an episode."""


class UnknownPairing(UnreadableData):
    """Reports that the pairs of a file match neither generation."""

    expected = (
        "no action in its last pair (the action is that of the pair's own observation), or episodes that begin with an "
        "action of zero (it is that of the decision before)"
    )

    def __init__(self, got: str) -> None:
        super().__init__(got, "set demo_actions beside demo_path to own or previous, or record it again")


def read(path: Path, *, actions: DemoActions = "auto") -> Recording:
    """Reads a `.demo` file.

    Args:
        path: of the file.
        actions: which decision's action a pair holds: `previous`, `own`, or the detected one.

    Raises:
        RecordingError: the file is no `.demo` file, truncated, inconsistent, without a whole step or of unknown
            generation, or a library that reads it is missing.
    """
    try:
        return _recording(regular(path).read_bytes(), path.stem, actions)
    except UnreadableData as error:
        expected = error.expected if isinstance(error, UnknownPairing) else _WHOLE
        raise RecordingError(got=f"{path}: {error}", expected=expected, remedy=error.remedy) from error
    except SpecError as error:
        got = f"{path}: {error.got}, where {error.expected} is needed"
        raise RecordingError(got=got, expected=_WHOLE, remedy=RECORD_AGAIN) from error
    except OSError as error:
        raise RecordingError(got=f"{path}: {error}", expected=_WHOLE, remedy="correct the path") from error


def _recording(data: bytes, stem: str, wanted: DemoActions) -> Recording:
    brain, pairs = _content(data)
    behavior = BehaviorId.parse(brain.brain_name) if brain.brain_name else BehaviorId(name=stem)
    if not pairs:
        raise UnreadableData("no step")
    actions = action_spec(brain)
    readers = sensors(decoded(pairs[0].agent_info.observations))
    spec = BehaviorSpec(observations=tuple(reader.spec for reader in readers), actions=actions)
    rows = _rows(pairs, readers, actions)
    pairing = _pairing(pairs, wanted)
    own = pairing.actions == "own"
    episodes = [episode for episode in _episodes(pairs, own=own) if len(episode) > 1]
    if not episodes:
        raise UnreadableData(f"no whole step in {len(pairs)} pairs")
    last = [episode[-1] for episode in episodes]
    beginnings = {episode[0] for episode in episodes}
    final = [episode[-2] if episode[-1] in beginnings else episode[-1] for episode in episodes]
    before, after = zip(*itertools.chain.from_iterable(map(itertools.pairwise, episodes)), strict=True)
    steps, outcomes = list(before), list(after)
    columns: Arrays = {
        "lengths": np.array([len(episode) - 1 for episode in episodes], np.int32),
        "teams": np.full(len(last), behavior.team, np.int32),
        "simulators": np.zeros(len(last), np.int32),
    }
    columns |= {name: rows[name][last] for name in ("agents", "groups", "terminated")}
    columns |= {name: rows[name][outcomes] for name in ("rewards", "group_rewards")}
    for at in range(len(readers)):
        observed = rows[f"observation.{at}"]
        columns |= {f"observation.{at}": observed[steps], f"final_observation.{at}": observed[final]}
    if rows["masks"][steps].any():
        columns["masks"] = rows["masks"][steps]
    chosen = [_action(pairs[number].action_info, number, actions) for number in (steps if own else outcomes)]
    columns["continuous"], columns["discrete"] = map(np.stack, zip(*chosen, strict=True))
    return Recording(behavior=behavior.name, spec=spec, columns=columns, pairing=pairing)


def _content(data: bytes) -> tuple[Message, list[Message]]:
    """Returns the parameters of the behavior, and all pairs.

    Raises:
        UnreadableData: a message is truncated, invalid, missing or unexpected; or the version is unknown.
    """
    if not data:
        raise UnreadableData("an empty file")
    first, after = _delimited(data, 0, "metadata")
    if after > PARAMETERS_AT:
        raise UnreadableData(f"{after} bytes of metadata, more than the {PARAMETERS_AT} reserved for it")
    meta = parsed("DemonstrationMetaProto", first, "metadata")
    number: int = meta.number_steps
    if meta.api_version not in VERSIONS:
        raise UnreadableData(f"version {meta.api_version} of the format, which is unknown")
    if number < 0:
        raise UnreadableData(f"metadata of {number} steps")
    second, at = _delimited(data, PARAMETERS_AT, "parameters of the behavior")
    brain = parsed("BrainParametersProto", second, "parameters of the behavior")
    pairs: list[Message] = []
    while at < len(data) and (len(pairs) < number if number else data[at:] != first):
        one, at = _delimited(data, at, f"pair {len(pairs)}")
        pairs.append(parsed("AgentInfoActionPairProto", one, f"pair {len(pairs)}"))
    if len(pairs) < number:
        raise UnreadableData(f"{len(pairs)} pairs of the {number} in its metadata: it was truncated")
    if at < len(data) and data[at:] != first:
        raise UnreadableData(f"{len(data) - at} bytes after the last of the {number} pairs in its metadata")
    return brain, pairs


def _delimited(data: bytes, at: int, what: str) -> tuple[bytes, int]:
    """Returns the message after the length at `at`, and the position after it."""
    length, start = 0, at
    for place in range(_LONGEST_LENGTH):
        if start >= len(data):
            raise UnreadableData(f"the end of the file where {what} should be: it was truncated")
        length |= (data[start] & 0x7F) << 7 * place
        start += 1
        if data[start - 1] < 0x80:
            break
    else:
        raise UnreadableData(f"no length before {what}")
    if length > len(data) - start:
        raise UnreadableData(f"{len(data) - start} of the {length} bytes of {what}: it was truncated")
    return data[start : start + length], start + length


def _rows(pairs: Sequence[Message], readers: tuple[SensorReader, ...], actions: ActionSpec) -> Arrays:
    """Returns [n, ...] what all pairs hold but their actions, by the names of the columns."""
    infos = [pair.agent_info for pair in pairs]
    masks = np.zeros((len(pairs), actions.mask_size), np.bool_)
    observed: list[list[Array]] = []
    for number, info in enumerate(infos):
        if not np.isfinite((info.reward, info.group_reward)).all():
            raise UnreadableData(f"rewards {info.reward} and {info.group_reward} of the group in pair {number}")
        if len(info.action_mask) not in (0, actions.mask_size):
            raise UnreadableData(f"a mask of {len(info.action_mask)} in pair {number} for branches {actions.discrete}")
        if info.action_mask:
            masks[number] = np.frombuffer(info.action_mask, np.uint8) != 0
        try:
            observed.append(arrays(readers, decoded(info.observations)))
        except UnreadableData as error:
            raise UnreadableData(f"{error} in pair {number}", error.remedy) from error
    return {
        "agents": np.array([info.id for info in infos], np.int64),
        "groups": np.array([info.group_id for info in infos], np.int64),
        "terminated": np.array([info.done and not info.max_step_reached for info in infos], np.bool_),
        "rewards": np.array([info.reward for info in infos], np.float32),
        "group_rewards": np.array([info.group_reward for info in infos], np.float32),
        "masks": masks,
        **{f"observation.{at}": np.stack(column) for at, column in enumerate(zip(*observed, strict=True))},
    }


def _pairing(pairs: Sequence[Message], wanted: DemoActions) -> Pairing:
    """Returns the generation of a file: the wanted one, or the detected one for `auto`.

    Raises:
        UnknownPairing: detection was wanted, and the pairs match neither generation.
    """
    if wanted != "auto":
        return Pairing(actions=wanted, evidence=FORCED)
    actions = [_stored(pair.action_info) for pair in pairs]
    missing = {at for at, action in enumerate(actions) if not any(action)}
    episodes = _episodes(pairs, own=False)
    first, last = ({episode[end] for episode in episodes} for end in (0, -1))
    if len(pairs) - 1 in missing and missing <= last:
        return Pairing(actions="own", evidence="its last pair has no action")
    if unexpected := sorted(missing - first):
        raise UnknownPairing(
            f"no action in pair {unexpected[0]} of {len(pairs)}, which is not the first of its episode"
        )
    zero = {at for at in first if not any(map(any, actions[at]))}
    decided = {at for at in first - zero if not (at and actions[at] == actions[at - 1])}
    if not zero or decided - {0}:
        raise UnknownPairing(
            f"an action in its last pair, and {len(decided)} of {len(first)} episodes that begin with a new one"
        )
    return Pairing(actions="previous", evidence=f"{len(zero)} of {len(first)} episodes begin with no action or zero")


def _episodes(pairs: Sequence[Message], *, own: bool) -> list[Episode]:
    """Returns the episodes in the order of their ends; `own` actions put a pair that decides when done in two."""
    ended: list[Episode] = []
    running: dict[int, Episode] = {}
    for number, pair in enumerate(pairs):
        agent: int = pair.agent_info.id
        running.setdefault(agent, []).append(number)
        if pair.agent_info.done:
            ended.append(running.pop(agent))
            if own and any(_stored(pair.action_info)):
                running[agent] = [number]
    return [*ended, *running.values()]


def _stored(action: Message) -> tuple[bytes, tuple[int, ...], bytes]:
    """Returns all values of an action's message as stored in the file; all are empty if it holds none."""
    return action.continuous_actions, tuple(action.discrete_actions), action.vector_actions_deprecated


def _action(action: Message, number: int, spec: ActionSpec) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Returns the [C] continuous and [D] discrete action of a pair."""
    packed, discrete, deprecated = _stored(action)
    continuous, choices = _numbers(packed, number), np.array(discrete, np.float64)
    if not continuous.size and not choices.size:  # before version 1.3 of the communication protocol
        old = _numbers(deprecated, number)
        continuous, choices = (old, choices) if spec.continuous else (continuous, old.astype(np.float64))
    if (len(continuous), len(choices)) != (spec.continuous, len(spec.discrete)):
        found = f"{len(continuous)} continuous and {len(choices)} discrete actions"
        raise UnreadableData(f"{found} in pair {number} for {spec.continuous} and {len(spec.discrete)}")
    if not np.isfinite(continuous).all():
        raise UnreadableData(f"continuous actions {continuous.tolist()} in pair {number}")
    if not ((choices >= 0) & (choices < spec.discrete) & (choices == np.floor(choices))).all():
        raise UnreadableData(f"choices {[*discrete] or choices.tolist()} in pair {number} for branches {spec.discrete}")
    return np.clip(continuous, -1, 1), choices.astype(np.int32)


def _numbers(packed: bytes, number: int) -> NDArray[np.float32]:
    if len(packed) % 4:
        raise UnreadableData(f"{len(packed)} bytes of actions in pair {number}, which are no float32")
    return np.frombuffer(packed, "<f4").astype(np.float32)
