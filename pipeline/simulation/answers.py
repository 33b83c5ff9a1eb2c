"""Checks the trainer's answers: an `Act` that does not fit the decisions would move the wrong agents."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import (
    VERSION,
    Act,
    Adopted,
    BehaviorActions,
    BehaviorReport,
    Decisions,
    Hello,
    Reset,
    Welcome,
)
from sparring.pipeline.specs import ActionSpec, BehaviorId

SHORTEST_S: Final = 0.001
"""Shortest heartbeat; a shorter one would leave no time for anything else."""
Actions = Mapping[str, BehaviorActions]
"""Actions by behavior id, one entry for each behavior that had decisions."""


def check_welcome(welcome: Welcome | Adopted) -> None:
    """Checks the trainer's version and heartbeat.

    Raises:
        RemoteProtocolError: the version is another one, or the heartbeat is too short.
    """
    if welcome.version != VERSION:
        raise RemoteProtocolError(
            "version",
            got=f"protocol version {welcome.version}",
            expected=f"version {VERSION}",
            remedy="install the same version of sparring on both machines",
        )
    if min(welcome.heartbeat_s, welcome.timeout_s) < SHORTEST_S:
        raise RemoteProtocolError(
            "internal",
            got=f"heartbeat_s {welcome.heartbeat_s:g} and timeout_s {welcome.timeout_s:g}",
            expected=f"both at least {SHORTEST_S:g}",
            remedy="correct the trainer's times",
        )


def check_samplers(message: Act | Reset) -> None:
    """Checks that each sampler can be sampled and that its parameter has a number too.

    Raises:
        RemoteProtocolError: a sampler fails the check.
    """
    for name, sampler in message.samplers.items():
        n = len(sampler.values)
        if name not in message.parameters or n == 0 or n % 2 or (n > 2 and sampler.kind != "multirangeuniform"):
            numbers = sorted(message.parameters)[:10]
            raise RemoteProtocolError(
                "malformed",
                got=f"a {sampler.kind} sampler of {n} values for {name!r}, parameters {numbers}",
                expected="two values, of multirangeuniform two for each range; and a number among the parameters",
                remedy="see samplers in docs/protocol.md",
            )


def actions_of(act: Act, sequence: int, reports: Sequence[BehaviorReport], hello: Hello) -> Actions:
    """Returns the entries of `act` by behavior id.

    Args:
        act: the trainer's answer.
        sequence: number of the step that `act` must answer.
        reports: reports of that step.
        hello: the simulator's introduction to the trainer.

    Raises:
        RemoteProtocolError: the actions do not fit the decisions row by row.
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
        offered = len(hello.scripts.get(BehaviorId.parse(behavior).name, ()))
        _check(behavior, actions.get(behavior), wanted, hello.behaviors[behavior].actions, offered)
    return actions


def _check(behavior: str, entry: BehaviorActions | None, wanted: Decisions, spec: ActionSpec, offered: int) -> None:
    rows = wanted.agents.size
    if entry is None and not rows:
        return
    shapes = (rows, spec.continuous), (rows, len(spec.discrete))
    if (
        entry is None
        or entry.agents.tobytes() != wanted.agents.tobytes()
        or (entry.continuous.shape, entry.discrete.shape) != shapes
    ):
        got = "no actions" if entry is None else f"actions {entry.continuous.shape} and {entry.discrete.shape}"
        raise RemoteProtocolError(
            "shape",
            got=f"{got} for {behavior}",
            expected=f"the agents of the step in its order, {shapes[0]} and {shapes[1]}",
            remedy="answer each decision with one row of actions",
        )
    asked = entry.scripts
    if asked is not None and (asked.shape != (rows,) or np.any((asked < 0) | (asked > offered))):
        raise RemoteProtocolError(
            "scripts",
            got=f"scripts {asked.tolist()[:10]} for {rows} decisions of {behavior}",
            expected=f"one of 0 to {offered} for each, as many as Hello names",
            remedy="ask for a script that the simulator offers",
        )
