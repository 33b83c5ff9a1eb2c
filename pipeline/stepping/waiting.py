"""Simulators wait until everything that their agents need to act is present; this module names what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from sparring.pipeline.stepping.acting import Policy
from sparring.pipeline.stepping.behaviors import Behavior
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


class Requirements:
    """Requirements decide which simulators may be answered.

    Args:
        behaviors: by name; may get more.
        policies: those with known weights, by behavior name.
        matches: of self-play.
        parameters: environment parameters.
        lockstep: all simulators act in one round.
        expected: number of simulators that the first round waits for, in lockstep.

    Attributes:
        added: behaviors whose learners were added during the run; without weights their simulators wait.
        deterministic: no simulator has left a lockstep run.
    """

    def __init__(
        self,
        behaviors: Mapping[str, Behavior],
        policies: Mapping[str, Policy],
        matches: Matches,
        parameters: RunParameters,
        *,
        lockstep: bool,
        expected: int,
    ) -> None:
        self.added: frozenset[str] = frozenset()
        self.deterministic = lockstep
        self.lockstep = lockstep
        self._behaviors = behaviors
        self._policies = policies
        self._matches = matches
        self._parameters = parameters
        self._expected = expected

    def is_covered(self, connection: SimulatorConnection) -> bool:
        """Returns whether all behaviors of a simulator have learners, and the assignment says who plays in it."""
        return not self.behavior_without_weights(connection) and self._matches.covers(connection)

    def behavior_without_weights(self, connection: SimulatorConnection) -> str:
        """Returns an added behavior of a simulator that has no weights yet; "" for none."""
        missing = self.added - self._policies.keys()
        return next((name for name in connection.pending if name in missing), "") if missing else ""

    def round_is_complete(self, connections: Mapping[int, SimulatorConnection]) -> bool:
        """Returns whether every expected simulator has sent its frame (lockstep)."""
        present = [c for c in connections.values() if not c.is_closed]
        enough = len(present) >= self._expected or not self.deterministic
        return bool(present) and enough and all(c.frame is not None and self.is_covered(c) for c in present)

    def missing_for(self, connection: SimulatorConnection, frame: Frame) -> Reason | None:
        """Returns what a simulator still needs: weights, and allowances for all agents that would act; else None."""
        for arrival in frame.waiting:
            name = arrival.simulator_behavior.id.name
            behavior, policy = self._behaviors[name], self._policies.get(name)
            allowance = behavior.allowance
            if self._matches.serial < allowance.assignment or self._parameters.serial < allowance.lessons:
                return Reason(ASSIGNMENT, name)
            if not arrival.learning:
                continue
            if policy is None or policy.version < allowance.version:
                return Reason(WEIGHTS, name)
            if behavior.remaining <= 0:
                return Reason(ALLOWANCES, name)
        for name, count in connection.pending.items():
            if count and self._behaviors[name].remaining <= 0:
                return Reason(ALLOWANCES, name)
        if self.lockstep:
            return next((Reason(ALLOWANCES, name) for name, one in self._behaviors.items() if one.is_exhausted), None)
        return None


def sort_by_arrival(connections: Mapping[int, SimulatorConnection], *, lockstep: bool) -> list[int]:
    """Returns the keys of connections with a frame: by number in lockstep, else the longest waiting first."""
    order = [
        (0.0 if lockstep else connection.frame.received_at, connection.number, key)
        for key, connection in connections.items()
        if connection.frame is not None
    ]
    return [key for _, _, key in sorted(order)]


def waits_for(
    requirements: Requirements, connections: Mapping[int, SimulatorConnection], behavior: str
) -> Reason | None:
    """Returns what the simulators of a behavior wait for; None where a frame waits for the next tick only.

    Args:
        requirements: of the stepper.
        connections: all simulators, by key.
        behavior: name.
    """
    present = [connection for connection in connections.values() if not connection.is_closed]
    hosts = [connection for connection in present if behavior in connection.pending]
    expected = present if requirements.lockstep else hosts  # in lockstep the last simulator delays all
    missing = [connection.number for connection in expected if connection.frame is None]
    frames = [(connection, connection.frame) for connection in hosts if connection.frame is not None]
    if uncovered := [connection for connection, _ in frames if not requirements.is_covered(connection)]:
        name = requirements.behavior_without_weights(uncovered[0])
        return Reason(WEIGHTS, name) if name else Reason(ASSIGNMENT, next(iter(uncovered[0].pending)))
    if not frames or (requirements.lockstep and not requirements.round_is_complete(connections)):
        return _missing_frames(behavior, missing)
    reasons = (requirements.missing_for(connection, frame) for connection, frame in frames)
    return next((reason for reason in reasons if reason is not None), None)


def _missing_frames(behavior: str, missing: Sequence[int]) -> Reason:
    """Names the simulators whose frames have not arrived; where there are none, no simulator has the behavior."""
    if not missing:
        return Reason(SIMULATOR, behavior, "outside")
    shown = ", ".join(
        str(number) if number < 2**20 else "that connected by itself" for number in sorted(missing)[:_NAMED]
    )
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return Reason(FRAMES, behavior, f"simulator{'s' if len(missing) > 1 else ''} {shown}{more}")
