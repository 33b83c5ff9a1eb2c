"""A behavior and the agents of one of its messages."""

from __future__ import annotations

from typing import Any

import tests.unity.player_writer as writer
from sparring.pipeline.bridges.unity.columns import PlayerBehavior
from sparring.pipeline.bridges.unity.messages import parsed
from sparring.pipeline.messages.simulator import BehaviorReport

NAME = "B?team=0"


def infos(agents: list[bytes]) -> Any:
    """Returns the agents as a received message holds them."""
    message = parsed("UnityMessageProto", writer.output({NAME: agents}), "a message")
    return message.unity_output.rl_output.agentInfos[0].value.value


def columns(agents: list[bytes], brain: bytes | None = None) -> PlayerBehavior:
    brain = writer.brain(continuous=1) if brain is None else brain
    return PlayerBehavior(NAME, parsed("BrainParametersProto", brain, "a behavior"), infos(agents)[0])


def report(agents: list[bytes], brain: bytes | None = None) -> BehaviorReport:
    found = columns(agents, brain).report(infos(agents))
    assert found is not None
    return found
