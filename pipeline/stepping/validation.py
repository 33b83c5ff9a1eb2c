"""Reports of a simulator are validated before any part of them is used.

Each violation becomes a `RemoteProtocolError` that names behavior, field and agent; it affects that simulator alone.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends
from sparring.pipeline.specs import Array, BehaviorSpec

MAX_GROUP: Final = 2**31 - 1
_DTYPES: Final = {"float32": np.dtype(np.float32), "uint8": np.dtype(np.uint8)}


def check_report(report: BehaviorReport, spec: BehaviorSpec) -> None:
    """Checks one report against its spec: lengths, shapes, dtypes, finite values, masks, groups.

    Raises:
        RemoteProtocolError: the report contradicts its spec. Whether the agents are known is not checked here.
    """
    if report.decisions is not None:
        _check_rows(report.behavior, "decisions", report.decisions, spec)
        _check_groups(report.behavior, report.decisions)
        _check_masks(report.behavior, report.decisions, spec)
    if report.ends is not None:
        _check_rows(report.behavior, "ends", report.ends, spec)
        _check_ends(report.behavior, report.ends)


def image_out_of_range(report: BehaviorReport, spec: BehaviorSpec) -> str:
    """Describes a float image of the decisions with values outside 0 (dark) to 1 (bright); returns "" for none.

    This is not an error: Unity's sensors of three axes need not be images. But bytes sent as floats are 255 times too
    bright.
    """
    if report.decisions is None:
        return ""
    for column, wanted in zip(report.decisions.observations, spec.observations, strict=True):
        is_image = wanted.kind == "image" and column.dtype == np.float32 and column.size
        if is_image and (column.min() < 0 or column.max() > 1):
            return f"values from {column.min():g} to {column.max():g} in image {wanted.name!r} of {report.behavior}"
    return ""


def check_unique(behavior: str, what: str, agents: NDArray[np.int64]) -> None:
    """Rejects an agent id that appears in two rows.

    Raises:
        RemoteProtocolError: an id appears twice.
    """
    ordered = np.sort(agents)  # np.unique alone takes five times as long
    if np.count_nonzero(ordered[1:] == ordered[:-1]):
        ids, counts = np.unique(agents, return_counts=True)
        raise RemoteProtocolError(
            "duplicate_agent",
            got=f"agent {ids[counts > 1][0]} in {counts.max()} rows of {what} of {behavior}",
            expected="each agent at most once",
            remedy="give every agent of a behavior an id of its own",
        )


def _check_rows(behavior: str, what: str, rows: Decisions | Ends, spec: BehaviorSpec) -> None:
    n = len(rows.agents)
    for name in ("rewards", "group_rewards", "matches"):
        column = getattr(rows, name)
        if column is not None and len(column) != n:
            raise _shape(behavior, f"{what}.{name}", f"{len(column)} rows", f"{n}, one for each agent")
    _check_finite(behavior, f"{what}.rewards", rows.rewards, rows.agents)
    if rows.group_rewards is not None:
        _check_finite(behavior, f"{what}.group_rewards", rows.group_rewards, rows.agents)
    _check_observations(behavior, what, rows, spec)
    _check_executed(behavior, what, rows, spec)


def _check_executed(behavior: str, what: str, rows: Decisions | Ends, spec: BehaviorSpec) -> None:
    n, actions = len(rows.agents), spec.actions
    wanted = {"did_continuous": (n, actions.continuous), "did_discrete": (n, len(actions.discrete))}
    for name, shape in wanted.items():
        column = getattr(rows, name)
        if column is not None and column.shape != shape:
            raise _shape(behavior, f"{what}.{name}", f"{column.shape}", f"{shape}")
    if rows.did_continuous is not None and not np.isfinite(rows.did_continuous).all():
        agent = rows.agents[~np.isfinite(rows.did_continuous).all(1)][0]
        raise RemoteProtocolError(
            "not_finite",
            got=f"NaN or infinity in {what}.did_continuous of {behavior}, agent {agent}",
            expected="finite numbers in [-1, 1]",
            remedy="report the executed action in the units of Act",
        )
    if rows.did_discrete is not None and np.any((rows.did_discrete < 0) | (rows.did_discrete >= actions.discrete)):
        raise _shape(behavior, f"{what}.did_discrete", "a choice that its branch does not have", f"{actions.discrete}")


def _check_groups(behavior: str, decisions: Decisions) -> None:
    groups = decisions.groups
    if groups is None:
        return
    if len(groups) != len(decisions.agents):
        raise _shape(
            behavior, "decisions.groups", f"{len(groups)} rows", f"{len(decisions.agents)}, one for each agent"
        )
    beyond = (groups < 0) | (groups > MAX_GROUP)
    if np.count_nonzero(beyond):
        row = int(np.flatnonzero(beyond)[0])
        raise RemoteProtocolError(
            "group",
            got=f"group id {groups[row]} in decisions.groups of {behavior}, agent {decisions.agents[row]}",
            expected=f"0 for no group, else 1..{MAX_GROUP}",
            remedy="number the groups of a simulator from 1",
        )


def _check_observations(behavior: str, what: str, rows: Decisions | Ends, spec: BehaviorSpec) -> None:
    n = len(rows.agents)
    if len(rows.observations) != len(spec.observations):
        raise _shape(behavior, f"{what}.observations", f"{len(rows.observations)} columns", f"{len(spec.observations)}")
    for column, wanted in zip(rows.observations, spec.observations, strict=True):
        if column.shape != (n, *wanted.shape):
            raise _shape(
                behavior,
                f"{what}.observations[{wanted.name!r}]",
                f"{column.shape}",
                f"{(n, *wanted.shape)} by its spec",
            )
        if column.dtype != _DTYPES[wanted.dtype]:
            raise RemoteProtocolError(
                "dtype",
                got=f"{column.dtype.name} in {what}.observations[{wanted.name!r}] of {behavior}",
                expected=f"{wanted.dtype} by its spec",
                remedy="convert the column, or change the spec",
            )
        if wanted.dtype == "float32":
            _check_finite(behavior, f"{what}.observations[{wanted.name!r}]", column, rows.agents)


def _check_finite(behavior: str, field: str, column: Array, agents: NDArray[np.int64]) -> None:
    # A finite sum of squares has finite terms only; an infinite one may be an overflow, so the rows are checked.
    if math.isfinite(np.vdot(column, column)):
        return
    bad = ~np.isfinite(column.reshape(len(agents), -1)).all(axis=1)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise RemoteProtocolError(
            "not_finite",
            got=f"NaN or infinity in {field} of {behavior}, agent {agents[row]}",
            expected="finite numbers",
            remedy="find where the simulator divides by zero or overflows",
        )


def _check_masks(behavior: str, decisions: Decisions, spec: BehaviorSpec) -> None:
    masks = decisions.masks
    if masks is None:
        return
    wanted = (len(decisions.agents), spec.actions.mask_size)
    if masks.shape != wanted:
        raise RemoteProtocolError(
            "masks",
            got=f"masks of shape {masks.shape} for {behavior}",
            expected=f"{wanted}: the choices of all branches side by side",
            remedy="send one row for each agent, True where a choice is forbidden",
        )
    at = 0
    for branch, size in enumerate(spec.actions.discrete):
        closed = masks[:, at : at + size].all(axis=1)
        if closed.any():
            raise RemoteProtocolError(
                "masks",
                got=f"all {size} choices of branch {branch} forbidden to agent "
                f"{decisions.agents[closed][0]} of {behavior}",
                expected="at least one choice left in each branch",
                remedy="leave a choice that does nothing",
            )
        at += size


def _check_ends(behavior: str, ends: Ends) -> None:
    n = len(ends.agents)
    if len(ends.interrupted) != n:
        raise _shape(behavior, "ends.interrupted", f"{len(ends.interrupted)} rows", f"{n}, one for each agent")
    if ends.outcomes is not None:
        if len(ends.outcomes) != n:
            raise _shape(behavior, "ends.outcomes", f"{len(ends.outcomes)} rows", f"{n}, one for each agent")
        _check_finite(behavior, "ends.outcomes", ends.outcomes, ends.agents)
        if not ((ends.outcomes >= 0) & (ends.outcomes <= 1)).all():
            raise RemoteProtocolError(
                "shape",
                got=f"outcomes {ends.outcomes[:8]} of {behavior}",
                expected="from 0 (lost) to 1 (won)",
                remedy="send 1, 0.5 or 0, or leave outcomes out",
            )


def _shape(behavior: str, field: str, got: str, expected: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        "shape", got=f"{got} in {field} of {behavior}", expected=expected, remedy="make the columns match the spec"
    )
