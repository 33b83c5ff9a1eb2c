"""Bytes of the stand-in of a Unity player against messages that are built from their real types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.unity_player import GAMES
from tests.simulation.unity_player_peer import AgentAction, Message, Trainer, against, unknown
from tests.simulation.unity_player_reports import Behavior, Entries, Report, Sensor
from tests.simulation.unity_player_schema import chunk, packed, unpacked
from tests.simulation.unity_player_wire import Dialect, Encoder

ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.integers(0, 2**31 - 1),
            "reward": st.sampled_from([0.0, -0.5, 2.0]),
            "done": st.booleans(),
            "cut": st.booleans(),
            "mask": st.tuples(*[st.booleans()] * 3),
            "seen": st.tuples(*[st.floats(width=32, allow_nan=False)] * 2),
            "group": st.integers(0, 300),
            "shared": st.sampled_from([0.0, 1.5]),
        }
    ),
    max_size=6,
)


@given(rows=ROWS)
def test_any_agents_are_what_they_were(rows: list[dict[str, Any]]) -> None:
    """Columns written, rows read: the types give back what was put in, ends first, and the bytes are canonical."""
    behavior = Behavior(key="B?team=1", sensors=(Sensor(name="S", shape=(2,)),), branches=(3,))
    ordered = sorted(rows, key=lambda row: not row["done"])
    report = Report(behavior=behavior, ends=entries(ordered, over=True), decisions=entries(ordered, over=False))
    data = Encoder(Dialect()).message([report])
    message = Message.FromString(data)
    assert message.SerializeToString() == data
    agents = message.unity_output.rl_output.agentInfos["B?team=1"].value
    assert [(a.id, a.reward, a.done, a.group_id, a.group_reward) for a in agents] == [
        (row["id"], row["reward"], row["done"], row["group"], row["shared"]) for row in ordered
    ]
    assert [tuple(agent.observations[0].float_data.data) for agent in agents] == [row["seen"] for row in ordered]
    assert [list(agent.action_mask) for agent in agents] == [
        list(row["mask"]) if any(row["mask"]) else [] for row in ordered
    ]
    assert [agent.max_step_reached for agent in agents] == [row["done"] and row["cut"] for row in ordered]
    assert message.unity_output.HasField("rl_initialization_output") == bool(rows)


def entries(rows: list[dict[str, Any]], over: bool) -> Entries | None:
    """Those that end, or those that decide."""
    chosen = [row for row in rows if row["done"] == over]
    if not chosen:
        return None
    column = {name: np.array([row[name] for row in chosen]) for name in chosen[0]}
    return Entries(
        ids=column["id"],
        observations=(column["seen"].astype(np.float32),),
        rewards=column["reward"],
        interrupted=column["cut"] if over else None,
        masks=column["mask"],
        groups=column["group"],
        group_rewards=column["shared"],
    )


@given(values=st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_lists_of_numbers_come_back(values: list[int]) -> None:
    """Of any sign and size, as the types write them too."""
    assert unpacked(packed(tuple(values))) == values
    action = AgentAction(discrete_actions=values)
    assert action.SerializeToString() == (chunk(7, packed(tuple(values))) if values else b"")


@pytest.mark.parametrize("protocol", ["1.5.0", "1.3.0", "1.0.0"])
@pytest.mark.parametrize("game", GAMES)
def test_every_message_is_what_the_types_say(game: str, protocol: str, tmp_path: Path) -> None:
    """No unknown field, and written again it is the same bytes: canonical order, defaults absent."""
    trainer = Trainer(steps=30)
    options = ("--game", game, "--areas", "2", "--protocol", protocol, "--statistics", "--max-steps", "7")
    assert against(trainer, tmp_path, *options).code == 0
    assert len(trainer.outputs) == 31
    for data, message in zip(trainer.calls, trainer.messages, strict=True):
        assert unknown(message) == 0
        assert len(data) == message.ByteSize()
        if len(message.unity_output.rl_output.agentInfos) < 2:  # the order of a map is free
            assert message.SerializeToString() == data
    assert all(any(agent.done for agent in agents.value) for agents in done_lists(trainer, game))


def done_lists(trainer: Trainer, game: str) -> list[Any]:
    """All lists of a behavior put together, for games whose episodes end in that time with zeros."""
    if game not in ("soccer", "match3", "basic", "zoo"):
        return []
    joined = Message().unity_output.rl_output.agentInfos
    for infos in trainer.outputs:
        for key, agents in infos.items():
            if key != "Late?team=0":
                joined[key].MergeFrom(agents)
    return list(joined.values())
