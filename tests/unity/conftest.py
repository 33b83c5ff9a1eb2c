"""Fixture of a conversation that has begun."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import tests.unity.player_writer as writer
from sparring.pipeline.bridges.unity.conversation import PlayerConversation


@pytest.fixture
def begun() -> Callable[[], PlayerConversation]:
    """Returns a function that makes a conversation which waits for the first agents."""

    def begin() -> PlayerConversation:
        conversation = PlayerConversation()
        conversation.receive(writer.introduction())
        conversation.initialize(seed=1)
        conversation.receive(writer.READY)
        conversation.reset()
        return conversation

    return begin
