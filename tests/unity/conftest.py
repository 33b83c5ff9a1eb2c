"""A conversation that has been begun."""

from __future__ import annotations

from collections.abc import Callable

import player_writer as writer
import pytest

from pipeline.unity.conversation import Conversation


@pytest.fixture
def begun() -> Callable[[], Conversation]:
    """Makes one that waits for the first agents."""

    def begin() -> Conversation:
        conversation = Conversation()
        conversation.hear(writer.introduction())
        conversation.initialise(seed=1, package="1.0")
        conversation.hear(writer.READY)
        conversation.reset()
        return conversation

    return begin
