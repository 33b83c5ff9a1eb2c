"""Finished segments as records of columns.

g group segments, s segments of members, r their steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly.columns import Mask, Places, RowNumbers


@dataclass(slots=True)
class MemberSegments:
    """Holds segments of members of one behavior name, one after the other; other columns are those of `Segments`.

    Attributes:
        rows: [r] rows of the steps in the log.
        following: [s] row of the decision or end after each segment.
        places: [s] group of each: its place while its segment is open, then its number among finished ones.
        next_times: [s] group timestep of the row `following`.
        until: [s] group timestep from which the member is absent.
    """

    rows: RowNumbers
    lengths: NDArray[np.int32]
    following: RowNumbers
    places: Places
    next_times: NDArray[np.int32]
    until: NDArray[np.int32]
    terminated: Mask
    interrupted: Mask
    group_ended: Mask
    agents: NDArray[np.int64]
    groups: NDArray[np.int64]
    teams: NDArray[np.int32]
    simulators: NDArray[np.int32]
    matchups: NDArray[np.int64]


@dataclass(slots=True)
class FinishedGroups:
    """Holds what segments of members have in common; columns are those of `GroupSegments`."""

    numbers: NDArray[np.int64]
    spans: NDArray[np.int32]
    ended: Mask
    rewards: NDArray[np.float32]
