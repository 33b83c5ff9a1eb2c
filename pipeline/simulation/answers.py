"""What the trainer may answer: checked here, for an act that does not fit would move the wrong agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.errors import RemoteProtocolError
from pipeline.messages.simulator import VERSION, Act, BehaviorActions, BehaviorReport, Decisions, Welcome
from pipeline.specs import ActionSpec, BehaviorSpec

Actions = Mapping[str, BehaviorActions]
"""Actions by behavior id: one entry per behavior that had decisions."""


def check_welcome(welcome: Welcome) -> None:
    """Refuses a trainer of another version, or without a heartbeat.

    Raises:
        RemoteProtocolError: as above.
    """
    if welcome.version != VERSION:
        raise RemoteProtocolError(
            "version",
            got=f"protocol version {welcome.version}",
            expected=f"version {VERSION}",
            remedy="install the same version of sparring on both machines",
        )
    if welcome.heartbeat_s <= 0 or welcome.timeout_s <= 0:
        raise RemoteProtocolError(
            "internal",
            got=f"heartbeat_s {welcome.heartbeat_s:g} and timeout_s {welcome.timeout_s:g}",
            expected="both above 0",
            remedy="correct the trainer's times",
        )


def actions_of(
    act: Act, sequence: int, reports: Sequence[BehaviorReport], behaviors: Mapping[str, BehaviorSpec]
) -> Actions:
    """The entries of `act` by behavior id.

    Args:
        act: the trainer's answer.
        sequence: of the step that it must answer.
        reports: of that step.
        behaviors: spec of each behavior id.

    Raises:
        RemoteProtocolError: it does not fit the decisions row by row.
    """
    actions = {entry.behavior: entry for entry in act.actions}
    asked = {report.behavior: report.decisions for report in reports if report.decisions is not None}
    if act.sequence != sequence or actions.keys() - asked.keys():
        raise RemoteProtocolError(
            "sequence",
            got=f"act {act.sequence} for {sorted(actions)}",
            expected=f"act {sequence} for {sorted(asked)}",
            remedy="answer the last step, and each behavior with decisions once",
        )
    for behavior, wanted in asked.items():
        _check(behavior, actions.get(behavior), wanted, behaviors[behavior].actions)
    return actions


def _check(behavior: str, entry: BehaviorActions | None, wanted: Decisions, spec: ActionSpec) -> None:
    rows = wanted.agents.size
    if entry is None:
        if not rows:
            return
    elif (
        entry.agents.tobytes() == wanted.agents.tobytes()
        and entry.continuous.shape == (rows, spec.continuous)
        and entry.discrete.shape == (rows, len(spec.discrete))
    ):
        return
    got = "no actions" if entry is None else f"actions {entry.continuous.shape} and {entry.discrete.shape}"
    raise RemoteProtocolError(
        "shape",
        got=f"{got} for {behavior}",
        expected=f"the agents of the step in its order, {(rows, spec.continuous)} and {(rows, len(spec.discrete))}",
        remedy="answer each decision with one row of actions",
    )
