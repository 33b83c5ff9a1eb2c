"""This module computes statistics of episodes, and the results of a tournament.

The interval of a mean is a bias-corrected and accelerated bootstrap interval (Efron 1987, doi
10.1080/01621459.1987.10478410): returns are rarely normal. That of a share is Wilson's (`ratings`). Both assume
independent episodes: members of one group are dependent, so there is no interval with groups.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

from sparring.pipeline.evaluation.ratings import CONFIDENCE, Matrix, rated, wilson
from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.pictures import figure, png
from sparring.pipeline.specs import Array, BehaviorId

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
    interval = list(wilson(times, len(values))) if independent else None
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


Match = Mapping[str, Json]
"""A line of the match table: its number, matchup, and players and scores by behavior id."""


@dataclass(frozen=True, slots=True)
class TournamentTable:
    """Holds the result of a tournament.

    Attributes:
        players: labels.
        matches: [p, p] how often each player played each other.
        points: [p, p] points of the first: 1 for a win, 0.5 for a tied match.
        ratings: [p] Elo, mean 0.
        margins: [p] half the width of each interval.
    """

    players: tuple[str, ...]
    matches: Matrix
    points: Matrix
    ratings: Matrix
    margins: Matrix

    @property
    def shares(self) -> Matrix:
        """Returns [p, p] points per match; NaN without matches."""
        return np.divide(self.points, self.matches, out=np.full_like(self.points, np.nan), where=self.matches > 0)

    def fewest(self, *, mirror: bool = False) -> int:
        """Returns the fewest matches of a pair of players; with `mirror`, 0 where one has not played itself."""
        if mirror and not self.matches.diagonal().all():
            return 0
        between = self.matches[~np.eye(len(self.players), dtype=bool)]
        return int(between.min() if between.size else self.matches[0, 0])

    def order(self) -> list[int]:
        """Returns the players, the strongest first."""
        return list(np.argsort(-self.ratings, kind="stable"))

    def plain(self) -> dict[str, Json]:
        """Returns the table as plain values for JSON."""
        return {"confidence": CONFIDENCE, "players": [self._player(one) for one in self.order()]}

    def _player(self, one: int) -> dict[str, Json]:
        against = {
            other: {
                "matches": int(matches),
                "share": float(points / matches),
                "interval": list(wilson(float(points), int(matches))),
            }
            for other, matches, points in zip(self.players, self.matches[one], self.points[one], strict=True)
            if matches
        }
        rating, margin = float(self.ratings[one]), float(self.margins[one])
        interval = [rating - margin, rating + margin]
        return {"player": self.players[one], "rating": rating, "interval": interval, "against": against}


def counted(lines: Iterable[Match]) -> list[Match]:
    """Returns the matches that count: as many of each matchup, those that began first.

    Stopping at the N-th end would favor short matches, so a match counts only if all earlier ones have ended.
    """
    by_number = {line["match"]: line for line in lines}
    whole = itertools.takewhile(by_number.__contains__, itertools.count(1))
    finished = [by_number[number] for number in whole if not by_number[number].get("lost")]
    behavior_ids = max((len(line["players"]) for line in finished), default=0)
    by_matchup: dict[int, list[Match]] = {}
    for line in finished:
        if len(line["players"]) == behavior_ids:  # others began before all teams were known
            by_matchup.setdefault(line["matchup"], []).append(line)
    quota = min(map(len, by_matchup.values()), default=0)
    return [line for lines in by_matchup.values() for line in lines[:quota]]


def standings(players: Sequence[str], lines: Iterable[Match]) -> TournamentTable:
    """Adds up matches.

    Args:
        players: labels.
        lines: of the match table: `players` and `scores` by behavior id.
    """
    number = {label: at for at, label in enumerate(players)}
    matches = np.zeros((len(players), len(players)))
    points = np.zeros_like(matches)
    for line in lines:
        teams: dict[int, tuple[int, float]] = {}
        for behavior_id, player in line["players"].items():
            score = line["scores"].get(behavior_id, -1.0)
            if score >= 0 or BehaviorId.parse(behavior_id).team not in teams:
                teams[BehaviorId.parse(behavior_id).team] = number[player], score
        known = [score for _, score in teams.values() if score >= 0]
        entries = [(player, score if score >= 0 else 1 - known[0]) for player, score in teams.values()]
        for (one, score), (other, others) in itertools.combinations(entries, 2):
            share = 0.5 + 0.5 * float(np.sign(score - others))
            matches[one, other] += 1
            points[one, other] += share
            matches[other, one] += one != other
            points[other, one] += (1 - share) * (one != other)
    ratings, margins = rated(points * (1 - np.eye(len(players))))
    return TournamentTable(tuple(players), matches, points, ratings, margins)


def heat_map(found: TournamentTable, title: str) -> bytes:
    """Returns a PNG of the shares of points, the strongest first, in colors that the color-blind can tell apart.

    Columns have the numbers of their rows, and long labels are shortened in the middle.
    """
    order, count = found.order(), len(found.players)
    drawn = figure(min(24, 4.5 + 0.6 * count), min(20, 1.5 + 0.5 * count), "constrained")
    axes = drawn.subplots()
    shares = found.shares[np.ix_(order, order)]
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="PuOr", aspect="auto")
    labels = [f"{_shortened(found.players[one])}  {place}" for place, one in enumerate(order, 1)]
    axes.set_xticks(range(count), [str(place) for place in range(1, count + 1)])
    axes.set_yticks(range(count), labels, parse_math=False)
    for (row, column), share in np.ndenumerate(shares):
        if not math.isnan(share):
            color = "black" if 0.15 < share < 0.75 else "white"
            axes.text(column, row, f"{share:.2f}", ha="center", va="center", fontsize="small", color=color)
    axes.set_title(_shortened(title, 60), parse_math=False)
    axes.set_xlabel("against")
    axes.set_facecolor("lightgray")  # pairs that have not played
    drawn.colorbar(image, label="points per match")
    return png(drawn)


def _shortened(text: str, most: int = 24) -> str:
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"
