"""The agents of a behavior are read to exactly the columns that were sent."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.unity.player_writer as writer
from sparring.pipeline.bridges.unity.columns import PlayerBehavior
from sparring.pipeline.bridges.unity.messages import parsed
from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.simulator import BehaviorReport
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.unity.player_writer import CHW, HWC
from tests.unity.protobuf_writer import NONE, VARIABLE
from tests.unity.unity_agents import NAME, columns, infos, report

# ---------------------------------------------------------------- any population


@dataclass(kw_only=True)
class Row:
    """An agent of a message before it is written."""

    number: int
    done: bool
    interrupted: bool
    reward: float
    group: int
    group_reward: float
    mask: list[bool]
    observations: list[Any]


class Sensors:
    """Some sensors, with the values that an agent sends and those that we read."""

    def __init__(self, kinds: list[str], rng: np.random.Generator) -> None:
        self.kinds, self.rng = kinds, rng

    def sample(self) -> list[Any]:
        return [self._sample(kind) for kind in self.kinds]

    def _sample(self, kind: str) -> Any:
        if kind.startswith("png"):
            return self.rng.integers(0, 256, (int(kind[3:]), 3, 4), np.uint8)
        shape = {"vector": (3,), "goal": (2,), "entities": (4, 2), "first": (2, 3, 4), "last": (2, 3, 4)}[kind]
        return self.rng.normal(size=shape).astype(np.float32)

    def sent(self, values: list[Any]) -> list[bytes]:
        return [self._sent(at, kind, value) for at, (kind, value) in enumerate(zip(self.kinds, values, strict=True))]

    def _sent(self, at: int, kind: str, value: Any) -> bytes:
        name = f"{kind}_{at}"
        if kind.startswith("png"):
            return writer.packed(writer.as_pngs(value), value.shape, name=name)
        if kind == "last":
            return writer.floats(value.transpose(1, 2, 0), HWC, name=name)
        axes = {"vector": (NONE,), "goal": (NONE,), "entities": (VARIABLE, NONE), "first": CHW}[kind]
        return writer.floats(value, axes, name=name, goal=kind == "goal")

    def specs(self) -> tuple[ObservationSpec, ...]:
        return tuple(self._spec(f"{kind}_{at}", kind) for at, kind in enumerate(self.kinds))

    def _spec(self, name: str, kind: str) -> ObservationSpec:
        if kind.startswith("png"):
            return ObservationSpec(name=name, shape=(int(kind[3:]), 3, 4), dtype="uint8", kind="image")
        kinds: Any = {"first": "image", "last": "image"}
        return ObservationSpec(name=name, shape=self._sample(kind).shape, kind=kinds.get(kind, kind))


def check_rows(found: Any, rows: list[Row], sensors: Sensors) -> None:
    """Compares the columns that decisions and ends share."""
    if not rows:
        assert found is None
        return
    assert found.agents.dtype == np.int64
    assert found.agents.tolist() == [row.number for row in rows]
    assert found.rewards.dtype == np.float32
    assert found.rewards.tolist() == [row.reward for row in rows]
    for at, column in enumerate(found.observations):
        wanted = np.stack([row.observations[at] for row in rows])
        assert column.dtype == wanted.dtype
        np.testing.assert_array_equal(column, wanted)
    shared = [row.group_reward for row in rows]
    assert (found.group_rewards is None) == (not any(shared))
    if any(shared):
        assert found.group_rewards.dtype == np.float32
        assert found.group_rewards.tolist() == shared


def check_decisions(found: Any, rows: list[Row], sensors: Sensors, size: int) -> None:
    check_rows(found, rows, sensors)
    groups = [row.group for row in rows]
    masks = [row.mask or [False] * size for row in rows]
    if rows:
        assert (found.groups is None) == (not any(groups))
        assert found.groups is None or (found.groups.dtype, found.groups.tolist()) == (np.int64, groups)
        assert (found.masks is None) == (not any(map(any, masks)))
        assert found.masks is None or (found.masks.dtype, found.masks.tolist()) == (np.bool_, masks)


KINDS = st.sampled_from(["vector", "goal", "entities", "first", "last", "png2", "png3", "png4", "png6"])
ROW = st.fixed_dictionaries(
    {
        "number": st.integers(-3, 5) | st.sampled_from([2**31 - 1, -(2**31)]),
        "done": st.booleans(),
        "interrupted": st.booleans(),
        "reward": st.sampled_from([0.0, -1.5, 0.25, 2.0**127]),
        "group": st.sampled_from([0, 0, 7]),
        "group_reward": st.sampled_from([0.0, 0.0, 1.0]),
        "masked": st.sampled_from(["", "", "none", "some"]),
    }
)
MESSAGES = st.lists(st.lists(ROW, min_size=1, max_size=7), min_size=1, max_size=6)


def as_row(sampled: dict[str, Any], sensors: Sensors, size: int) -> Row:
    masked = sampled.pop("masked")
    mask = (sensors.rng.random(size) < 0.4 if masked == "some" else np.zeros(size, bool)).tolist() if masked else []
    return Row(**sampled, mask=mask, observations=sensors.sample())


def as_agent(row: Row, sensors: Sensors) -> bytes:
    return writer.agent(
        sensors.sent(row.observations),
        number=row.number,
        reward=row.reward,
        done=row.done,
        interrupted=row.interrupted,
        mask=row.mask,
        group=row.group,
        group_reward=row.group_reward,
    )


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(KINDS, min_size=1, max_size=3),
    branches=st.lists(st.integers(1, 4), max_size=3),
    sampled=MESSAGES,
    seed=st.integers(0, 2**32 - 1),
)
def test_any_agents_are_read_as_they_were_sent(
    kinds: list[str], branches: list[int], sampled: list[list[dict[str, Any]]], seed: int
) -> None:
    """Rows keep the order of the message; an end counts once, and only for an agent that decided since its last one."""
    sensors = Sensors(kinds, np.random.default_rng(seed))
    brain = writer.brain(NAME, 2, branches)
    made: PlayerBehavior | None = None
    deciding: set[int] = set()
    for message in sampled:
        rows = [as_row(dict(one), sensors, sum(branches)) for one in message]
        wanted = list({row.number: row for row in rows if not row.done}.values())  # each id once
        rows = [row for row in rows if row.done or any(row is one for one in wanted)]
        wanted = [row for row in rows if not row.done]
        agents = [as_agent(row, sensors) for row in rows]
        made = made or columns(agents, brain)
        found = made.report(infos(agents))
        ended = []
        for row in rows:
            if row.done and row.number in deciding:
                deciding.remove(row.number)
                ended.append(row)
        deciding |= {row.number for row in wanted}
        assert made.waiting.tolist() == [row.number for row in wanted]
        assert (found is None) == (not wanted and not ended)
        if found is not None:
            assert found.behavior == NAME
            check_decisions(found.decisions, wanted, sensors, sum(branches))
            check_rows(found.ends, ended, sensors)
            if ended:
                assert found.ends is not None
                assert found.ends.interrupted.tolist() == [row.interrupted for row in ended]
            decode(encode(found))  # the codec accepts every report
    assert made is not None
    assert made.spec == BehaviorSpec(
        observations=sensors.specs(), actions=ActionSpec(continuous=2, discrete=tuple(branches))
    )


# ---------------------------------------------------------------- one message by hand

FIXTURE = bytes.fromhex(
    "0a03"  # 1 header, 3 bytes:
    "08c801"  # . 1 status: 200
    "1266"  # 2 unity_output, 102 bytes:
    "0a64"  # . 1 rl_output, 100 bytes:
    "1262"  # . . 2 agentInfos, an entry of 98 bytes:
    "0a08423f7465616d3d30"  # . . . 1 key: "B?team=0"
    "1256"  # . . . 2 value, 86 bytes:
    "0a2d"  # . . . . 1 value, an agent of 45 bytes:
    "3d0000003f"  # . . . . . 7 reward: 0.5
    "5007"  # . . . . . 10 id: 7
    "5a03000100"  # . . . . . 11 action_mask: [false, true, false]
    "6a18"  # . . . . . 13 observations, one of 24 bytes:
    "0a0102"  # . . . . . . 1 shape: [2]
    "220a0a080000803f000000c0"  # . . . . . . 4 float_data: 1 data: [1.0, -2.0]
    "320101"  # . . . . . . 6 dimension_properties: [1]
    "420465796573"  # . . . . . . 8 name: "eyes"
    "7003"  # . . . . . 14 group_id: 3
    "7d00000040"  # . . . . . 15 group_reward: 2.0
    "0a25"  # . . . . 1 value, an agent of 37 bytes:
    "3d000080bf"  # . . . . . 7 reward: -1.0
    "4001"  # . . . . . 8 done: true
    "4801"  # . . . . . 9 max_step_reached: true
    "5007"  # . . . . . 10 id: 7
    "6a18"  # . . . . . 13 observations, one of 24 bytes:
    "0a0102"  # . . . . . . 1 shape: [2]
    "220a0a080000003f00004040"  # . . . . . . 4 float_data: 1 data: [0.5, 3.0]
    "320101"  # . . . . . . 6 dimension_properties: [1]
    "420465796573"  # . . . . . . 8 name: "eyes"
)


def test_a_message_assembled_by_hand_is_read_to_its_columns() -> None:
    """It has an end and a decision with the same id; the end counts only after a decision."""
    message = parsed("UnityMessageProto", FIXTURE, "a message")
    assert message.header.status == 200
    (entry,) = message.unity_output.rl_output.agentInfos
    assert entry.key == NAME
    made = PlayerBehavior(
        NAME, parsed("BrainParametersProto", writer.brain(branches=[3]), "a behavior"), entry.value.value[0]
    )
    eyes = ObservationSpec(name="eyes", shape=(2,))
    assert made.spec == BehaviorSpec(observations=(eyes,), actions=ActionSpec(discrete=(3,)))
    for ends in (0, 1):
        found = made.report(entry.value.value)
        assert plain(found) == {
            "behavior": NAME,
            "decisions": {
                "agents": [7],
                "observations": [[[1.0, -2.0]]],
                "rewards": [0.5],
                "groups": [3],
                "group_rewards": [2.0],
                "masks": [[False, True, False]],
            },
            "ends": {"agents": [7], "observations": [[[0.5, 3.0]]], "rewards": [-1.0], "interrupted": [True]}
            if ends
            else None,
        }


def plain(found: BehaviorReport | None) -> Any:
    """Returns a report as lists, without the columns that are None."""
    assert found is not None
    rows = {"decisions": found.decisions, "ends": found.ends}
    return {"behavior": found.behavior} | {what: one and _plain(one) for what, one in rows.items()}


def _plain(rows: Any) -> dict[str, Any]:
    columns = {one.name: getattr(rows, one.name) for one in dataclasses.fields(rows)}
    observations = [column.tolist() for column in columns.pop("observations")]
    return {"observations": observations} | {n: column.tolist() for n, column in columns.items() if column is not None}


# ---------------------------------------------------------------- observations


def test_other_valid_encodings_are_read_alike() -> None:
    """Fields may have another order than protobuf's, and defaults may be written."""
    straight = writer.vector([1.0, 2.0], name="eye")
    data = writer.block(4, writer.block(1, np.array([3.0, 4.0], "<f4").tobytes()))
    reordered = writer.text(8, "eye") + writer.integers(6, [NONE]) + data + writer.integers(1, [2])
    explicit = writer.vector([5.0, 6.0], name="eye") + bytes.fromhex("1000") + bytes.fromhex("3800")
    new = writer.vector([7.0, 8.0], name="eye") + writer.integer(15, 1)  # an unknown field
    encodings = [straight, reordered, explicit, new]
    wanted = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    for start in range(4):
        order = [*range(start, 4), *range(start)]
        agents = [writer.agent([encodings[at]], number=at) for at in order]
        found = report(agents)
        assert found.decisions is not None
        assert found.decisions.observations[0].tolist() == [wanted[at] for at in order]


def test_channels_first_and_last_are_the_same_image() -> None:
    """Packages before 3.0 and those without axes send height, width, channels; axes show the order."""
    images = np.random.default_rng(3).random((5, 2, 3, 4)).astype(np.float32)
    for axes, turned in ((CHW, images), (HWC, images.transpose(0, 2, 3, 1)), ((), images.transpose(0, 2, 3, 1))):
        found = report([writer.agent([writer.floats(one, axes)], number=at) for at, one in enumerate(turned)])
        assert found.decisions is not None
        (column,) = found.decisions.observations
        assert column.flags.c_contiguous
        np.testing.assert_array_equal(column, images)


def test_the_largest_finite_numbers_are_accepted() -> None:
    found = report([writer.agent([writer.vector([3e38, -3e38])], reward=3e38)])
    assert found.decisions is not None
    assert found.decisions.observations[0].tolist() == np.array([[3e38, -3e38]], np.float32).tolist()


# ---------------------------------------------------------------- agents that wait

SEEN = [writer.vector([1.0, 2.0], name="eye")]
GOOD = writer.agent(SEEN, number=4)


def test_a_message_without_agents_gives_no_report() -> None:
    made = columns([GOOD])
    assert made.report(infos([GOOD])) is not None
    assert made.report([]) is None
    assert made.waiting.tolist() == []


def test_after_a_restart_no_agent_has_decided() -> None:
    made = columns([GOOD])
    made.report(infos([GOOD]))
    made.restart()
    assert made.waiting.tolist() == []
    assert made.report(infos([writer.agent(SEEN, number=4, done=True)])) is None
