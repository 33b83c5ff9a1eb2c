"""The simulator conversation without I/O: who may say what, and when.

The whole protocol is `TRANSITIONS`; the diagram in `docs/protocol.md` is made from it.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pipeline.errors import LocalProtocolError, RemoteProtocolError
from pipeline.messages.schema import tag_of

Role = Literal["simulator", "trainer"]
State = Literal["greeting", "introduced", "welcomed", "simulating", "deciding", "closed"]

TRANSITIONS: Final[dict[tuple[State, Role, str], State]] = {
    ("greeting", "simulator", "hello"): "introduced",
    ("introduced", "trainer", "welcome"): "welcomed",
    ("welcomed", "trainer", "reset"): "simulating",
    ("simulating", "simulator", "behaviors"): "simulating",
    ("simulating", "simulator", "step"): "deciding",
    ("deciding", "trainer", "act"): "simulating",
    ("deciding", "trainer", "reset"): "simulating",
}
"""(state, who speaks, message type) -> next state. `simulating` waits for the simulator, `deciding`
for the trainer. Ping and Pong change nothing and are allowed from `introduced` on; Bye and Fault
close the conversation from anywhere."""

STATES: Final[tuple[State, ...]] = ("greeting", "introduced", "welcomed", "simulating", "deciding", "closed")


class Conversation:
    """One side's view of a conversation.

    Args:
        role: which side this is.
    """

    def __init__(self, role: Role) -> None:
        self.role: Role = role
        self.peer: Role = "trainer" if role == "simulator" else "simulator"
        self.state: State = "greeting"

    def sending(self, message: Any) -> None:
        """Notes that this side says `message`.

        Raises:
            LocalProtocolError: the conversation does not allow it now.
        """
        self._advance(self.role, tag_of(message), LocalProtocolError)

    def received(self, message: Any) -> None:
        """Notes that the other side said `message`.

        Raises:
            RemoteProtocolError: the conversation does not allow it now.
        """
        self._advance(self.peer, tag_of(message), RemoteProtocolError)

    def _advance(self, speaker: Role, tag: str, error: type[LocalProtocolError] | type[RemoteProtocolError]) -> None:
        following = next_state(self.state, speaker, tag)
        if following is None:
            raise error(
                "unexpected_message",
                got=f"{tag!r} from the {speaker} in state {self.state!r}",
                expected=f"one of {allowed(self.state, speaker)}",
                remedy="follow the table in docs/protocol.md",
            )
        self.state = following


def next_state(state: State, speaker: Role, tag: str) -> State | None:
    """The state after `speaker` says `tag` in `state`, or None where that is not allowed."""
    if state == "closed":
        return None
    if tag in ("bye", "fault"):
        return "closed"
    if tag in ("ping", "pong"):
        return None if state == "greeting" else state
    return TRANSITIONS.get((state, speaker, tag))


def allowed(state: State, speaker: Role) -> list[str]:
    """What `speaker` may say in `state`, sorted."""
    tags = ("hello", "welcome", "behaviors", "reset", "step", "act", "ping", "pong", "bye", "fault")
    return sorted(tag for tag in tags if next_state(state, speaker, tag) is not None)


def diagram() -> str:
    """The table as a Mermaid state diagram, for `docs/protocol.md`."""
    lines = ["stateDiagram-v2", "    [*] --> greeting"]
    lines += [f"    {state} --> {after}: {role} {tag}" for (state, role, tag), after in TRANSITIONS.items()]
    lines += [f"    {state} --> closed: bye or fault" for state in STATES if state != "closed"]
    return "\n".join([*lines, "    closed --> [*]"])
