"""Simulators wait until everything that their agents need to act is present; this module names what is missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sparring.pipeline.stepping.acting import Policy
from sparring.pipeline.stepping.agents import Behavior
from sparring.pipeline.stepping.connections import Frame, SimulatorConnection
from sparring.pipeline.stepping.matches import Matches
from sparring.pipeline.stepping.parameters import RunParameters

FRAMES: Final = "frames"
"""Connected simulators have not sent theirs."""
SIMULATOR: Final = "a simulator"
"""No connected simulator has the behavior."""
WEIGHTS: Final = "weights"
ALLOWANCES: Final = "allowances"
ASSIGNMENT: Final = "the assignment"
"""Matchups or lessons that the step allowance requires."""

_NAMED: Final = 4


class Reason(NamedTuple):
    """A Reason names what is missing.

    Attributes:
        what: one of the constants above.
        behavior: name.
        who: for readers, simulators that must send a frame; "" where simulators are not the cause.
    """

    what: str
    behavior: str
    who: str = ""


@dataclass
class Requirements:
    """Requirements decide which simulators may be answered.

    Attributes:
        connections: all simulators, by key.
        behaviors: all, by name.
        policies: those with known weights, by behavior name.
        matches: of self-play.
        parameters: environment parameters.
        lockstep: all simulators act in one round.
        expected: number of simulators that the first round waits for, in lockstep.
        added: behaviors whose learners were added during the run; without weights their simulators wait.
        deterministic: no simulator has left a lockstep run.
    """

    connections: Mapping[int, SimulatorConnection]
    behaviors: Mapping[str, Behavior]
    policies: Mapping[str, Policy]
    matches: Matches
    parameters: RunParameters
    lockstep: bool
    expected: int
    added: frozenset[str] = frozenset()
    deterministic: bool = field(init=False)

    def __post_init__(self) -> None:
        self.deterministic = self.lockstep

    @property
    def without_weights(self) -> frozenset[str]:
        """Returns the added behaviors whose learners have published no weights so far."""
        return self.added - self.policies.keys()

    def is_covered(self, connection: SimulatorConnection) -> bool:
        """Returns whether all behaviors of a simulator have learners, and the assignment says who plays in it."""
        return not self._behavior_without_weights(connection) and self.matches.covers(connection)

    @property
    def round_is_complete(self) -> bool:
        """Returns whether every expected simulator has sent its frame; without lockstep no tick waits for others."""
        if not self.lockstep:
            return True
        present = self._present()
        enough = len(present) >= self.expected or not self.deterministic
        return bool(present) and enough and all(c.frame is not None and self.is_covered(c) for c in present)

    def missing_for(self, connection: SimulatorConnection, frame: Frame) -> Reason | None:
        """Returns what a simulator still needs: weights, and allowances for all agents that would act; else None."""
        for arrival in frame.waiting:
            name, behavior = arrival.name, arrival.simulator_behavior.behavior
            policy, allowance = self.policies.get(name), behavior.allowance
            if self.matches.serial < allowance.assignment or self.parameters.serial < allowance.lessons:
                return Reason(ASSIGNMENT, name)
            if not arrival.learning:
                continue
            if policy is None or policy.version < allowance.version:
                return Reason(WEIGHTS, name)
            if behavior.remaining <= 0:
                return Reason(ALLOWANCES, name)
        for name, count in connection.pending.items():
            if count and self.behaviors[name].remaining <= 0:
                return Reason(ALLOWANCES, name)
        if not self.lockstep:
            return None
        allowed = (one for one in self.behaviors.values() if one.allowance.serial)
        return next((Reason(ALLOWANCES, one.name) for one in allowed if one.remaining <= 0), None)

    def waits_for(self, behavior: str) -> Reason | None:
        """Returns what the simulators of a behavior wait for; None where a frame waits for the next tick only."""
        present = self._present()
        hosts = [connection for connection in present if behavior in connection.pending]
        frames = [(connection, connection.frame) for connection in hosts if connection.frame is not None]
        for connection, _ in frames:
            if not self.is_covered(connection):
                name = self._behavior_without_weights(connection)
                return Reason(WEIGHTS, name) if name else Reason(ASSIGNMENT, next(iter(connection.pending)))
        if not frames or not self.round_is_complete:
            expected = present if self.lockstep else hosts  # in lockstep the last simulator delays all
            return _missing_frames(behavior, [one.number for one in expected if one.frame is None])
        reasons = (self.missing_for(connection, frame) for connection, frame in frames)
        return next((reason for reason in reasons if reason is not None), None)

    def _present(self) -> list[SimulatorConnection]:
        return [connection for connection in self.connections.values() if not connection.is_closed]

    def _behavior_without_weights(self, connection: SimulatorConnection) -> str:
        """Returns an added behavior of a simulator that has no weights yet; "" for none."""
        missing = self.without_weights
        return next((name for name in connection.pending if name in missing), "") if missing else ""


def _missing_frames(behavior: str, missing: Sequence[int]) -> Reason:
    """Names the simulators whose frames have not arrived; where there are none, no simulator has the behavior."""
    if not missing:
        return Reason(SIMULATOR, behavior)
    shown = ", ".join(
        str(number) if number < 2**20 else "that connected by itself" for number in sorted(missing)[:_NAMED]
    )
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return Reason(FRAMES, behavior, f"simulator{'s' if len(missing) > 1 else ''} {shown}{more}")
