"""Random groups of several behavior names, reported as stepping reports them.

A simulator sends a frame and waits for its answer: its agents decide and end together in a tick, and it sends nothing
more until all decisions have an action. A tick may report one simulator's frame and another's loss.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from sparring.pipeline.messages.steps import ActionsChosen, AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported
from tests.assembly.assembly_world import BehaviorTick, steps_of

SIMULATORS: Final = 3
WIDTHS: Final = {"A": (2, 1), "B": (0, 2), "C": (3, 0)}
"""Continuous actions and branches of each behavior name."""
CHOICES: Final = 3


@dataclass
class GroupTick(BehaviorTick):
    """The tick of one behavior name; with `is_separate` it holds lost slots only, after all other rows."""

    is_separate: bool = False


TickResult = dict[str, list[GroupTick]]
"""One tick: for each behavior name its rows, and then, under the same number, its separately lost slots."""


@dataclass
class AgentEpisode:
    """A live agent. `state`: "new" (decides with its first report), "waiting" for an action, "acting".

    Attributes:
        interval: fewest frames between two decisions.
        frames_since_decision: frames since its last decision.
        base: what its group had earned at its last decision.
        known: the reader has received it.
        can_report: `known` at its last decision.
    """

    name: str
    slot: int
    agent: int
    key: int
    team: int
    simulator: int
    interval: int = 1
    state: str = "new"
    frames_since_decision: int = 0
    base: int = 0
    known: bool = False
    can_report: bool = False


@dataclass
class Frame:
    """Collects what simulators report in a tick for one behavior name."""

    ended: list[tuple[AgentEpisode, float, float]] = field(default_factory=list)
    joined: list[AgentEpisode] = field(default_factory=list)
    moved: list[AgentEpisode] = field(default_factory=list)
    reported: list[tuple[AgentEpisode, float, float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Parameters of the random groups.

    Attributes:
        names: behavior names.
        groups: groups of a simulator; agents may also have none.
        churn: probability that an agent joins or ends.
        moving: probability that an agent changes its group with a decision.
        slow: most frames from one decision of an agent to its next.
        losing: probability that a simulator disconnects.
        separate_losses: losses are reported by behavior name and team, beside other rows; else alone in their tick.
        together: probability that whole groups or simulators end at once.
        carried: how many numbers agents carry, by name.
    """

    names: tuple[str, ...] = ("A",)
    groups: int = 2
    churn: float = 0.15
    moving: float = 0.0
    slow: int = 1
    losing: float = 0.0
    separate_losses: bool = False
    together: float = 0.2
    carried: tuple[int, ...] = (0, 0, 0)


class GroupWorld:
    """Simulators with groups of agents that join, decide, move, end and disconnect at random.

    Some agent reports group rewards in the tick in which they are earned, so that a reader knows the time:
    sums over overlapping times alone would leave it open.

    Attributes:
        grants: number of the tick, group key and amount of all group rewards.
    """

    def __init__(self, rng: random.Random, kind: Kind) -> None:
        self.rng = rng
        self.kind = kind
        self.agent_episodes: dict[tuple[str, int], AgentEpisode] = {}
        self.produced: Counter[str] = Counter()
        self.earned: Counter[int] = Counter()
        self.grants: list[tuple[int, int, int]] = []
        self.rejoin = False
        self.ready = [True] * SIMULATORS
        self.number = 0
        self._agents = 0
        self._numbers = 0

    def tick(self) -> TickResult:
        """Returns the next tick; behavior names without rows are left out."""
        self.number += 1
        before = dict(self.produced)
        leaving = self._chance(self.kind.losing)
        result: TickResult = {}
        if self.kind.separate_losses or not leaving or self.rejoin:
            result = self._frames(before)
        if leaving:
            for name, parts in self._lose(self.rng.randrange(SIMULATORS)).items():
                result.setdefault(name, []).extend(self._gone(name, slots) for slots in parts)
        return result

    def _frames(self, before: dict[str, int]) -> TickResult:
        frames = {name: Frame() for name in self.kind.names}
        for simulator in range(SIMULATORS):
            if self.ready[simulator] and self._chance(0.8):
                self._frame(simulator, frames)
        result: TickResult = {}
        answered = [at for at in range(SIMULATORS) if not self.ready[at] and self._chance(0.75)]
        for name, frame in frames.items():
            tick = self._tick(name, before.get(name, 0), frame, answered)
            if any(rows is not None for rows in (tick.ended, tick.joined, tick.reported, tick.acted)):
                result[name] = [tick]
        self.rejoin = False
        for simulator in answered:
            self.ready[simulator] = True
        return result

    def new_reader(self) -> None:
        """Replaces the reader, which knows no agent until it is reported again."""
        for episode in self.agent_episodes.values():
            episode.known = episode.can_report = False

    # ---------------------------------------------------------------- disconnects

    def _lose(self, simulator: int) -> dict[str, list[Any]]:
        """Removes a simulator; returns its slots by behavior name, and by team where losses are separate."""
        self.ready[simulator] = True
        out: dict[str, list[Any]] = {}
        for name in self.kind.names:
            here = [
                episode
                for episode in self.agent_episodes.values()
                if episode.name == name and episode.simulator == simulator
            ]
            teams = (
                [[episode for episode in here if episode.team == team] for team in (0, 1)]
                if self.kind.separate_losses
                else [here]
            )
            parts = [np.array([episode.slot for episode in part], np.int32) for part in teams if part]
            if parts:
                out[name] = parts
            for episode in here:
                del self.agent_episodes[name, episode.slot]
        return out

    def _gone(self, name: str, slots: Any) -> GroupTick:
        nothing = dict.fromkeys(("ended", "joined", "reported", "acted"))
        return GroupTick(self.number, self.produced[name], 0, lost=slots, **nothing, is_separate=True)

    # ---------------------------------------------------------------- a frame of a simulator

    def _frame(self, simulator: int, frames: dict[str, Frame]) -> None:
        here = [episode for episode in self.agent_episodes.values() if episode.simulator == simulator]
        for episode in here:
            episode.frames_since_decision += 1
        ending = self._ending(here)
        continuing = [episode for episode in here if episode not in ending]
        deciding = [
            episode for episode in continuing if episode.frames_since_decision >= episode.interval and self._chance(0.9)
        ]
        self._grant(ending + deciding)
        for episode in ending:
            frames[episode.name].ended.append(self._outcome(episode))
            del self.agent_episodes[episode.name, episode.slot]
        restarting = [self._begin(old.name, old.slot, simulator, old.key) for old in ending if self._chance(0.5)]
        free = [name for name in self.kind.names for _ in range(self._newcomers())]
        new = restarting + [self._begin(name, self._free_slot(name), simulator, None) for name in free]
        for episode in new:
            frames[episode.name].joined.append(episode)
            episode.base = self.earned[episode.key]
            frames[episode.name].reported.append((episode, self._amount(), 0.0))
        for episode in deciding:
            frames[episode.name].reported.append(self._outcome(episode))
            if self._chance(self.kind.moving):
                self._move(episode, frames[episode.name])
            episode.base = self.earned[episode.key]
        for episode in new + deciding:
            episode.frames_since_decision, episode.state = 0, "waiting"
        if new or deciding:
            self.ready[simulator] = False

    def _ending(self, here: Sequence[AgentEpisode]) -> list[AgentEpisode]:
        ending = [episode for episode in here if self._chance(self.kind.churn)]
        if ending and self._chance(self.kind.together):
            whole = ending[0].key
            ending = [episode for episode in here if episode.key == whole] if self._chance(0.7) else list(here)
        return ending

    def _newcomers(self) -> int:
        if not self.agent_episodes:
            return self.rng.randrange(4)
        return self.rng.choice([1, 2, 6]) if self._chance(self.kind.churn) else 0

    def _grant(self, reporting: Iterable[AgentEpisode]) -> None:
        """Grants group rewards where a reporting member can report them at once."""
        keys = sorted({episode.key for episode in reporting if episode.can_report and episode.key})
        for key in keys:
            if self._chance(0.7):
                amount = self.rng.randint(-4, 9)
                self.earned[key] += amount
                self.grants.append((self.number, key, amount))

    def _outcome(self, episode: AgentEpisode) -> tuple[AgentEpisode, float, float]:
        self.produced[episode.name] += 1
        return episode, self._amount(), float(self.earned[episode.key] - episode.base) if episode.key else 0.0

    def _begin(self, name: str, slot: int, simulator: int, key: int | None) -> AgentEpisode:
        self._agents += 1
        if key is None or self._chance(0.3):
            key = self._key(simulator)
        team, interval = self.rng.randrange(2), self.rng.randint(1, self.kind.slow)
        episode = AgentEpisode(name, slot, self._agents, key, team, simulator, interval)
        self.agent_episodes[name, slot] = episode
        return episode

    def _move(self, episode: AgentEpisode, frame: Frame) -> None:
        key = self._key(episode.simulator)
        if key != episode.key:
            episode.key = key
            frame.moved.append(episode)

    def _key(self, simulator: int) -> int:
        group = self.rng.randrange(self.kind.groups + 1)
        return group + ((simulator + 1) << 32) if group else 0

    def _free_slot(self, name: str) -> int:
        free = [slot for slot in range(200) if (name, slot) not in self.agent_episodes]
        return free[0] if self._chance(0.8) else self.rng.choice(free)

    # ---------------------------------------------------------------- records

    def _tick(self, name: str, before: int, frame: Frame, answered: Sequence[int]) -> GroupTick:
        joined = frame.joined + frame.moved
        if self.rejoin:
            here = [episode for episode in self.agent_episodes.values() if episode.name == name]
            joined = frame.joined + [episode for episode in here if episode not in frame.joined]
        for episode in joined:
            episode.known = True
        for episode, _, _ in frame.reported:
            episode.can_report = episode.known
        self.rng.shuffle(frame.ended)
        self.rng.shuffle(frame.reported)
        reported = self._reported(name, frame.reported)
        return GroupTick(
            number=self.number,
            produced_before=before,
            completed=self.produced[name] - before,
            lost=None,
            ended=self._ended(name, frame.ended),
            joined=self._joined(joined, len(frame.joined)),
            reported=reported,
            acted=self._acted(name, reported, answered),
        )

    def _ended(self, name: str, rows: list[tuple[AgentEpisode, float, float]]) -> AgentsEnded | None:
        if not rows:
            return None
        n = len(rows)
        outcomes = [self.rng.choice([0.0, 0.5, 1.0, -1.0]) for _ in rows] if self._chance(0.5) else None
        interrupted = self._chance(0.5)
        return AgentsEnded(
            slots=np.array([episode.slot for episode, _, _ in rows], np.int32),
            observations=self._observations(name, n),
            rewards=np.array([own for _, own, _ in rows], np.float32),
            group_rewards=self._shared(rows),
            interrupted=np.array([interrupted if self._chance(0.7) else not interrupted for _ in rows], bool),
            outcomes=None if outcomes is None else np.array(outcomes, np.float32),
        )

    def _reported(self, name: str, rows: list[tuple[AgentEpisode, float, float]]) -> OutcomesReported | None:
        if not rows:
            return None
        n, (_, branches) = len(rows), WIDTHS[name]
        masks = np.arange(n * branches * CHOICES).reshape(n, -1) % 4 == self.number % 4
        return OutcomesReported(
            slots=np.array([episode.slot for episode, _, _ in rows], np.int32),
            observations=self._observations(name, n),
            rewards=np.array([own for _, own, _ in rows], np.float32),
            group_rewards=self._shared(rows),
            masks=masks if branches and self._chance(0.6) else None,
        )

    def _shared(self, rows: list[tuple[AgentEpisode, float, float]]) -> Any:
        """Returns group rewards, or at times None where all are 0."""
        shared = np.array([shared for _, _, shared in rows], np.float32)
        return None if not shared.any() and self._chance(0.5) else shared

    def _joined(self, agent_episodes: list[AgentEpisode], fresh: int) -> AgentsStarted | None:
        if not agent_episodes:
            return None
        return AgentsStarted(
            slots=np.array([episode.slot for episode in agent_episodes], np.int32),
            agents=np.array([episode.agent for episode in agent_episodes], np.int64),
            groups=np.array([episode.key for episode in agent_episodes], np.int64),
            teams=np.array([episode.team for episode in agent_episodes], np.int32),
            simulators=np.array([episode.simulator for episode in agent_episodes], np.int32),
            fresh=np.arange(len(agent_episodes)) < fresh,
        )

    def _acted(self, name: str, reported: OutcomesReported | None, answered: Sequence[int]) -> ActionsChosen | None:
        rows = [] if reported is None else [self.agent_episodes[name, slot] for slot in reported.slots.tolist()]
        late = [episode for episode in self.agent_episodes.values() if episode.name == name and episode not in rows]
        rows = [episode for episode in rows + late if episode.state == "waiting" and episode.simulator in answered]
        for episode in rows:
            episode.state = "acting"
        if not rows:
            return None
        n, (continuous, branches) = len(rows), WIDTHS[name]
        carried = self.kind.carried[self.kind.names.index(name)]
        return ActionsChosen(
            slots=np.array([episode.slot for episode in rows], np.int32),
            continuous=self._unused_numbers(continuous * n).reshape(n, continuous) if continuous else None,
            discrete=self._unused_numbers(branches * n).reshape(n, branches).astype(np.int32) if branches else None,
            log_probs=-self._unused_numbers(n),
            versions=np.full(n, self.number // 3 + 1, np.int64),
            carried=self._unused_numbers(carried * n).reshape(n, carried) if carried else None,
        )

    # ---------------------------------------------------------------- numbers

    def _chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def _amount(self) -> float:
        return float(self.rng.randint(-20, 40))

    def _unused_numbers(self, n: int) -> Any:
        """Returns numbers that were never used before."""
        self._numbers += n
        return np.arange(self._numbers - n, self._numbers, dtype=np.float32)

    def _observations(self, name: str, n: int) -> tuple[Any, ...]:
        numbers = self._unused_numbers(n)
        if name == "A":
            return np.stack([numbers, -numbers], 1), (numbers % 251).astype(np.uint8).reshape(n, 1, 1, 1)
        return (numbers[:, None],)


def parts_of(ticks: Sequence[TickResult]) -> list[BehaviorSteps]:
    """Returns several ticks as the parts of one batch."""
    names = sorted({name for tick in ticks for name in tick})
    by_name = {name: [one for tick in ticks for one in tick.get(name, [])] for name in names}
    return [replace(steps_of(by_name[name]), behavior=name) for name in names]
