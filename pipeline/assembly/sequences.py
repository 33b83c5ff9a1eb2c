"""Divides segments into the sequences that a recurrent network is trained on.

A segment's first sequence begins with its first step, and a new one every `length` steps; the last may be shorter.

s segments, q sequences, r rows of all segments, one segment after the other.
"""

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.specs import Array

Numbers = NDArray[np.int64]


def counts(lengths_s: Array, length: int) -> Numbers:
    """Returns [s] the number of sequences of each segment.

    Args:
        lengths_s: rows of each segment.
        length: most rows of a sequence.
    """
    return -(-lengths_s.astype(np.int64) // length)


def divide(lengths_s: Array, length: int) -> tuple[Numbers, Numbers]:
    """Returns the first row [q] and number of rows [q] of each sequence; arguments as for `counts`."""
    counts_s = counts(lengths_s, length)
    starts_s = np.cumsum(lengths_s, dtype=np.int64) - lengths_s
    within_q = (np.arange(counts_s.sum()) - np.repeat(np.cumsum(counts_s) - counts_s, counts_s)) * length
    left_q = np.repeat(lengths_s.astype(np.int64), counts_s) - within_q
    return np.repeat(starts_s, counts_s) + within_q, np.minimum(left_q, length)


def windows(lengths_s: Array, times_r: Array, length: int) -> Numbers:
    """Returns [q] the first row of each sequence of group members.

    Members share windows of group timesteps: a sequence begins with each segment, and in each window.

    Args:
        lengths_s: rows of each segment, possibly 0.
        times_r: group timestep of each row.
        length: group timesteps of a window.
    """
    window_r = times_r // length
    begins_r = np.ones(len(times_r), bool)
    begins_r[1:] = window_r[1:] != window_r[:-1]
    begins_r[(np.cumsum(lengths_s, dtype=np.int64) - lengths_s)[lengths_s > 0]] = True
    return np.flatnonzero(begins_r)


def rows_of(first_q: Array, lengths_q: Array) -> Numbers:
    """Returns [r] the rows of the given sequences, one sequence after the other."""
    ends_q = np.cumsum(lengths_q, dtype=np.int64)
    rows_r: Numbers = np.arange(int(lengths_q.sum())) + np.repeat(first_q - (ends_q - lengths_q), lengths_q)
    return rows_r
