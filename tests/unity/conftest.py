"""A conversation that has been begun."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import tests.unity.player_writer as writer
from sparring.pipeline.bridges.unity.conversation import PlayerConversation


@pytest.fixture
def begun() -> Callable[[], PlayerConversation]:
    """Makes one that waits for the first agents."""

    def begin() -> PlayerConversation:
        conversation = PlayerConversation()
        conversation.hear(writer.introduction())
        conversation.initialise(seed=1, package="1.0")
        conversation.hear(writer.READY)
        conversation.reset()
        return conversation

    return begin
