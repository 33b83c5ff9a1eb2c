"""This module computes statistics of episodes: means with confidence intervals.

The interval of a mean is a bias-corrected and accelerated bootstrap interval (Efron 1987, doi
10.1080/01621459.1987.10478410): returns are rarely normal. That of a share is Wilson's (1927, doi
10.1080/01621459.1927.10502953), which stays within 0..1 and is valid for few episodes. Both assume independent
episodes: members of one group are dependent, so there is no interval with groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, bootstrap

from sparring.pipeline.files import Json
from sparring.pipeline.specs import Array

CONFIDENCE: Final = 0.95
_RESAMPLES: Final = 9999
_VALUES_AT_ONCE: Final = 10**7
_MOST_FOR_BCA: Final = 3000
"""Most episodes for BCa, whose jackknife takes quadratic time; with more, percentiles are as good."""

OUTCOMES: Final = {"won": 1.0, "drawn": 0.5, "lost": 0.0}


def describe(columns: Mapping[str, Array]) -> dict[str, Json]:
    """Returns statistics of episodes, as plain values for JSON.

    Args:
        columns: `returns`, `shared_returns`, `lengths`, `teams`, `outcomes`, `groups`, [e] each.
    """
    found: dict[str, Json] = {"episodes": len(columns["returns"])}
    if not len(columns["returns"]):
        return found
    independent = not columns["groups"].any()
    found["reward"] = spread(columns["returns"], independent=independent)
    if columns["shared_returns"].any():
        found["group_reward"] = spread(columns["shared_returns"], independent=independent)
    found["length"] = spread(columns["lengths"], independent=independent)
    known = columns["outcomes"][columns["outcomes"] >= 0]
    if len(known):
        found["outcomes"] = {name: share(known == value, independent=independent) for name, value in OUTCOMES.items()}
    return found


def by_team(columns: Mapping[str, Array]) -> dict[str, dict[str, Json]]:
    """Returns `describe` for each team if there are several."""
    teams = np.unique(columns["teams"])
    if len(teams) < 2:
        return {}
    return {
        str(team): describe({name: column[columns["teams"] == team] for name, column in columns.items()})
        for team in teams.tolist()
    }


def spread(values: Array, *, independent: bool = True) -> dict[str, Json]:
    """Returns mean with interval, standard deviation and quartiles; no interval for single or dependent values."""
    values = values.astype(np.float64)
    smallest, lower, median, upper, largest = np.quantile(values, (0, 0.25, 0.5, 0.75, 1)).tolist()
    return {
        "mean": float(values.mean()),
        "interval": _interval(values) if independent else None,
        "deviation": float(values.std(ddof=1)) if len(values) > 1 else None,
        "min": smallest,
        "quartiles": [lower, median, upper],
        "max": largest,
    }


def share(values: NDArray[np.bool_], *, independent: bool = True) -> dict[str, Json]:
    """Returns how often values are true, with an interval; none for dependent values."""
    times = int(values.sum())
    found = binomtest(times, len(values)).proportion_ci(CONFIDENCE, method="wilson")
    interval = [float(found.low), float(found.high)] if independent else None
    return {"share": times / len(values), "interval": interval, "times": times}


def _interval(values: NDArray[np.float64]) -> list[float] | None:
    if len(values) < 2:
        return None
    if np.ptp(values) == 0:  # nothing to resample
        return [float(values[0]), float(values[0])]
    found = bootstrap(
        (values,),
        np.mean,
        confidence_level=CONFIDENCE,
        n_resamples=_RESAMPLES,
        batch=max(1, _VALUES_AT_ONCE // len(values)),
        method="BCa" if len(values) <= _MOST_FOR_BCA else "percentile",
        rng=np.random.default_rng(0),  # fixed, so that equal episodes give equal intervals
    ).confidence_interval
    return [float(found.low), float(found.high)]
