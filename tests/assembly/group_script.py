"""A script of groups: one line per tick, and results in the same letters.

    "+a +b@2 1: c d. e~ f>2 g=3"

`a` joins group 1 and decides, `b` joins group 2, `@0` is no group; group 1 earned 1 since the last tick; `c` decides,
`d` terminates and `e` is interrupted; `f` decides and moves to group 2; `g` decides with an own reward of 3. `?a` joins
under way without a decision; `-a` is lost, in a part of its own; `!` at the end of a line delays the actions. The
behavior name is "A" for `a` to `m` and "B" for other letters. `a3` is an observation, or the action, of `a` in tick 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sparring.pipeline.assembly.assembler import Assembler
from sparring.pipeline.assembly.members import Sizes
from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.steps import ActionsChosen, AgentsEnded, AgentsStarted, OutcomesReported
from tests.assembly.group_views import GroupView, read
from tests.assembly.group_world import GroupTick, TickResult, parts_of

_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_KINDS: Final = ("lost", "ended", "joined", "reported", "acted")


def behavior_of(letter: str) -> str:
    return "A" if letter < "n" else "B"


def number_of(letter: str, tick: int) -> float:
    return float(100 * tick + _LETTERS.index(letter))


def name_of(number: float) -> str:
    tick, letter = divmod(int(number), 100)
    return f"{_LETTERS[letter]}{tick}"


@dataclass
class TickRows:
    """Collects the rows of one behavior name in a tick."""

    ended: list[tuple[str, bool]] = field(default_factory=list)
    joined: list[tuple[str, bool]] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    own: Counter[str] = field(default_factory=Counter)
    shared: dict[str, float] = field(default_factory=dict)


class GroupScript:
    """Plays ticks to a group assembler, and summarizes its segments."""

    def __init__(self, horizon: int = 99, *, largest: int = 10**6, sequence: int = 0) -> None:
        sizes = Sizes(horizon=horizon, message_steps=1, largest=largest, sequence=sequence)
        self.carrying = sequence > 0
        self.sequence = sequence
        self.assembler = Assembler("s.1", "a.1", lambda _: sizes, in_groups=lambda _: True)
        self.groups: dict[str, int] = {}
        self.agent_episodes: dict[str, int] = {}
        self.earned: Counter[int] = Counter()
        self.bases: dict[str, int] = {}
        self.acting: set[str] = set()
        self.waiting: set[str] = set()
        self.produced: Counter[str] = Counter()
        self.decided: dict[str, float] = {}
        self.number = 0
        self.messages: list[Segments] = []

    def play(self, *lines: str) -> GroupScript:
        for line in lines:
            self.assembler.apply(parts_of([self._parse(line)]))
        return self

    def flush(self, name: str = "A") -> list[str]:
        """Flushes `name`; returns its summaries."""
        return self.summaries(self.assembler.flush(name, 1), name)

    def rest(self, name: str = "A") -> list[str]:
        return self.summaries(self.assembler.rest(), name)

    def summaries(self, messages: Iterable[Segments], name: str) -> list[str]:
        """Returns a line for each group segment: "rewards: members at each time | and the next, ends"."""
        taken = [decode([bytes(frame) for frame in encode(message)]) for message in messages]
        self.messages += taken
        return [self._summary(view, name) for m in taken if m.behavior == name for _, view in read(m, self.sequence)]

    # ---------------------------------------------------------------- summaries

    def _summary(self, view: GroupView, name: str) -> str:
        rewards = " ".join(f"{reward:g}" for reward in view.rewards)
        times = [" ".join(sorted(self._observation_name(*one) for one in members)) for members in view.present]
        agents = {agent: letter for letter, agent in self.agent_episodes.items()}
        flags = [(agents[one.who[0]], one.flags) for one in view.own]
        ends = sorted(
            letter + ("." if terminated else "~") for letter, (terminated, flush) in flags if terminated or flush
        )
        line = f"{rewards}: {' | '.join(times)}".strip()
        return " ".join([line, *(["over"] if view.over else []), *ends])

    def _observation_name(self, name: str, observed: Any, actions: Any) -> str:
        ((number,),) = observed
        assert actions is None or actions == ((number,), ()), "the actions are those of this decision"
        assert behavior_of(name_of(number)[0]) == name
        return name_of(number)

    # ---------------------------------------------------------------- ticks

    def _parse(self, text: str) -> TickResult:
        self.number += 1
        lines: dict[str, TickRows] = {"A": TickRows(), "B": TickRows()}
        backpressured = text.endswith("!")
        words = text.rstrip("!").split()
        for amount in [word for word in words if word.endswith(":")]:
            group, _, value = amount[:-1].rpartition("@")
            self.earned[int(group or 1)] += int(value)
        for word in words:
            if not word.endswith(":"):
                self._parse_word(word, lines)
        if not backpressured:
            acting, self.waiting = self.waiting, set()
            self.acting |= acting
        else:
            acting = set()
        result: TickResult = {}
        for name, line in lines.items():
            parts = [self._part(name, line, sorted(one for one in acting if behavior_of(one) == name))]
            parts += [self._empty(name, lost=np.array([ord(one)], np.int32), is_separate=True) for one in line.lost]
            result[name] = [part for part in parts if any(getattr(part, kind) is not None for kind in _KINDS)]
        return {name: parts for name, parts in result.items() if parts}

    def _parse_word(self, word: str, lines: dict[str, TickRows]) -> None:
        letter = word.strip("+-?.~")[0]
        line = lines[behavior_of(letter)]
        if word[0] == "-":
            line.lost.append(letter)
            self._forget(letter)
        elif word[0] in "+?":
            self.groups[letter] = int(word.partition("@")[2] or 1)
            self.agent_episodes[letter] = len(self.agent_episodes) + 1 + 100 * self.number
            line.joined.append((letter, word[0] == "+"))
            if word[0] == "+":
                self._decide(letter, line)
        else:
            line.own[letter] = int(word.partition("=")[2].rstrip(".~") or 0)
            line.shared[letter] = float(self.earned[self.groups[letter]] - self.bases.get(letter, 0))
            if word[-1] in ".~":
                line.ended.append((letter, word[-1] == "~"))
                self._forget(letter)
            elif ">" in word:
                self.groups[letter] = int(word.partition(">")[2])
                line.joined.append((letter, False))
                self._decide(letter, line)
            else:
                self._decide(letter, line)

    def _decide(self, letter: str, line: TickRows) -> None:
        line.reported.append(letter)
        self.waiting.add(letter)
        self.bases[letter] = self.earned[self.groups[letter]]

    def _forget(self, letter: str) -> None:
        self.acting.discard(letter)
        self.waiting.discard(letter)

    def _empty(self, name: str, **columns: Any) -> GroupTick:
        columns = dict.fromkeys(_KINDS) | {"is_separate": False, "completed": 0} | columns
        return GroupTick(number=self.number, produced_before=self.produced[name], **columns)

    def _part(self, name: str, line: TickRows, acting: list[str]) -> GroupTick:
        ended, reported = [letter for letter, _ in line.ended], line.reported
        completed = sum(one in line.shared for one in ended + reported)
        self.produced[name] += completed
        part = self._empty(name, completed=completed)
        part.produced_before -= completed
        if ended:
            flush = np.array([flush for _, flush in line.ended], bool)
            part.ended = AgentsEnded(interrupted=flush, **self._outcomes(ended, line))
        if line.joined:
            part.joined = self._joined(line.joined)
        if reported:
            part.reported = OutcomesReported(**self._outcomes(reported, line))
        if acting:
            decided = np.array([[self.decided[one]] for one in acting], np.float32)
            part.acted = ActionsChosen(
                slots=np.array([ord(one) for one in acting], np.int32),
                log_probs=np.zeros(len(acting), np.float32),
                versions=np.zeros(len(acting), np.int64),
                continuous=decided,
                carried=decided if self.carrying else None,
            )
        return part

    def _outcomes(self, letters: list[str], line: TickRows) -> dict[str, Any]:
        numbers = [number_of(letter, self.number) for letter in letters]
        self.decided |= dict(zip(letters, numbers, strict=True))
        shared = np.array([line.shared.get(letter, 0.0) for letter in letters], np.float32)
        return {
            "slots": np.array([ord(letter) for letter in letters], np.int32),
            "observations": (np.array(numbers, np.float32)[:, None],),
            "rewards": np.array([line.own[letter] for letter in letters], np.float32),
            "group_rewards": shared if shared.any() else None,
        }

    def _joined(self, letters: list[tuple[str, bool]]) -> AgentsStarted:
        n = len(letters)
        return AgentsStarted(
            slots=np.array([ord(letter) for letter, _ in letters], np.int32),
            agents=np.array([self.agent_episodes[letter] for letter, _ in letters], np.int64),
            groups=np.array([self.groups[letter] for letter, _ in letters], np.int64),
            teams=np.zeros(n, np.int32),
            simulators=np.zeros(n, np.int32),
            fresh=np.array([fresh for _, fresh in letters], bool),
        )
