"""Why the simulators of a behavior get no actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from sparring.pipeline.stepping.connections import Frame, SimulatorConnection

FRAMES: Final = "frames"
"""They owe theirs."""
SIMULATOR: Final = "a simulator"
"""None has it."""
WEIGHTS: Final = "weights"
ALLOWANCES: Final = "allowances"
ASSIGNMENT: Final = "the assignment"
"""Who plays whom, or which lessons, the permit goes with."""

_NAMED: Final = 4


class Reason(NamedTuple):
    """What is missing.

    Attributes:
        what: one of the words above.
        behavior: whose.
        who: numbers of the simulators that owe it, for readers; "" where it is not theirs.
    """

    what: str
    behavior: str
    who: str = ""


class Waiting(Protocol):
    """What is asked of a stepper."""

    connections: dict[int, SimulatorConnection]

    @property
    def round_complete(self) -> bool:
        """Whether every simulator that is expected has sent its frame."""

    def backpressured_for(self, connection: SimulatorConnection, frame: Frame) -> Reason | None:
        """What is missing before a simulator may be answered."""

    def covered(self, connection: SimulatorConnection) -> bool:
        """Whether there are learners for all of a simulator, and the assignment says who plays in it."""

    def lacks(self, connection: SimulatorConnection) -> str:
        """An added behavior of a simulator that has no weights yet; "" for none."""


def waits_for(stepper: Waiting, behavior: str, *, lockstep: bool) -> Reason | None:
    """What keeps the simulators of a behavior; None where a frame waits for the next tick only.

    Args:
        stepper: that acts for them.
        behavior: name.
        lockstep: all simulators act in one round, so the last one keeps all.
    """
    living = [connection for connection in stepper.connections.values() if not connection.gone]
    hosts = [connection for connection in living if behavior in connection.pending]
    owing = [connection.number for connection in (living if lockstep else hosts) if connection.frame is None]
    frames = [(connection, connection.frame) for connection in hosts if connection.frame is not None]
    if uncovered := [connection for connection, _ in frames if not stepper.covered(connection)]:
        lacking = stepper.lacks(uncovered[0])
        return Reason(WEIGHTS, lacking) if lacking else Reason(ASSIGNMENT, next(iter(uncovered[0].pending)))
    if not frames or (lockstep and not stepper.round_complete):
        return _from_outside(behavior, owing)
    reasons = (stepper.backpressured_for(connection, frame) for connection, frame in frames)
    return next((reason for reason in reasons if reason is not None), None)


def _from_outside(behavior: str, owing: Sequence[int]) -> Reason:
    """Frames are missing, of the simulators with the numbers `owing`; or simulators are."""
    if not owing:
        return Reason(SIMULATOR, behavior, "outside")
    shown = ", ".join(str(number) if number < 2**20 else "that dialled in" for number in sorted(owing)[:_NAMED])
    more = f" and {len(owing) - _NAMED} more" if len(owing) > _NAMED else ""
    return Reason(FRAMES, behavior, f"simulator{'s' if len(owing) > 1 else ''} {shown}{more}")
