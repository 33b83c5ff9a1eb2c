"""The simulator conversation without I/O: who may say what, and when.

The whole protocol is `TRANSITIONS`; the diagram in `docs/protocol.md` is made from it.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from sparring.pipeline.errors import LocalProtocolError, RemoteProtocolError
from sparring.pipeline.messages.schema import tag_of

Role = Literal["simulator", "trainer"]
State = Literal["greeting", "introduced", "welcomed", "simulating", "deciding", "adopted", "parting", "closed"]

TRANSITIONS: Final[dict[tuple[State, Role, str], State]] = {
    ("greeting", "simulator", "hello"): "introduced",
    ("introduced", "trainer", "welcome"): "welcomed",
    ("introduced", "trainer", "adopted"): "adopted",
    ("adopted", "trainer", "progress"): "adopted",
    ("welcomed", "trainer", "reset"): "simulating",
    ("simulating", "simulator", "behaviors"): "simulating",
    ("simulating", "simulator", "step"): "deciding",
    ("deciding", "trainer", "act"): "simulating",
    ("deciding", "trainer", "reset"): "simulating",
}
"""(state, who speaks, message type) -> next state. `simulating` waits for the simulator, `deciding`
for the trainer; in `adopted` the trainer speaks with the simulator's player. Ping and Pong change nothing
and are allowed from `introduced` on. Fault, and Bye from the simulator, close the conversation from
anywhere. Bye from the trainer leads to `parting`: what the simulator had sent before it heard of that still
counts, and its own Bye follows."""

STATES: Final[tuple[State, ...]] = (
    "greeting",
    "introduced",
    "welcomed",
    "simulating",
    "deciding",
    "adopted",
    "parting",
    "closed",
)


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
    if tag == "fault" or (tag == "bye" and speaker == "simulator"):
        return "closed"
    if state == "parting":  # the simulator may have spoken before it heard the trainer's Bye
        return state if speaker == "simulator" and tag in _CROSSING else None
    if tag == "bye":
        return "parting"
    if tag in ("ping", "pong"):
        return None if state == "greeting" else state
    return TRANSITIONS.get((state, speaker, tag))


_CROSSING: Final = ("hello", "behaviors", "step", "ping", "pong")


def allowed(state: State, speaker: Role) -> list[str]:
    """What `speaker` may say in `state`, sorted."""
    tags = (
        "hello",
        "welcome",
        "adopted",
        "progress",
        "behaviors",
        "reset",
        "step",
        "act",
        "ping",
        "pong",
        "bye",
        "fault",
    )
    return sorted(tag for tag in tags if next_state(state, speaker, tag) is not None)


def diagram() -> str:
    """The table as a Mermaid state diagram, for `docs/protocol.md`."""
    lines = ["stateDiagram-v2", "    [*] --> greeting"]
    lines += [f"    {state} --> {after}: {role} {tag}" for (state, role, tag), after in TRANSITIONS.items()]
    open_states = [state for state in STATES if state not in ("parting", "closed")]
    lines += [f"    {state} --> parting: trainer bye" for state in open_states]
    lines += [f"    {state} --> closed: simulator bye, or fault" for state in (*open_states, "parting")]
    lines.append("    parting --> parting: what the simulator sent before it heard the bye")
    return "\n".join([*lines, "    closed --> [*]"])
