"""Helpers of self-play tests: builders of records, random histories, and a slow twin of the rules.

The twin follows the rules as documented: it keeps whole histories and sums them at each question.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sparring.pipeline.coordination.opponents import ExternalOpponent
from sparring.pipeline.coordination.self_play import SelfPlay
from sparring.pipeline.coordination.settings import SelfPlaySettings
from sparring.pipeline.messages.matches import Matchup, Results
from sparring.pipeline.messages.state import PolicyWeights
from sparring.pipeline.specs import BehaviorId

FAR = 10**9
Layout = Mapping[str, tuple[int, ...]]
Match = tuple[int, Mapping[str, float]]  # number of the matchup, score by behavior id

LAYOUTS: tuple[Layout, ...] = (
    {"A": (0, 1)},
    {"A": (0,), "B": (1,)},
    {"A": (0, 1, 2)},
    {"A": (0, 1, 2), "B": (3,)},
    {"A": (0,), "B": (1,), "C": (2,)},
)


# ---------------------------------------------------------------- builders


def behavior_id(name: str, team: int) -> str:
    return str(BehaviorId(name=name, team=team))


def make(
    layout: Layout,
    *,
    max_steps: int | Mapping[str, int] = FAR,
    seed: int = 0,
    places: int = 4,
    lockstep: bool = False,
    external: Mapping[str, Sequence[ExternalOpponent]] | None = None,
    per_name: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> SelfPlay:
    max_steps_of = dict.fromkeys(layout, max_steps) if isinstance(max_steps, int) else dict(max_steps)
    rules = SelfPlay(seed=seed, places=places, lockstep=lockstep)
    for name in layout:
        own = SelfPlaySettings(**{**settings, **(per_name or {}).get(name, {})})
        rules.add(name, own, max_steps_of[name], (external or {}).get(name, ()))
    return rules


def started_rules(layout: Layout, **settings: Any) -> SelfPlay:
    """Returns rules that have received all teams and untrained weights of version 1."""
    rules = make(layout, **settings)
    for name, teams in layout.items():
        rules.set_teams(name, teams)
    for name in layout:
        rules.weights(name, 1, 0)
    return rules


def results(
    matches: Iterable[Match],
    *,
    numbers: Sequence[int] | None = None,
    simulators: Sequence[int] | None = None,
    source: str = "stepping-0.5f3a-1",
    before: int = 0,
) -> Results:
    """Returns results with explicit scores of behavior A; -1 is an unknown score."""
    rows = list(matches)
    names = tuple(dict.fromkeys(one for _, scores in rows for one in scores))
    flat = [(names.index(one), score) for _, scores in rows for one, score in scores.items()]
    return Results(
        source=source,
        behavior="A",
        before=before,
        numbers=np.array(range(1, len(rows) + 1) if numbers is None else numbers, np.int64),
        matchups=np.array([matchup for matchup, _ in rows], np.int64),
        simulators=np.array([0] * len(rows) if simulators is None else simulators, np.int32),
        row_counts=np.array([len(scores) for _, scores in rows], np.int32),
        names=names,
        who=np.array([who for who, _ in flat], np.int32),
        scores=np.array([score for _, score in flat], np.float32),
        explicit=np.array([int(score >= 0) for _, score in flat], np.int32),
        rewards=np.zeros(len(flat), np.float32),
    )


def matchups(rules: Any) -> tuple[Matchup, ...]:
    assert rules.assignment is not None
    return tuple(rules.assignment.matchups)


def ghosts_by_place(rules: SelfPlay) -> list[tuple[int, dict[str, int]]]:
    """Returns team and ghosts of each place, without the numbers of matchups."""
    return [(one.team, dict(one.ghosts)) for one in matchups(rules)]


def plain_assignment(rules: SelfPlay) -> dict[str, Any] | None:
    return None if rules.assignment is None else asdict(rules.assignment)


def weights(name: str, version: int, trained: int = 0) -> PolicyWeights:
    """Returns weights that encode name and version."""
    own = np.array([version, sum(name.encode())], np.float32)
    return PolicyWeights(behavior=name, version=version, arrays={"actor.weight": own}, trained=trained)


class RecordingTopic:
    """A topic that records what is published, in order."""

    def __init__(self) -> None:
        self.published: list[tuple[str, PolicyWeights]] = []

    def publish(self, topic: Any, record: Any) -> None:
        self.published.append((topic.key, record))

    async def aclose(self) -> None:
        """Does nothing."""

    @property
    def latest(self) -> dict[str, PolicyWeights]:
        return dict(self.published)


# ---------------------------------------------------------------- histories


@dataclass(frozen=True)
class Event:
    """One input of coordination.

    Attributes:
        kind: `weights`, `back` (a learner restored after a crash), `again` (known weights) or `ghosts`.
        who: index of the name, modulo their number.
        steps: learner steps gained or lost, or ghost steps.
    """

    kind: str
    who: int
    steps: int


def histories(kinds: Sequence[str] = ("weights", "weights", "ghosts", "ghosts", "back", "again")) -> Any:
    event = st.builds(Event, kind=st.sampled_from(kinds), who=st.integers(0, 5), steps=st.integers(0, 40))
    return st.lists(event, min_size=1, max_size=60)


def one_settings() -> Any:
    """Generates small settings, so that every event is frequent."""
    return st.fixed_dictionaries(
        {
            "save_steps": st.integers(1, 50),
            "team_change": st.integers(1, 90),
            "swap_steps": st.integers(1, 70),
            "window": st.integers(1, 4),
            "play_against_latest_model_ratio": st.sampled_from([0.0, 0.5, 1.0]),
        }
    )


@dataclass
class LearnerPosition:
    """Version and step counts of one name in a history."""

    version: int = 1
    trained: int = 0
    ghosts: int = 0


class EventSource:
    """Turns events into messages of learners and stepping."""

    def __init__(self, layout: Layout, max_steps_of: Mapping[str, int]) -> None:
        self.names = list(layout)
        self.max_steps_of = max_steps_of
        self.positions = {name: LearnerPosition() for name in layout}

    def message_of(self, event: Event) -> tuple[str, str, int, int]:
        """Returns a message: kind, name, version or steps, trained."""
        name = self.names[event.who % len(self.names)]
        position = self.positions[name]
        if event.kind == "ghosts":
            position.ghosts += event.steps
            return "ghosts", name, position.ghosts, 0
        is_done = position.trained >= self.max_steps_of[name]
        if event.kind == "again" or is_done:
            return "weights", name, position.version, position.trained
        position.version += 1
        change = -event.steps if event.kind == "back" else event.steps
        position.trained = min(max(0, position.trained + change), self.max_steps_of[name])
        return "weights", name, position.version, position.trained


def apply(rules: Any, message: tuple[str, str, int, int]) -> None:
    kind, name, number, trained = message
    if kind == "ghosts":
        rules.ghosts(name, number)
    else:
        rules.weights(name, number, trained)


def learn(rules: SelfPlay, name: str, steps: int) -> None:
    side = rules.sides[name]
    rules.weights(name, side.version + 1, side.trained + steps)


# ---------------------------------------------------------------- the twin


@dataclass
class TwinSide:
    """Holds all messages of a name."""

    settings: Mapping[str, Any]
    end: int
    teams: tuple[int, ...]
    positions: list[tuple[int, int]] = field(default_factory=list)  # version, trained
    gains: list[int] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)  # version, learner steps by then
    ghosts: list[int] = field(default_factory=lambda: [0])
    swapped: list[int] = field(default_factory=lambda: [0])  # ghost steps at each change of opponents

    @property
    def window(self) -> list[int]:
        return [version for version, _ in self.saved][-int(self.settings["window"]) :]

    @property
    def latest(self) -> int:
        return self.positions[-1][0]

    @property
    def done(self) -> bool:
        return bool(self.positions) and self.positions[-1][1] >= self.end


class SelfPlayTwin:
    """Computes learning team, snapshots and changes of opponents in the simplest way.

    `stamps` counts for each behavior id how often its opponents had to be sampled.
    """

    def __init__(
        self,
        layout: Layout,
        settings: Mapping[str, Mapping[str, Any]],
        max_steps_of: Mapping[str, int],
        *,
        lockstep: bool,
    ) -> None:
        self.sides = {name: TwinSide(settings[name], max_steps_of[name], teams) for name, teams in layout.items()}
        self.order = sorted({team for teams in layout.values() for team in teams})
        self.team = self.order[0]
        self.turn: list[tuple[str, int]] = []
        self.lockstep = lockstep
        self.stamps = {behavior_id(name, team): 1 for name, teams in layout.items() for team in teams}
        self.team_changes = 0

    def apply(self, message: tuple[str, str, int, int]) -> None:
        kind, name, number, trained = message
        side = self.sides[name]
        if kind == "ghosts":
            side.ghosts.append(number)
            if not self.lockstep:
                self._swap_if_due()
        elif not side.positions or number > side.positions[-1][0]:
            self._new_weights(name, side, number, trained)

    def _new_weights(self, name: str, side: TwinSide, version: int, trained: int) -> None:
        before = side.positions[-1][1] if side.positions else 0
        side.positions.append((version, trained))
        side.gains.append(max(0, trained - before))
        steps = sum(side.gains)
        if not side.saved or steps - side.saved[-1][1] >= side.settings["save_steps"]:
            side.saved.append((version, steps))
        if self.team in side.teams:
            self.turn.append((name, side.gains[-1]))
            learned = sum(gain for one, gain in self.turn if one == name)
            all_done = all(one.done for one in self.sides.values())  # then the turn stays where it is
            if learned >= side.settings["team_change"] or (side.done and not all_done):
                self._next_team()
        self._swap_if_due()

    def _next_team(self) -> None:
        at = self.order.index(self.team)
        rotated = self.order[at + 1 :] + self.order[: at + 1]
        self.team = next((team for team in rotated if not self._done(team)), self.team)
        self.turn = []
        self.team_changes += 1
        for one in self.stamps:
            self.stamps[one] += 1

    def _done(self, team: int) -> bool:
        return all(side.done for side in self.sides.values() if team in side.teams)

    def _swap_if_due(self) -> None:
        for name, side in self.sides.items():
            if max(side.ghosts) - side.swapped[-1] >= side.settings["swap_steps"]:
                side.swapped.append(max(side.ghosts))
                for team in side.teams:
                    self.stamps[behavior_id(name, team)] += 1

    def ghost_ids(self) -> list[str]:
        return [
            behavior_id(name, team) for name, side in self.sides.items() for team in side.teams if team != self.team
        ]

    def candidates(self, one: str) -> set[int]:
        """Returns the versions that may be sampled for a behavior id now."""
        side = self.sides[BehaviorId.parse(one).name]
        ratio = side.settings["play_against_latest_model_ratio"]
        latest = {side.latest} if ratio > 0 else set()
        return latest | (set(side.window) if ratio < 1 else set())
