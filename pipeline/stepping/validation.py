"""Reports of a simulator are validated before any part of them is used.

Each violation becomes a `RemoteProtocolError` that names behavior, field and agent; it affects that simulator alone.
"""

from dataclasses import fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends
from sparring.pipeline.specs import Array, BehaviorSpec

MAX_GROUP: Final = 2**31 - 1
MAX_NUMBER: Final = 1e18
"""Beyond it, squares and their sums soon exceed float32: learners would fail because of one simulator."""
_DTYPES: Final = {"float32": np.dtype(np.float32), "uint8": np.dtype(np.uint8)}
_COLUMNS: Final = {
    record: [column.name for column in fields(record) if column.name not in ("agents", "observations", "masks")]
    for record in (Decisions, Ends)
}
_FINITE: Final = ("rewards", "group_rewards", "outcomes", "did_continuous")


def check_report(report: BehaviorReport, spec: BehaviorSpec) -> None:
    """Checks one report against its spec: lengths, shapes, dtypes, values, masks, groups.

    Raises:
        RemoteProtocolError: the report contradicts its spec. Whether the agents are known is not checked here.
    """
    decisions, ends = report.decisions, report.ends
    if decisions is not None:
        _check_rows(report.behavior, "decisions", decisions, spec)
        _check_groups(report.behavior, decisions)
        _check_masks(report.behavior, decisions, spec)
    if ends is not None:
        _check_rows(report.behavior, "ends", ends, spec)
        if ends.outcomes is not None and not ((ends.outcomes >= 0) & (ends.outcomes <= 1)).all():
            raise _shape(report.behavior, "ends.outcomes", f"{ends.outcomes[:8]}", "from 0 (lost) to 1 (won)")


def describe_report(report: BehaviorReport, spec: BehaviorSpec) -> str:
    """Describes the agents of a report: what they observe, how they act, and whether they have masks and groups."""
    rows = report.decisions
    groups = None if rows is None else rows.groups
    count = 0 if groups is None else np.unique(groups[groups > 0]).size
    return "; ".join(
        [
            f"agents {0 if rows is None else len(rows.agents)}",
            str(spec),
            f"masks {'none' if rows is None or rows.masks is None else 'yes'}",
            f"groups {count or 'none'}",
        ]
    )


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
    n, actions = len(rows.agents), spec.actions
    widths = {"did_continuous": actions.continuous, "did_discrete": len(actions.discrete)}
    for name in _COLUMNS[type(rows)]:
        column: Array | None = getattr(rows, name)
        if column is None:
            continue
        wanted = (n, widths[name]) if name in widths else (n,)
        if column.shape != wanted:
            raise _wrong_rows(behavior, f"{what}.{name}", column, wanted)
        if name in _FINITE:
            _check_numbers(behavior, f"{what}.{name}", column, rows.agents)
    if rows.did_discrete is not None and np.any((rows.did_discrete < 0) | (rows.did_discrete >= actions.discrete)):
        expected = f"choices of branches of {actions.discrete}"
        raise _shape(behavior, f"{what}.did_discrete", "a choice that its branch does not have", expected)
    if len(rows.observations) != len(spec.observations):
        raise _shape(behavior, f"{what}.observations", f"{len(rows.observations)} columns", f"{len(spec.observations)}")
    for column, observation in zip(rows.observations, spec.observations, strict=True):
        field = f"{what}.observations[{observation.name!r}]"
        if column.shape != (n, *observation.shape):
            raise _wrong_rows(behavior, field, column, (n, *observation.shape))
        if column.dtype != _DTYPES[observation.dtype]:
            raise RemoteProtocolError(
                "dtype",
                got=f"{column.dtype.name} in {field} of {behavior}",
                expected=f"{observation.dtype} by its spec",
                remedy="convert the column, or change the spec",
            )
        if observation.dtype == "float32":
            _check_numbers(behavior, field, column, rows.agents)


def _wrong_rows(behavior: str, field: str, column: Array, expected: tuple[int, ...]) -> RemoteProtocolError:
    rows = column.shape[0] if column.shape else "no"
    return _shape(behavior, field, f"{rows} rows, shape {column.shape},", f"{expected}, a row for each agent")


def _check_numbers(behavior: str, field: str, column: Array, agents: NDArray[np.int64]) -> None:
    # Terms of a small sum of squares are small; where it is large, infinite or NaN, the rows are checked.
    if np.vdot(column, column) <= MAX_NUMBER:
        return
    rows = column.reshape(len(agents), -1)
    bad = np.flatnonzero(~(np.abs(rows) <= MAX_NUMBER).all(axis=1))
    if bad.size:
        what = "a number beyond 1e18" if np.isfinite(rows[bad[0]]).all() else "NaN or infinity"
        raise RemoteProtocolError(
            "not_finite",
            got=f"{what} in {field} of {behavior}, agent {agents[bad[0]]}",
            expected="numbers from -1e18 to 1e18",
            remedy="find where the simulator divides by zero or overflows",
        )


def _check_groups(behavior: str, decisions: Decisions) -> None:
    groups = decisions.groups
    if groups is None:
        return
    beyond = np.flatnonzero((groups < 0) | (groups > MAX_GROUP))
    if beyond.size:
        group, agent = groups[beyond[0]], decisions.agents[beyond[0]]
        raise RemoteProtocolError(
            "group",
            got=f"group id {group} in decisions.groups of {behavior}, agent {agent}",
            expected=f"0 for no group, else 1..{MAX_GROUP}",
            remedy="number the groups of a simulator from 1",
        )


def _check_masks(behavior: str, decisions: Decisions, spec: BehaviorSpec) -> None:
    masks, wanted, at = decisions.masks, (len(decisions.agents), spec.actions.mask_size), 0
    if masks is None:
        return
    if masks.shape != wanted:
        raise _masks(f"masks of shape {masks.shape} for {behavior}", f"{wanted}: the choices of all branches")
    for branch, size in enumerate(spec.actions.discrete):
        closed = masks[:, at : at + size].all(axis=1)
        if closed.any():
            agent = decisions.agents[closed][0]
            got = f"all {size} choices of branch {branch} forbidden to agent {agent} of {behavior}"
            raise _masks(got, "at least one choice left in each branch")
        at += size


def _masks(got: str, expected: str) -> RemoteProtocolError:
    remedy = "send one row for each agent, True where a choice is forbidden"
    return RemoteProtocolError("masks", got=got, expected=expected, remedy=remedy)


def _shape(behavior: str, field: str, got: str, expected: str) -> RemoteProtocolError:
    remedy = "make the columns match the spec"
    return RemoteProtocolError("shape", got=f"{got} in {field} of {behavior}", expected=expected, remedy=remedy)
