"""Converts the spaces of a Godot game to specs, and its observations and actions to columns, policy by policy.

A space is a map of names. Observations: `box` is a vector, or an image if its name contains `2d` and its size has three
numbers; `discrete` is one-hot. Actions: `continuous` heads lie side by side, `discrete` heads are one branch each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sparring.pipeline.bridges.godot.columns import Read, column, numbers, one_hot, pick, pixels, short
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.simulator import BehaviorActions
from sparring.pipeline.specs import ActionSpec, Array, BehaviorId, BehaviorSpec, ObservationSpec, SpecError

DEFAULT_BEHAVIOR: Final = "Godot"
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

    def __init__(self, behavior: str, agents: Sequence[int], seen: Mapping[str, Any], done: Mapping[str, Any]) -> None:
        self.behavior = behavior
        self.agents = np.array(agents, np.int64)
        self._order = list(agents)
        sensors = (_sensor(str(key), space) for key, space in seen.items())
        self._sensors = tuple(sensor for sensor in sensors if sensor is not None)
        if not self._sensors:
            raise _bad(
                f"agents of {behavior} without observations", "at least one observation", "correct get_obs_space"
            )
        self._heads, actions = _heads(done)
        self.spec = BehaviorSpec(observations=tuple(sensor.spec for sensor in self._sensors), actions=actions)

    def columns(self, observations: Sequence[Any]) -> tuple[Array, ...]:
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

    def commands(self, act: BehaviorActions) -> list[dict[str, Any]]:
        """Returns the action of each agent in the game's format."""
        rows = zip(act.continuous.tolist(), act.discrete.tolist(), strict=True)
        return [
            {key: chosen[at] if isinstance(at, int) else moves[at] for key, at in self._heads} for moves, chosen in rows
        ]


def read_policies(info: Mapping[str, Any], behavior: str | None) -> list[PolicyAgents]:
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
                raise _bad(
                    f"agents {agents[0]} and {agent} of {name} with different spaces",
                    "the same spaces for all agents of one policy",
                    "give them different policy names in the game",
                )
    return [PolicyAgents(name, agents, seen[agents[0]], done[agents[0]]) for name, agents in members.items()]


# ---------------------------------------------------------------- reading env_info


def _per_agent(info: Mapping[str, Any], key: str, count: int) -> list[Mapping[str, Any]]:
    """Returns the space of each agent: the first generation has one for all, the second one for each."""
    value = info.get(key)
    spaces = [value] * count if isinstance(value, dict) else value
    if not isinstance(spaces, list) or len(spaces) != count or not all(isinstance(one, dict) for one in spaces):
        raise _bad(
            f"{key} {short(value)}",
            f"one map of spaces, or a list of {count}",
            "update the Godot RL Agents plugin of the game",
        )
    return spaces


def _ids(names: Any, count: int, behavior: str | None) -> list[str]:
    """Returns the behavior id of each agent."""
    if names is None:
        names = [behavior or DEFAULT_BEHAVIOR] * count
    if not isinstance(names, list) or len(names) != count or not all(isinstance(name, str) for name in names):
        raise _bad(
            f"agent_policy_names {short(names)}",
            f"{count} names, one for each agent",
            "update the Godot RL Agents plugin of the game",
        )
    if behavior is not None:
        if len(set(names)) > 1:
            raise SettingsError(
                f"got behavior {behavior!r} for a game with the policies {', '.join(sorted(set(names)))}; expected "
                "a game with one policy; leave the option out, and name the behaviors of the configuration like them"
            )
        names = [behavior] * count
    return [str(BehaviorId.parse(name)) for name in names]


def _sensor(key: str, space: Any) -> GodotSensor | None:
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
    if kind == "discrete":
        return GodotSensor(
            key=key, spec=ObservationSpec(name=key, shape=(size,)), read=lambda values: one_hot(values, size)
        )
    if "2d" in key and len(shape) == 3:
        return _image(key, shape)
    return GodotSensor(
        key=key, spec=ObservationSpec(name=key, shape=(size,)), read=lambda values: numbers(values, size)
    )


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


def _heads(space: Mapping[str, Any]) -> tuple[list[tuple[str, slice | int]], ActionSpec]:
    """Returns the place of each head's action: a slice of the continuous ones, or the index of a branch."""
    heads: list[tuple[str, slice | int]] = []
    branches: list[int] = []
    total = 0
    for key, head in space.items():
        kind = head.get("action_type") if isinstance(head, dict) else None
        if kind not in ("continuous", "discrete"):
            raise _bad(
                f"action {key!r} of the space {short(head)}",
                "action_type continuous or discrete",
                "correct get_action_space",
            )
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


def _whole(value: Any, what: str) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)  # sizes that a game has computed
    if type(value) is not int:
        raise _bad(f"{short(value)} as {what}", "a whole number", "correct get_obs_space or get_action_space")
    return value


def _bad(got: str, expected: str, remedy: str) -> SpecError:
    return SpecError(got=got, expected=expected, remedy=remedy)
