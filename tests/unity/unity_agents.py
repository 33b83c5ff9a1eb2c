"""A behavior of which agents came in a message."""

from __future__ import annotations

from typing import Any

import player_writer as writer

from pipeline.messages.simulator import BehaviorReport
from pipeline.unity.columns import Columns
from pipeline.unity.messages import messages, parsed

NAME = "B?team=0"


def infos(agents: list[bytes]) -> Any:
    """The agents as they stand in a message that was received."""
    message = parsed(messages().exchanged, writer.output({NAME: agents}), "a message")
    return message.unity_output.rl_output.agentInfos[0].value.value


def columns(agents: list[bytes], brain: bytes | None = None) -> Columns:
    brain = writer.brain(continuous=1) if brain is None else brain
    return Columns(NAME, parsed(messages().brain, brain, "a behavior"), infos(agents)[0])


def report(agents: list[bytes], brain: bytes | None = None) -> BehaviorReport:
    found = columns(agents, brain).report(infos(agents))
    assert found is not None
    return found
