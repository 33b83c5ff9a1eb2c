"""Random agents, tick by tick, and as the BehaviorSteps that stepping would send."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sparring.pipeline.messages.steps import ActionsChosen, AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported

MASK = 3


@dataclass
class AgentEpisode:
    """A live agent. `state`: "new" (decides with its first report), "waiting" for an action, "acting"."""

    slot: int
    agent: int
    group: int
    team: int
    simulator: int
    state: str = "new"


@dataclass
class BehaviorTick:
    """The records of BehaviorSteps for a single tick."""

    number: int
    produced_before: int
    completed: int
    lost: Any
    ended: AgentsEnded | None
    joined: AgentsStarted | None
    reported: OutcomesReported | None
    acted: ActionsChosen | None


def steps_of(ticks: Sequence[BehaviorTick]) -> BehaviorSteps:
    """Returns several ticks as one record; actions omit their slots where these equal the reported ones."""
    slots = [[_slots(tick.reported), _slots(tick.acted)] for tick in ticks]
    same = all(reported == acted for reported, acted in slots)
    acted = _concatenated([tick.acted for tick in ticks if tick.acted is not None])
    if acted is not None and same:
        acted = ActionsChosen(
            **{**{field.name: getattr(acted, field.name) for field in fields(ActionsChosen)}, "slots": None}
        )
    lost = [tick.lost for tick in ticks if tick.lost is not None]
    names = ("ended", "joined", "reported", "acted")
    return BehaviorSteps(
        behavior="B",
        produced_before=ticks[0].produced_before,
        ticks=np.array([tick.number for tick in ticks]),
        completed=np.array([tick.completed for tick in ticks]),
        rows=np.array(
            [
                [0 if tick.lost is None else len(tick.lost), *(len(_slots(getattr(tick, name))) for name in names)]
                for tick in ticks
            ],
            np.int32,
        ),
        lost=np.concatenate(lost) if lost else None,
        ended=_concatenated([tick.ended for tick in ticks if tick.ended is not None]),
        joined=_concatenated([tick.joined for tick in ticks if tick.joined is not None]),
        reported=_concatenated([tick.reported for tick in ticks if tick.reported is not None]),
        acted=acted,
    )


def _slots(rows: Any) -> list[int]:
    return [] if rows is None else list(rows.slots.tolist())


def _concatenated(records: list[Any]) -> Any:
    """Concatenates records of one kind; where only some have a column, the others get its default."""
    if not records:
        return None
    columns: dict[str, Any] = {}
    for field in fields(records[0]):
        parts = [getattr(record, field.name) for record in records]
        if isinstance(parts[0], tuple):
            columns[field.name] = tuple(np.concatenate(column) for column in zip(*parts, strict=True))
        elif all(part is None for part in parts):
            columns[field.name] = None
        else:
            like = next(part for part in parts if part is not None)
            unknown = -1.0 if field.name == "outcomes" else 0
            columns[field.name] = np.concatenate(
                [
                    np.full((len(record.slots), *like.shape[1:]), unknown, like.dtype) if part is None else part
                    for part, record in zip(parts, records, strict=True)
                ]
            )
    return type(records[0])(**columns)


class World:
    """Simulators whose agents join, decide, end and disconnect at random.

    Args:
        rng: makes every choice.
        grouped: agents belong to groups.
        masked: action masks are sent with some parts.
        steady: in most ticks all agents decide and act in the same order, and none ends.
        carried: how many numbers agents carry to each decision; each value is used once.
    """

    def __init__(
        self, rng: random.Random, *, grouped: bool, masked: bool, steady: bool = False, carried: int = 0
    ) -> None:
        self.rng = rng
        self.steady = steady
        self.grouped = grouped
        self.masked = masked
        self.carried = carried
        self.agent_episodes: dict[int, AgentEpisode] = {}
        self.produced = 0
        self.rejoin = False
        self._tick = 0
        self._agents = 0
        self._numbers = 0

    def tick(self) -> BehaviorTick:
        """Returns the next tick."""
        self._tick += 1
        self._calm = self.steady and self._tick > 2 and self._chance(0.9)
        before = self.produced
        lost = self._lose() if not self._calm and self._chance(0.08) else None
        ended, restarting = self._end()
        joined = self._join(restarting)
        reported = self._report()
        acted = self._act(reported)
        return BehaviorTick(
            number=self._tick,
            produced_before=before,
            completed=self.produced - before,
            lost=lost,
            ended=ended,
            joined=joined,
            reported=reported,
            acted=acted,
        )

    # ---------------------------------------------------------------- events

    def _lose(self) -> Any:
        simulator = self.rng.randrange(3)
        gone = [episode.slot for episode in self.agent_episodes.values() if episode.simulator == simulator]
        for slot in gone:
            del self.agent_episodes[slot]
        return np.array(gone, np.int32)

    def _end(self) -> tuple[AgentsEnded | None, list[AgentEpisode]]:
        rows = [
            episode
            for episode in self.agent_episodes.values()
            if episode.state != "new" and not self._calm and self._chance(0.2)
        ]
        if self.grouped and rows and self._chance(0.3):  # a whole group ends together
            rows = [episode for episode in self.agent_episodes.values() if episode.group == rows[0].group]
        self.rng.shuffle(rows)
        restarting = []
        for episode in rows:
            del self.agent_episodes[episode.slot]
            if self._chance(0.5):
                restarting.append(episode)
        self.produced += sum(episode.state == "acting" for episode in rows)
        if not rows:
            return None, restarting
        n = len(rows)
        outcomes = [self.rng.choice([0.0, 0.5, 1.0, -1.0]) for _ in rows] if self._chance(0.5) else None
        return AgentsEnded(
            slots=np.array([episode.slot for episode in rows], np.int32),
            observations=self._observations(n),
            rewards=self._unused_numbers(n),
            group_rewards=self._unused_numbers(n) if self.grouped and self._chance(0.7) else None,
            interrupted=np.array([self._chance(0.4) for _ in rows], bool),
            outcomes=None if outcomes is None else np.array(outcomes, np.float32),
        ), restarting

    def _join(self, restarting: list[AgentEpisode]) -> AgentsStarted | None:
        known = set(self.agent_episodes)
        for old in restarting:  # ends and begins again in the same tick, in the same slot
            self._begin(old.slot, old.simulator)
        for _ in range(0 if self._calm else self.rng.choice([0, 0, 0, 1, 2, 9])):
            free = [slot for slot in range(60) if slot not in self.agent_episodes]
            self._begin(free[0] if self._chance(0.8) else self.rng.choice(free), self.rng.randrange(3))
        rows = [episode for episode in self.agent_episodes.values() if episode.slot not in known]
        fresh = len(rows)
        for slot in sorted(known):
            moved = self.grouped and not self._calm and self._chance(0.05)
            if moved:
                self.agent_episodes[slot].group = self._group()
            if moved or self.rejoin:
                rows.append(self.agent_episodes[slot])
        self.rejoin = False
        if not rows:
            return None
        return AgentsStarted(
            slots=np.array([episode.slot for episode in rows], np.int32),
            agents=np.array([episode.agent for episode in rows], np.int64),
            groups=np.array([episode.group for episode in rows], np.int64),
            teams=np.array([episode.team for episode in rows], np.int32),
            simulators=np.array([episode.simulator for episode in rows], np.int32),
            fresh=np.arange(len(rows)) < fresh,
        )

    def _begin(self, slot: int, simulator: int) -> None:
        self._agents += 1
        self.agent_episodes[slot] = AgentEpisode(slot, self._agents, self._group(), self.rng.randrange(2), simulator)

    def _report(self) -> OutcomesReported | None:
        rows = [
            episode
            for episode in self.agent_episodes.values()
            if episode.state == "new" or (episode.state == "acting" and (self.steady or self._chance(0.8)))
        ]
        if not self.steady:
            self.rng.shuffle(rows)
        self.produced += sum(episode.state == "acting" for episode in rows)
        for episode in rows:
            episode.state = "waiting"
        if not rows:
            return None
        n = len(rows)
        masks = np.arange(n * MASK).reshape(n, MASK) % 4 == self._tick % 4
        return OutcomesReported(
            slots=np.array([episode.slot for episode in rows], np.int32),
            observations=self._observations(n),
            rewards=self._unused_numbers(n),
            group_rewards=self._unused_numbers(n) if self.grouped and self._chance(0.7) else None,
            masks=masks if self.masked and self._chance(0.6) else None,
        )

    def _act(self, reported: OutcomesReported | None) -> ActionsChosen | None:
        if self._calm or self._chance(0.5):  # the usual tick: all reported agents act, in that order
            rows = [] if reported is None else [self.agent_episodes[slot] for slot in reported.slots.tolist()]
        else:
            go = {simulator for simulator in range(3) if self._chance(0.8)}  # the others are backpressured
            rows = [
                episode
                for episode in self.agent_episodes.values()
                if episode.state == "waiting" and episode.simulator in go
            ]
            self.rng.shuffle(rows)
        for episode in rows:
            episode.state = "acting"
        if not rows:
            return None
        n = len(rows)
        return ActionsChosen(
            slots=np.array([episode.slot for episode in rows], np.int32),
            continuous=self._unused_numbers(2 * n).reshape(n, 2),
            discrete=np.arange(n, dtype=np.int32)[:, None] % MASK,
            log_probs=-self._unused_numbers(n),
            versions=np.full(n, self._tick // 3 + 1, np.int64),
            carried=self._unused_numbers(self.carried * n).reshape(n, self.carried) if self.carried else None,
        )

    # ---------------------------------------------------------------- numbers

    def _group(self) -> int:
        return self.rng.randrange(4) if self.grouped else 0

    def _chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def _unused_numbers(self, n: int) -> Any:
        """Returns numbers that were never used before and that add up without rounding."""
        self._numbers += n
        return np.arange(self._numbers - n, self._numbers, dtype=np.float32)

    def _observations(self, n: int) -> tuple[Any, ...]:
        numbers = self._unused_numbers(n)
        return np.stack([numbers, -numbers], 1), (numbers.astype(np.int64) % 251).astype(np.uint8).reshape(n, 1, 1, 1)
