"""Bytes of the player stand-in equal messages that are built from their real types."""

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
            "interrupted": st.booleans(),
            "mask": st.tuples(*[st.booleans()] * 3),
            "observed": st.tuples(*[st.floats(width=32, allow_nan=False)] * 2),
            "group": st.integers(0, 300),
            "shared": st.sampled_from([0.0, 1.5]),
        }
    ),
    max_size=6,
)


@given(rows=ROWS)
def test_any_agents_are_written_completely(rows: list[dict[str, Any]]) -> None:
    """The types read what was written, ends first, and the bytes are canonical."""
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
    assert [tuple(agent.observations[0].float_data.data) for agent in agents] == [row["observed"] for row in ordered]
    assert [list(agent.action_mask) for agent in agents] == [
        list(row["mask"]) if any(row["mask"]) else [] for row in ordered
    ]
    assert [agent.max_step_reached for agent in agents] == [row["done"] and row["interrupted"] for row in ordered]
    assert message.unity_output.HasField("rl_initialization_output") == bool(rows)


def entries(rows: list[dict[str, Any]], over: bool) -> Entries | None:
    """Returns the entries of agents that end, or of those that decide."""
    chosen = [row for row in rows if row["done"] == over]
    if not chosen:
        return None
    column = {name: np.array([row[name] for row in chosen]) for name in chosen[0]}
    return Entries(
        ids=column["id"],
        observations=(column["observed"].astype(np.float32),),
        rewards=column["reward"],
        interrupted=column["interrupted"] if over else None,
        masks=column["mask"],
        groups=column["group"],
        group_rewards=column["shared"],
    )


@given(values=st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_lists_of_numbers_are_read_back(values: list[int]) -> None:
    """Numbers may have any sign and size, and bytes equal those of the types."""
    assert unpacked(packed(tuple(values))) == values
    action = AgentAction(discrete_actions=values)
    assert action.SerializeToString() == (chunk(7, packed(tuple(values))) if values else b"")


@pytest.mark.parametrize("protocol", ["1.5.0", "1.3.0", "1.0.0"])
@pytest.mark.parametrize("game", GAMES)
def test_every_message_equals_that_of_the_types(game: str, protocol: str, tmp_path: Path) -> None:
    """It has no unknown field, and the types write the same bytes, in canonical order without defaults."""
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
    """Returns all agents of a behavior, for games whose episodes end in that time with zero actions."""
    if game not in ("soccer", "match3", "basic", "zoo"):
        return []
    joined = Message().unity_output.rl_output.agentInfos
    for infos in trainer.outputs:
        for key, agents in infos.items():
            if key != "Late?team=0":
                joined[key].MergeFrom(agents)
    return list(joined.values())
