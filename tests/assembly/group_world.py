"""Random worlds of groups of several behavior names, told as a stepping process tells them.

A simulator sends a frame and waits for its answer: who of it decides or ends in a tick does so together, and nothing
more is heard of it until all who decided have an action. That one came may be told together with others that went.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from sparring.pipeline.messages.steps import ActionsChosen, AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported
from tests.assembly.assembly_world import BehaviorTick, told

SIMULATORS: Final = 3
WIDTHS: Final = {"A": (2, 1), "B": (0, 2), "C": (3, 0)}
"""Continuous actions and branches of each behavior name."""
CHOICES: Final = 3


@dataclass
class Part(BehaviorTick):
    """What happened to one behavior name in a tick; `apart`: only who went away, after all else of the tick."""

    apart: bool = False


TickResult = dict[str, list[Part]]
"""One tick: by behavior name, what happened, and then, under the same number, who went away."""


@dataclass
class AgentEpisode:
    """A live agent. `state`: "new" (decides with its first report), "waiting" for an action, "acting".

    Attributes:
        every: decides at every so many frames of its simulator, or later.
        rested: frames since its last decision.
        base: what its group had earned at its last decision.
        known: the reader was told of it.
        heard: it was, when the agent decided last.
    """

    name: str
    slot: int
    agent: int
    key: int
    team: int
    simulator: int
    every: int = 1
    state: str = "new"
    rested: int = 0
    base: int = 0
    known: bool = False
    heard: bool = False


@dataclass
class Frame:
    """What one or several simulators report in a tick, for one behavior name."""

    ended: list[tuple[AgentEpisode, float, float]] = field(default_factory=list)
    joined: list[AgentEpisode] = field(default_factory=list)
    moved: list[AgentEpisode] = field(default_factory=list)
    reported: list[tuple[AgentEpisode, float, float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a world is like.

    Attributes:
        names: of behaviors.
        groups: of a simulator, besides none.
        churn: how likely agents come and go.
        moving: how likely an agent changes its group with a decision.
        slow: most frames from one decision of an agent to its next.
        losing: how likely a simulator goes away.
        apart: in a tick in which others report, for each behavior name and team by itself; else nobody else does.
        together: members end together, whole groups or simulators.
        carried: numbers that agents carry, by name.
    """

    names: tuple[str, ...] = ("A",)
    groups: int = 2
    churn: float = 0.15
    moving: float = 0.0
    slow: int = 1
    losing: float = 0.0
    apart: bool = False
    together: float = 0.2
    carried: tuple[int, ...] = (0, 0, 0)


class GroupWorld:
    """Simulators with groups of agents that join, decide, move, end and vanish as `rng` says.

    What a group earns is told by somebody at once, so that a reader knows at each decision what it had earned till
    then: else sums over times that only overlap would leave open when it was earned.

    Attributes:
        grants: number of the tick, group key and amount of all that groups earned.
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

    def wake(self) -> TickResult:
        """The next tick; no behavior name where nothing happened."""
        self.number += 1
        before = dict(self.produced)
        leaving = self._chance(self.kind.losing)
        wake: TickResult = {}
        if self.kind.apart or not leaving or self.rejoin:
            wake = self._frames(before)
        if leaving:
            for name, parts in self._lose(self.rng.randrange(SIMULATORS)).items():
                wake.setdefault(name, []).extend(self._gone(name, slots) for slots in parts)
        return wake

    def _frames(self, before: dict[str, int]) -> TickResult:
        frames = {name: Frame() for name in self.kind.names}
        for simulator in range(SIMULATORS):
            if self.ready[simulator] and self._chance(0.8):
                self._frame(simulator, frames)
        wake: TickResult = {}
        answered = [at for at in range(SIMULATORS) if not self.ready[at] and self._chance(0.75)]
        for name, frame in frames.items():
            tick = self._tick(name, before.get(name, 0), frame, answered)
            if any(rows is not None for rows in (tick.ended, tick.joined, tick.reported, tick.acted)):
                wake[name] = [tick]
        self.rejoin = False
        for simulator in answered:
            self.ready[simulator] = True
        return wake

    def new_reader(self) -> None:
        """From here on the reader knows of nobody, until it is told again."""
        for life in self.agent_episodes.values():
            life.known = life.heard = False

    # ---------------------------------------------------------------- who goes away

    def _lose(self, simulator: int) -> dict[str, list[Any]]:
        """Slots of one simulator, by behavior name, for each team where that is told apart."""
        self.ready[simulator] = True
        out: dict[str, list[Any]] = {}
        for name in self.kind.names:
            here = [life for life in self.agent_episodes.values() if life.name == name and life.simulator == simulator]
            teams = [[life for life in here if life.team == team] for team in (0, 1)] if self.kind.apart else [here]
            parts = [np.array([life.slot for life in part], np.int32) for part in teams if part]
            if parts:
                out[name] = parts
            for life in here:
                del self.agent_episodes[name, life.slot]
        return out

    def _gone(self, name: str, slots: Any) -> Part:
        nothing = dict.fromkeys(("ended", "joined", "reported", "acted"))
        return Part(self.number, self.produced[name], 0, lost=slots, **nothing, apart=True)

    # ---------------------------------------------------------------- a frame of a simulator

    def _frame(self, simulator: int, frames: dict[str, Frame]) -> None:
        here = [life for life in self.agent_episodes.values() if life.simulator == simulator]
        for life in here:
            life.rested += 1
        ending = self._ending(here)
        going_on = [life for life in here if life not in ending]
        deciding = [life for life in going_on if life.rested >= life.every and self._chance(0.9)]
        self._earn(ending + deciding)
        for life in ending:
            frames[life.name].ended.append(self._outcome(life))
            del self.agent_episodes[life.name, life.slot]
        again = [self._begin(old.name, old.slot, simulator, old.key) for old in ending if self._chance(0.5)]
        free = [name for name in self.kind.names for _ in range(self._newcomers())]
        new = again + [self._begin(name, self._free_slot(name), simulator, None) for name in free]
        for life in new:
            frames[life.name].joined.append(life)
            life.base = self.earned[life.key]
            frames[life.name].reported.append((life, self._amount(), 0.0))
        for life in deciding:
            frames[life.name].reported.append(self._outcome(life))
            if self._chance(self.kind.moving):
                self._move(life, frames[life.name])
            life.base = self.earned[life.key]
        for life in new + deciding:
            life.rested, life.state = 0, "waiting"
        if new or deciding:
            self.ready[simulator] = False

    def _ending(self, here: Sequence[AgentEpisode]) -> list[AgentEpisode]:
        ending = [life for life in here if self._chance(self.kind.churn)]
        if ending and self._chance(self.kind.together):
            whole = ending[0].key
            ending = [life for life in here if life.key == whole] if self._chance(0.7) else list(here)
        return ending

    def _newcomers(self) -> int:
        if not self.agent_episodes:
            return self.rng.randrange(4)
        return self.rng.choice([1, 2, 6]) if self._chance(self.kind.churn) else 0

    def _earn(self, reporting: Iterable[AgentEpisode]) -> None:
        """Groups earn where somebody tells at once."""
        keys = sorted({life.key for life in reporting if life.heard and life.key})
        for key in keys:
            if self._chance(0.7):
                amount = self.rng.randint(-4, 9)
                self.earned[key] += amount
                self.grants.append((self.number, key, amount))

    def _outcome(self, life: AgentEpisode) -> tuple[AgentEpisode, float, float]:
        self.produced[life.name] += 1
        return life, self._amount(), float(self.earned[life.key] - life.base) if life.key else 0.0

    def _begin(self, name: str, slot: int, simulator: int, key: int | None) -> AgentEpisode:
        self._agents += 1
        if key is None or self._chance(0.3):
            key = self._key(simulator)
        team, every = self.rng.randrange(2), self.rng.randint(1, self.kind.slow)
        life = AgentEpisode(name, slot, self._agents, key, team, simulator, every)
        self.agent_episodes[name, slot] = life
        return life

    def _move(self, life: AgentEpisode, frame: Frame) -> None:
        key = self._key(life.simulator)
        if key != life.key:
            life.key = key
            frame.moved.append(life)

    def _key(self, simulator: int) -> int:
        group = self.rng.randrange(self.kind.groups + 1)
        return group + ((simulator + 1) << 32) if group else 0

    def _free_slot(self, name: str) -> int:
        free = [slot for slot in range(200) if (name, slot) not in self.agent_episodes]
        return free[0] if self._chance(0.8) else self.rng.choice(free)

    # ---------------------------------------------------------------- records

    def _tick(self, name: str, before: int, frame: Frame, answered: Sequence[int]) -> Part:
        joined = frame.joined + frame.moved
        if self.rejoin:
            here = [life for life in self.agent_episodes.values() if life.name == name]
            joined = frame.joined + [life for life in here if life not in frame.joined]
        for life in joined:
            life.known = True
        for life, _, _ in frame.reported:
            life.heard = life.known
        self.rng.shuffle(frame.ended)
        self.rng.shuffle(frame.reported)
        reported = self._reported(name, frame.reported)
        return Part(
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
        flush = self._chance(0.5)
        return AgentsEnded(
            slots=np.array([life.slot for life, _, _ in rows], np.int32),
            observations=self._observations(name, n),
            rewards=np.array([own for _, own, _ in rows], np.float32),
            group_rewards=self._shared(rows),
            interrupted=np.array([flush if self._chance(0.7) else not flush for _ in rows], bool),
            outcomes=None if outcomes is None else np.array(outcomes, np.float32),
        )

    def _reported(self, name: str, rows: list[tuple[AgentEpisode, float, float]]) -> OutcomesReported | None:
        if not rows:
            return None
        return OutcomesReported(
            slots=np.array([life.slot for life, _, _ in rows], np.int32),
            observations=self._observations(name, len(rows)),
            rewards=np.array([own for _, own, _ in rows], np.float32),
            group_rewards=self._shared(rows),
        )

    def _shared(self, rows: list[tuple[AgentEpisode, float, float]]) -> Any:
        """None where nobody got anything, sometimes."""
        shared = np.array([shared for _, _, shared in rows], np.float32)
        return None if not shared.any() and self._chance(0.5) else shared

    def _joined(self, agent_episodes: list[AgentEpisode], fresh: int) -> AgentsStarted | None:
        if not agent_episodes:
            return None
        return AgentsStarted(
            slots=np.array([life.slot for life in agent_episodes], np.int32),
            agents=np.array([life.agent for life in agent_episodes], np.int64),
            groups=np.array([life.key for life in agent_episodes], np.int64),
            teams=np.array([life.team for life in agent_episodes], np.int32),
            simulators=np.array([life.simulator for life in agent_episodes], np.int32),
            fresh=np.arange(len(agent_episodes)) < fresh,
        )

    def _acted(self, name: str, reported: OutcomesReported | None, answered: Sequence[int]) -> ActionsChosen | None:
        rows = [] if reported is None else [self.agent_episodes[name, slot] for slot in reported.slots.tolist()]
        late = [life for life in self.agent_episodes.values() if life.name == name and life not in rows]
        rows = [life for life in rows + late if life.state == "waiting" and life.simulator in answered]
        for life in rows:
            life.state = "acting"
        if not rows:
            return None
        n, (continuous, branches) = len(rows), WIDTHS[name]
        carried = self.kind.carried[self.kind.names.index(name)]
        masks = np.arange(n * branches * CHOICES).reshape(n, -1) % 4 == self.number % 4
        return ActionsChosen(
            slots=np.array([life.slot for life in rows], np.int32),
            continuous=self._numbered(continuous * n).reshape(n, continuous) if continuous else None,
            discrete=self._numbered(branches * n).reshape(n, branches).astype(np.int32) if branches else None,
            log_probs=-self._numbered(n),
            masks=masks if branches and self._chance(0.6) else None,
            versions=np.full(n, self.number // 3 + 1, np.int64),
            carried=self._numbered(carried * n).reshape(n, carried) if carried else None,
        )

    # ---------------------------------------------------------------- numbers

    def _chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def _amount(self) -> float:
        return float(self.rng.randint(-20, 40))

    def _numbered(self, n: int) -> Any:
        """Numbers that were never used before."""
        self._numbers += n
        return np.arange(self._numbers - n, self._numbers, dtype=np.float32)

    def _observations(self, name: str, n: int) -> tuple[Any, ...]:
        numbers = self._numbered(n)
        if name == "A":
            return np.stack([numbers, -numbers], 1), (numbers % 251).astype(np.uint8).reshape(n, 1, 1, 1)
        return (numbers[:, None],)


def parts_of(wakes: Sequence[TickResult]) -> list[BehaviorSteps]:
    """Several ticks as the parts of one batch."""
    names = sorted({name for wake in wakes for name in wake})
    ticks = {name: [tick for wake in wakes for tick in wake.get(name, [])] for name in names}
    return [replace(told(ticks[name]), behavior=name) for name in names]
