"""Converts the agents of one Unity behavior to columns, and their actions back.

A message mixes agents that want a decision and agents that are done; each gives one row, in the order of the message.
An id may be in both: its episode ended, and its next one begins. Actions carry no ids; they follow the order of the
agents that want a decision.

The observation of a float sensor has the same bytes for every agent and step, except for its numbers. So the
observations of all agents are joined as rows: the bytes before and after the numbers must equal the first ones, and the
numbers are the array. Another layout is read message by message.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.bridges.unity import RECORD_AGAIN, UnreadableData
from sparring.pipeline.bridges.unity.actions import ActionWriter, action_spec
from sparring.pipeline.bridges.unity.messages import Proto, parsed
from sparring.pipeline.bridges.unity.observations import PNG, SensorReader, decoded, image, numbers, sensors, shaped
from sparring.pipeline.errors import LocalProtocolError
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Decisions, Ends
from sparring.pipeline.specs import Array, BehaviorId, BehaviorSpec, SpecError

T = TypeVar("T")
Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Places = NDArray[np.intp] | slice

PlainGoals = tuple[tuple[str, str], ...]
"""Goal signals that are read as a plain image or list of entities: name and kind of each."""

_SAME_SENSORS: Final = "give all agents of a behavior the same sensors, and leave them as they are while it trains"
_NOT_FINITE: Final = "find where the game divides by zero or overflows"
_READABLE: Final = "correct the behavior's sensors and actions: vectors, images, lists of entities, at least one action"
_MASKS: Final = "mask the choices of the branches in the behavior's first action spec"
_ONCE: Final = "let an agent request one decision per step, and give every agent its own Behavior Parameters"

_ALL: Final = slice(None)
_NO_IDS: Final = np.empty(0, np.int64)


class _MessageRows(NamedTuple):
    """Holds all agents of a message: n messages, and columns of n."""

    infos: Sequence[Proto]
    agents: Ids
    observations: Sequence[Array]
    rewards: Floats
    group_rewards: Floats | None


class PlayerBehavior:
    """Represents one behavior of one player.

    Args:
        behavior_id: `Name?team=N`.
        brain: its BrainParametersProto.
        first: AgentInfoProto of one of its agents.

    Attributes:
        spec: observations and actions of its agents.
        old: the player speaks a version before 1.3 of the communication.
        waiting: [n] ids of the decisions of the last report, row by row.
        plain_goals: its goal signals that are read as plain observations.

    Raises:
        UnreadableData: no network can be built for it.
    """

    def __init__(self, behavior_id: str, brain: Proto, first: Proto) -> None:
        try:
            BehaviorId.parse(behavior_id)
            observations = decoded(first.observations)
            known = sensors(observations)
            specs = tuple(sensor.spec for sensor in known)
            self.spec = BehaviorSpec(observations=specs, actions=action_spec(brain))
        except SpecError as error:
            got = f"{error.got} in {behavior_id}, where {error.expected} is needed"
            raise UnreadableData(got, _READABLE) from error
        except UnreadableData as error:
            raise _fit_for_games(error, behavior_id, _READABLE) from error
        self.id = behavior_id
        self.old: bool = not brain.HasField("action_spec")
        self.plain_goals: PlainGoals = tuple(
            (sensor.spec.name, sensor.spec.kind) for sensor in known if sensor.plain_goal
        )
        self.waiting: Ids = _NO_IDS
        self._deciding = _DecidedAgents()
        parts = zip(known, observations, first.observations, strict=True)
        self._sensors = [SensorColumn(*part, self.id) for part in parts]

    @cached_property
    def _writer(self) -> ActionWriter:  # made for the first answer, once the receiver of the spec accepts its size
        return ActionWriter(self.spec.actions, old=self.old)

    def restart(self) -> None:
        """Discards all episodes without an end, because the player was reset."""
        self._deciding = _DecidedAgents()
        self.waiting = _NO_IDS

    def report(self, infos: Sequence[Proto]) -> BehaviorReport | None:
        """Returns the report of the agents of one message; None if it is empty.

        Args:
            infos: AgentInfoProto of each agent.

        Raises:
            UnreadableData: they contradict each other or the behavior's first message, or are not finite.
        """
        self.waiting = _NO_IDS
        if not infos:
            return None
        rows = self._rows(infos[:])
        done = [info.done for info in rows.infos]
        deciding: Places = _ALL
        ends = None
        if True in done:
            over = np.array(done)
            deciding, ends = np.flatnonzero(~over), self._ends(rows, np.flatnonzero(over))
        decisions = self._decisions(rows, deciding)
        if decisions is None and ends is None:
            return None
        return BehaviorReport(behavior=self.id, decisions=decisions, ends=ends)

    def encode(self, actions: BehaviorActions) -> bytes:
        """Returns a ListAgentActionProto for the decisions of the last report.

        Raises:
            LocalProtocolError: the actions do not match the decisions row by row.
        """
        agents = actions.agents  # usually the same array as in the report
        if agents is not self.waiting and not np.array_equal(agents, self.waiting):
            raise LocalProtocolError(
                "actions",
                got=f"actions of {self.id} for agents {actions.agents[:8]}",
                expected=f"one for each of {self.waiting[:8]}, in that order",
                remedy="answer the decisions of the last report, row by row",
            )
        return self._writer.write(actions.continuous, actions.discrete)

    def _rows(self, infos: Sequence[Proto]) -> _MessageRows:
        agents = np.array([info.id for info in infos], np.int64)
        shared = [info.group_reward for info in infos]
        return _MessageRows(
            infos=infos,
            agents=agents,
            observations=self._observations(infos, agents),
            rewards=self._rewards("reward", [info.reward for info in infos], agents),
            group_rewards=self._rewards("group reward", shared, agents) if any(shared) else None,
        )

    def _observations(self, infos: Sequence[Proto], agents: Ids) -> list[Array]:
        seen = [info.observations[:] for info in infos]  # a slice is a list, and twice as fast as iteration
        for row, of_one in enumerate(seen):
            if len(of_one) != len(self._sensors):
                got = f"{len(of_one)} observations of agent {agents[row]} of {self.id}"
                raise UnreadableData(f"{got}, where the first agent had {len(self._sensors)}", _SAME_SENSORS)
        return [
            sensor.read(column, agents) for sensor, column in zip(self._sensors, zip(*seen, strict=True), strict=True)
        ]

    def _rewards(self, what: str, values: list[float], agents: Ids) -> Floats:
        if not math.isfinite(sum(values)):
            wrong = ~np.isfinite(values)
            got = f"NaN or infinity as {what} of agent {agents[wrong][0]} of {self.id}"
            raise UnreadableData(got, _NOT_FINITE)
        return np.array(values, np.float32)

    def _ends(self, rows: _MessageRows, over: NDArray[np.intp]) -> Ends | None:
        """Returns the ends but those of agents that have not decided since their last end."""
        kept = over[self._deciding.end(rows.agents[over])]
        if not kept.size:
            return None
        return Ends(
            agents=rows.agents[kept],
            observations=tuple(column[kept] for column in rows.observations),
            rewards=rows.rewards[kept],
            interrupted=np.array([rows.infos[row].max_step_reached for row in kept.tolist()], np.bool_),
            group_rewards=_unless_zero(rows.group_rewards, kept),
        )

    def _decisions(self, rows: _MessageRows, at: Places) -> Decisions | None:
        self.waiting = rows.agents[at]
        if not self.waiting.size:
            return None
        twice = self._deciding.decide(self.waiting)
        if twice is not None:
            raise UnreadableData(f"agent {twice} of {self.id} twice among those that want a decision", _ONCE)
        groups = [info.group_id for info in rows.infos]
        return Decisions(
            agents=self.waiting,
            observations=tuple(column[at] for column in rows.observations),
            rewards=rows.rewards[at],
            groups=_unless_zero(np.array(groups, np.int64), at) if any(groups) else None,
            group_rewards=_unless_zero(rows.group_rewards, at),
            masks=self._masks([info.action_mask for info in rows.infos], at),
        )

    def _masks(self, masks: list[bytes], at: Places) -> NDArray[np.bool_] | None:
        """Returns the masks [n, choices of all branches] of the rows; None if nothing is forbidden."""
        if not any(masks):
            return None
        wanted = masks if isinstance(at, slice) else [masks[row] for row in at.tolist()]
        size = self.spec.actions.mask_size
        if not set(map(len, wanted)) <= {0, size}:
            row = next(row for row, mask in enumerate(wanted) if len(mask) not in (0, size))
            got = f"a mask of {len(wanted[row])} choices of agent {self.waiting[row]} of {self.id}, which has {size}"
            raise UnreadableData(got, _MASKS)
        free = bytes(size)
        forbidden = np.frombuffer(b"".join([mask or free for mask in wanted]), np.uint8) != 0
        return forbidden.reshape(len(wanted), size) if forbidden.any() else None


class _DecidedAgents:
    """Tracks which agents have decided since their last end."""

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._last = b""  # bytes of the ids that decided last, all of them in `_ids`

    def end(self, ids: Ids) -> NDArray[np.bool_]:
        """Returns which ids end an episode that has a decision, [n]: of a repeated id, at most the first."""
        self._last = b""
        counted = np.zeros(len(ids), np.bool_)
        for row, agent in enumerate(ids.tolist()):
            counted[row] = agent in self._ids
            self._ids.discard(agent)
        return counted

    def decide(self, ids: Ids) -> int | None:
        """Notes that the agents decide; returns a repeated id, if there is one."""
        raw = ids.tobytes()
        if raw == self._last:  # the common message: the same agents as in the last one
            return None
        counts: Counter[int] = Counter(ids.tolist())
        if len(counts) < len(ids):
            return min(agent for agent, count in counts.items() if count > 1)
        self._ids.update(counts)
        self._last = raw
        return None


def _unless_zero(column: Array | None, at: Places) -> Array | None:
    """Returns the rows of a column; None if all are 0."""
    if column is None or not np.count_nonzero(rows := column[at]):
        return None
    return rows


class SensorColumn:
    """Reads one sensor as a column.

    Args:
        sensor: reader of one observation.
        first: an observation of the sensor.
        encoded: the bytes of `first`.
        behavior: behavior id, for errors.
    """

    def __init__(self, sensor: SensorReader, first: Proto, encoded: bytes, behavior: str) -> None:
        self.sensor = sensor
        self._behavior = behavior
        self._packed = first.compression_type == PNG
        self._size = 4 * math.prod(sensor.spec.shape)
        around = None if self._packed else _around(first, encoded, self._size)
        self._before, self._behind = around or (b"", b"")
        self._whole = len(self._before) + self._size + len(self._behind) if around else -1

    def read(self, encoded: Sequence[bytes], agents: NDArray[np.int64]) -> Array:
        """Returns the column [n, *shape] in the spec's dtype.

        Args:
            encoded: n observations.
            agents: [n] their agents' ids.

        Raises:
            UnreadableData: an observation is not of this sensor, does not fill its shape, or is not finite.
        """
        if self._packed:
            images = [self._one(image, one, agents[row]) for row, one in enumerate(encoded)]
            return np.ascontiguousarray(np.stack(images))
        data = self._columns(encoded)
        if data is None:
            data = b"".join([self._one(numbers, one, agents[row]) for row, one in enumerate(encoded)])
        values = shaped(self.sensor, data, len(encoded))
        if not math.isfinite(np.vdot(values, values)):  # the squares may have overflowed, so check again
            self._refuse_infinite(values, agents)
        return values

    def _columns(self, encoded: Sequence[bytes]) -> bytes | None:
        """Returns the numbers of all agents if each observation has the layout of the first."""
        n, whole, start = len(encoded), self._whole, len(self._before)
        if set(map(len, encoded)) != {whole}:
            return None
        rows = np.frombuffer(b"".join(encoded), np.uint8).reshape(n, whole)
        stop = start + self._size
        if rows[:, :start].tobytes() != self._before * n or rows[:, stop:].tobytes() != self._behind * n:
            return None
        return rows[:, start:stop].tobytes()

    def _one(self, read: Callable[[SensorReader, Proto], T], encoded: bytes, agent: int) -> T:
        try:
            return read(self.sensor, parsed("ObservationProto", encoded, f"observation {self.sensor.spec.name!r}"))
        except UnreadableData as error:
            raise _fit_for_games(error, f"agent {agent} of {self._behavior}", _SAME_SENSORS) from error

    def _refuse_infinite(self, values: NDArray[np.float32], agents: NDArray[np.int64]) -> None:
        wrong = ~np.isfinite(values.reshape(len(agents), -1)).all(axis=1)
        if wrong.any():
            where = f"agent {agents[wrong][0]} of {self._behavior}"
            raise UnreadableData(f"NaN or infinity in observation {self.sensor.spec.name!r} of {where}", _NOT_FINITE)


def _around(one: Proto, encoded: bytes, size: int) -> tuple[bytes, bytes] | None:
    """Returns the bytes before and after the numbers if protobuf writes the message as it was received."""
    if len(one.float_data.data) != size or one.SerializeToString() != encoded:
        return None
    other = type(one)()
    other.CopyFrom(one)
    written = []
    for filler in (b"\0", b"\xff"):
        other.float_data.data = filler * size
        written.append(other.SerializeToString())
    zeros, ones = written
    start = next(at for at, (zero, one_bits) in enumerate(zip(zeros, ones, strict=True)) if zero != one_bits)
    return zeros[:start], zeros[start + size :]


def _fit_for_games(error: UnreadableData, where: str, remedy: str) -> UnreadableData:
    """Returns the error with its place, and a remedy for the game's author."""
    return UnreadableData(f"{error} of {where}", remedy if error.remedy == RECORD_AGAIN else error.remedy)
