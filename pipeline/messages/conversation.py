"""The conversation with a simulator is a state machine without I/O.

`TRANSITIONS` holds the whole protocol; the diagram in `docs/protocol.md` is generated from it.
"""

from typing import Final, Literal, get_args

from sparring.pipeline.errors import LocalProtocolError, RemoteProtocolError
from sparring.pipeline.messages.schema import tag_of
from sparring.pipeline.messages.simulator import SimulatorMessage

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
"""Next state by present state, sender and message type.

`simulating` waits for the simulator, `deciding` for the trainer; in `adopted` the trainer speaks with the simulator's
player. Ping and Pong change nothing and are allowed from `introduced` on. A Fault, and a Bye from the simulator, close
the conversation in any state. A Bye from the trainer leads to `parting`: messages that the simulator sent before that
Bye arrived still count, and its own Bye follows."""

STATES: Final[tuple[State, ...]] = get_args(State)
_TAGS: Final = sorted({tag for *_, tag in TRANSITIONS} | {"ping", "pong", "bye", "fault"})
_CROSSING: Final = ("hello", "behaviors", "step", "ping", "pong")
"""Messages that the simulator may have sent before the trainer's Bye arrived."""


class Conversation:
    """A Conversation tracks the state as one side sees it.

    Args:
        role: this side.
    """

    def __init__(self, role: Role) -> None:
        self.role: Role = role
        self.peer: Role = "trainer" if role == "simulator" else "simulator"
        self.state: State = "greeting"

    def sending(self, message: SimulatorMessage) -> None:
        """Advances the state for a message that this side sends.

        Raises:
            LocalProtocolError: the present state does not allow the message.
        """
        self._advance(self.role, tag_of(message), LocalProtocolError)

    def received(self, message: SimulatorMessage) -> None:
        """Advances the state for a message that the other side sent.

        Raises:
            RemoteProtocolError: the present state does not allow the message.
        """
        self._advance(self.peer, tag_of(message), RemoteProtocolError)

    def _advance(self, sender: Role, tag: str, error: type[LocalProtocolError] | type[RemoteProtocolError]) -> None:
        following = next_state(self.state, sender, tag)
        if following is None:
            raise error(
                "unexpected_message",
                got=f"{tag!r} from the {sender} in state {self.state!r}",
                expected=f"one of {allowed(self.state, sender)}",
                remedy="follow the table in docs/protocol.md",
            )
        self.state = following


def next_state(state: State, sender: Role, tag: str) -> State | None:
    """Returns the state after `sender` sends `tag` in `state`; None where that is not allowed."""
    if state == "closed":
        return None
    if tag == "fault" or (tag == "bye" and sender == "simulator"):
        return "closed"
    if state == "parting":
        return state if sender == "simulator" and tag in _CROSSING else None
    if tag == "bye":
        return "parting"
    if tag in ("ping", "pong"):
        return None if state == "greeting" else state
    return TRANSITIONS.get((state, sender, tag))


def allowed(state: State, sender: Role) -> list[str]:
    """Returns the tags that `sender` may send in `state`, sorted."""
    return [tag for tag in _TAGS if next_state(state, sender, tag) is not None]


def diagram() -> str:
    """Renders the table as a Mermaid state diagram for `docs/protocol.md`."""
    lines = ["stateDiagram-v2", "    [*] --> greeting"]
    lines += [f"    {state} --> {after}: {role} {tag}" for (state, role, tag), after in TRANSITIONS.items()]
    open_states = [state for state in STATES if state not in ("parting", "closed")]
    lines += [f"    {state} --> parting: trainer bye" for state in open_states]
    lines += [f"    {state} --> closed: simulator bye, or fault" for state in (*open_states, "parting")]
    lines.append("    parting --> parting: what the simulator sent before the bye arrived")
    return "\n".join([*lines, "    closed --> [*]"])
