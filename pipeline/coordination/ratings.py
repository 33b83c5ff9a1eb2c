"""Ratings of players from the matches between them.

Two teams: Elo (1978, "The Rating of Chessplayers"). More: Plackett-Luce with mu and sigma (Weng and Lin 2011, "A
Bayesian Approximation Method for Online Ranking"), by the library `openskill`. A player is a learner or one of the
fixed policies it plays against, by name.
"""

import statistics
from collections.abc import Sequence
from typing import Any, Final

from openskill.models import PlackettLuce

_SCALE: Final = 400.0


def expected(own: float, other: float) -> float:
    """Returns the expected score, 0 to 1, of a player with rating `own` against one with `other`."""
    return float(1 / (1 + 10 ** ((other - own) / _SCALE)))


class Ratings:
    """Keeps the ratings of all players.

    Attributes:
        elo: by player.
        skills: mu and sigma, by player.
        matches: rated so far.
    """

    def __init__(self) -> None:
        self.elo: dict[str, float] = {}
        self.skills: dict[str, tuple[float, float]] = {}
        self.matches = 0
        self._model = PlackettLuce()

    def enter(self, player: str, *, elo: float = 1200.0, like: str | None = None) -> None:
        """Enters a new player with the given rating, or with that of another player."""
        if player in self.elo:
            return
        if like is None:
            rating = self._model.rating()
            self.elo[player], self.skills[player] = elo, (rating.mu, rating.sigma)
        else:
            self.elo[player], self.skills[player] = self.elo[like], self.skills[like]

    def leave(self, player: str) -> None:
        """Removes a player."""
        self.elo.pop(player, None)
        self.skills.pop(player, None)

    def rate(self, teams: Sequence[Sequence[str]], scores: Sequence[float], k: float = 16.0) -> None:
        """Rates one match.

        Args:
            teams: players of each, at least two teams.
            scores: of each team: 1 won, 0.5 a draw, 0 lost; with more than two teams, the higher the better.
            k: how far an Elo rating moves at most.
        """
        self.matches += 1
        if len(teams) == 2:
            self._rate_two(teams[0], teams[1], scores[0], k)
            return
        before = [[self._model.create_rating(list(self.skills[player])) for player in team] for team in teams]
        after: Any = self._model.rate(before, scores=[float(score) for score in scores])
        moved: dict[str, list[tuple[float, float]]] = {}  # a policy may play several behavior ids
        for team, ratings in zip(teams, after, strict=True):
            for player, rating in zip(team, ratings, strict=True):
                moved.setdefault(player, []).append((rating.mu, rating.sigma))
        for player, found in moved.items():
            self.skills[player] = statistics.mean(mu for mu, _ in found), statistics.mean(sigma for _, sigma in found)

    def _rate_two(self, team: Sequence[str], others: Sequence[str], score: float, k: float) -> None:
        change = k * (score - expected(self._mean(team), self._mean(others)))
        for player in team:
            self.elo[player] += change
        for player in others:
            self.elo[player] -= change

    def _mean(self, team: Sequence[str]) -> float:
        return sum(self.elo[player] for player in team) / len(team)
