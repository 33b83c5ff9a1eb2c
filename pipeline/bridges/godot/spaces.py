"""Converts the spaces of a Godot game to specs, and its observations and actions to columns, policy by policy.

A space is a map of names. Observations: `box` is a vector, or an image if its name contains `2d` and its size has three
numbers; `discrete` is one-hot. Actions: `continuous` heads lie side by side, `discrete` heads are one branch each.

A reader takes the values of n agents at once. Only if it fails does it read them one by one, to name the agent.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import NOTICE, SettingsError
from sparring.pipeline.files import Json
from sparring.pipeline.messages.simulator import BehaviorActions
from sparring.pipeline.specs import ActionSpec, Array, BehaviorId, BehaviorSpec, ObservationSpec, SpecError

Read = Callable[[Sequence[Json]], Array]
"""Converts the values of n agents to [n, ...]; raises ValueError with the reason if they are wrong."""

DEFAULT_BEHAVIOR: Final = "Godot"
_UPDATE: Final = "update the Godot RL Agents plugin of the game"
MOST_AGENTS: Final = 2**16
MOST_NUMBERS: Final = 2**24
"""Limit for one observation of one agent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GodotSensor:
    """Describes one observation.

    Attributes:
        key: its name in the game.
        spec: its spec for the trainer.
        read: converts the values of n agents to [n, *spec.shape]; raises ValueError with the reason if they are wrong.
    """

    key: str
    spec: ObservationSpec
    read: Read


class PolicyAgents:
    """Holds the agents of one policy.

    Args:
        behavior: id of their behavior.
        agents: [n] indices in the game's lists, which are the agents' ids too.
        seen: observation space of each agent.
        done: action space of each agent.

    Attributes:
        behavior: as above.
        agents: as above.
        spec: observations and actions of the behavior.

    Raises:
        SpecError: a space is not supported.
    """

    def __init__(
        self, behavior: str, agents: Sequence[int], seen: Mapping[str, Json], done: Mapping[str, Json]
    ) -> None:
        self.behavior = behavior
        self.agents = np.array(agents, np.int64)
        self._order = list(agents)
        sensors = (_sensor(str(key), space) for key, space in seen.items())
        self._sensors = tuple(sensor for sensor in sensors if sensor is not None)
        if not self._sensors:
            raise _bad(f"agents of {behavior} without observations", "one or more", "correct get_obs_space")
        self._heads, actions = _heads(done)
        self.spec = BehaviorSpec(observations=tuple(sensor.spec for sensor in self._sensors), actions=actions)

    def columns(self, observations: Sequence[Json]) -> tuple[Array, ...]:
        """Returns one column [n, *shape] for each observation of these agents.

        Args:
            observations: those of all agents of the game, in its order.

        Raises:
            UnreadableMessage: an observation is missing, or does not fit its space.
        """
        rows = [observations[agent] for agent in self._order]
        return tuple(
            column(self._order, pick(rows, sensor.key), sensor.read, f"observation {sensor.key!r}")
            for sensor in self._sensors
        )

    def commands(self, act: BehaviorActions) -> list[dict[str, Json]]:
        """Returns the action of each agent in the game's format."""
        rows = zip(act.continuous.tolist(), act.discrete.tolist(), strict=True)
        return [
            {key: chosen[at] if isinstance(at, int) else moves[at] for key, at in self._heads} for moves, chosen in rows
        ]


def read_policies(info: Mapping[str, Json], behavior: str | None) -> list[PolicyAgents]:
    """Returns the policies of a game from its `env_info`, of either generation, in the order of their first agents.

    Args:
        info: the message.
        behavior: name of the behavior of a game with one policy; None: the policy's own.

    Raises:
        SpecError: the message breaks the protocol, a space is not supported, or agents of one policy have different
            spaces.
        SettingsError: `behavior` is given for several policies.
    """
    count = _whole(info.get("n_agents"), "n_agents")
    if not 1 <= count <= MOST_AGENTS:
        raise _bad(f"{count} agents", f"1 to {MOST_AGENTS}", "add agents with control mode Training to the scene")
    seen = _per_agent(info, "observation_space", count)
    done = _per_agent(info, "action_space", count)
    members: dict[str, list[int]] = {}
    for agent, name in enumerate(_ids(info.get("agent_policy_names"), count, behavior)):
        members.setdefault(name, []).append(agent)
    for name, agents in members.items():
        for agent in agents:
            if seen[agent] != seen[agents[0]] or done[agent] != done[agents[0]]:
                got = f"agents {agents[0]} and {agent} of {name} with different spaces"
                raise _bad(got, "the same for all agents of one policy", "give them different policy names in the game")
    return [PolicyAgents(name, agents, seen[agents[0]], done[agents[0]]) for name, agents in members.items()]


# ---------------------------------------------------------------- reading env_info


def _per_agent(info: Mapping[str, Json], key: str, count: int) -> list[Mapping[str, Json]]:
    """Returns the space of each agent: the first generation has one for all, the second one for each."""
    value = info.get(key)
    spaces = [value] * count if isinstance(value, dict) else value
    if not isinstance(spaces, list) or len(spaces) != count or not all(isinstance(one, dict) for one in spaces):
        raise _bad(f"{key} {short(value)}", f"one map of spaces, or a list of {count}", _UPDATE)
    return spaces


def _ids(names: Json, count: int, behavior: str | None) -> list[str]:
    """Returns the behavior id of each agent."""
    if names is None:
        names = [behavior or DEFAULT_BEHAVIOR] * count
    if not isinstance(names, list) or len(names) != count or not all(isinstance(name, str) for name in names):
        raise _bad(f"agent_policy_names {short(names)}", f"{count} names, one for each agent", _UPDATE)
    if behavior is not None:
        if len(set(names)) > 1:
            raise SettingsError(
                f"got behavior {behavior!r} for a game with the policies {', '.join(sorted(set(names)))}; expected "
                "a game with one policy; leave the option out, and name the behaviors of the configuration like them"
            )
        names = [behavior] * count
    return [str(BehaviorId.parse(name)) for name in names]


def _sensor(key: str, space: Json) -> GodotSensor | None:
    """Returns how to read an observation; None if it is empty."""
    kind = space.get("space") if isinstance(space, dict) else None
    if kind not in ("box", "discrete"):
        raise _bad(f"observation {key!r} of the space {short(space)}", "space box or discrete", "correct get_obs_space")
    sizes = space.get("size")
    shape = tuple(_whole(size, f"the size of {key!r}") for size in (sizes if isinstance(sizes, list) else [sizes]))
    size = math.prod(shape)
    if min(shape, default=0) < 0 or size > MOST_NUMBERS:
        raise _bad(f"observation {key!r} of size {list(shape)}", f"at most {MOST_NUMBERS} numbers", "make it smaller")
    if size == 0:
        return None
    if kind == "box" and "2d" in key and len(shape) == 3:
        return _image(key, shape)
    if len(shape) == 3:
        sys.stderr.write(
            f"{NOTICE}observation {key!r} of size {list(shape)} is read as a vector of {size} numbers; an image has 2d "
            "in its name\n"
        )
    read = one_hot if kind == "discrete" else numbers
    spec = ObservationSpec(name=key, shape=(size,))
    return GodotSensor(key=key, spec=spec, read=lambda values: read(values, size))


def _image(key: str, shape: tuple[int, ...]) -> GodotSensor:
    """Returns a sensor of images, whose bytes are row by row and pixel by pixel whatever the order in their size.

    The plugin's camera sensors have size [channels, height, width]; those before 2024 [width, height, channels]. The
    channels are the odd dimension of a square, else the smaller of first and last.
    """
    first, middle, last = shape
    ahead = middle == last or (first != middle and first < last)
    channels, height, width = shape if ahead else (last, middle, first)
    spec = ObservationSpec(name=key, shape=(channels, height, width), dtype="uint8", kind="image")
    return GodotSensor(key=key, spec=spec, read=lambda values: pixels(values, height, width, channels))


def _heads(space: Mapping[str, Json]) -> tuple[list[tuple[str, slice | int]], ActionSpec]:
    """Returns the place of each head's action: a slice of the continuous ones, or the index of a branch."""
    heads: list[tuple[str, slice | int]] = []
    branches: list[int] = []
    total = 0
    for key, head in space.items():
        kind = head.get("action_type") if isinstance(head, dict) else None
        if kind not in ("continuous", "discrete"):
            got = f"action {key!r} of the space {short(head)}"
            raise _bad(got, "action_type continuous or discrete", "correct get_action_space")
        size = _whole(head.get("size"), f"the size of {key!r}")
        if not 1 <= size <= MOST_NUMBERS:
            raise _bad(f"action {key!r} of size {size}", "1 or more", "correct get_action_space, or leave it out")
        if kind == "discrete":
            heads.append((key, len(branches)))
            branches.append(size)
        else:
            heads.append((key, slice(total, total + size)))
            total += size
    return heads, ActionSpec(continuous=total, discrete=tuple(branches))


def _whole(value: Json, what: str) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)  # sizes that a game has computed
    if type(value) is not int:
        raise _bad(f"{short(value)} as {what}", "a whole number", "correct get_obs_space or get_action_space")
    return value


def _bad(got: str, expected: str, remedy: str) -> SpecError:
    return SpecError(got=got, expected=expected, remedy=remedy)


# ---------------------------------------------------------------- lists of values as columns


class UnreadableMessage(Exception):
    """Reports a part of a message that cannot be used."""


def column(agents: Sequence[int], values: Sequence[Json], read: Read, what: str) -> Array:
    """Returns the values of n agents as `read` converts them.

    Args:
        agents: [n] ids, for messages.
        values: [n] one value for each agent.
        read: raises ValueError for values that it cannot read.
        what: name of the values, for messages.

    Raises:
        UnreadableMessage: `read` fails; the message names the first agent whose value it rejects alone.
    """
    try:
        return read(values)
    except ValueError as error:
        for agent, value in zip(agents, values, strict=True):
            try:
                read([value])
            except ValueError as reason:
                raise UnreadableMessage(f"agent {agent}'s {what}: {reason}") from reason
        raise UnreadableMessage(f"{what} of another form for some agents than for others") from error


def pick(rows: Sequence[Json], key: str) -> list[Json]:
    """Returns the observation `key` of each agent; None if it is missing."""
    return [row.get(key) if isinstance(row, dict) else None for row in rows]


def one_number(values: Sequence[Json]) -> NDArray[np.float32]:
    """Returns one finite number for each of n agents, [n]. Raises as `numbers`."""
    return numbers(values, 1)[:, 0]


def flags(values: Sequence[Json]) -> NDArray[np.bool_]:
    """Returns true or false for each of n agents, [n]; 1 and 0 are accepted.

    Raises:
        ValueError: a value is something else.
    """
    if not all(type(one) in (bool, int) and one in (0, 1) for one in values):
        raise ValueError(f"{short(values[0])} where true or false was expected")
    return np.array(values, np.bool_)


def numbers(values: Sequence[Json], size: int) -> NDArray[np.float32]:
    """Returns the numbers of n agents, [n, size].

    Raises:
        ValueError: a number is not finite, or their count is wrong; the message says what was got.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{short(values[0])} where numbers were expected")
    if array.size != len(values) * size:
        raise ValueError(f"{array.size // len(values)} numbers where {size} were expected")
    with np.errstate(over="ignore"):  # the next check finds it
        rows = array.astype(np.float32).reshape(len(values), size)
    if not np.isfinite(rows).all():
        raise ValueError("NaN or infinity")
    return rows


def one_hot(values: Sequence[Json], size: int) -> NDArray[np.float32]:
    """Returns the choices of n agents, [n, size], 1 for the chosen one.

    Raises:
        ValueError: a choice is no whole number from 0 to size - 1.
    """
    chosen = one_number(values)
    places = chosen.astype(np.int64)
    if (places != chosen).any() or not ((places >= 0) & (places < size)).all():
        raise ValueError(f"{chosen[0]:g} where a whole number from 0 to {size - 1} was expected")
    rows = np.zeros((len(values), size), np.float32)
    rows[np.arange(len(values)), places] = 1
    return rows


def pixels(values: Sequence[Json], height: int, width: int, channels: int) -> NDArray[np.uint8]:
    """Returns the images of n agents, [n, channels, height, width], from hexadecimal texts row by row and pixel by
    pixel.

    Raises:
        ValueError: a value is no such text.
    """
    digits = 2 * height * width * channels
    if not all(isinstance(text, str) and len(text) == digits for text in values):
        raise ValueError(f"{short(values[0])} where {digits} hexadecimal digits were expected")
    rows = np.frombuffer(bytes.fromhex("".join(values)), np.uint8).reshape(len(values), height, width, channels)
    return np.ascontiguousarray(rows.transpose(0, 3, 1, 2))


def short(value: Json) -> str:
    """Returns the beginning of a value, for messages."""
    return repr(value)[:40]
