"""Groups by hand: a line for each tick, and what was there at each time in the same letters.

    "+a +b@2 1: c d. e~ f>2 g=3"

`a` joins group 1 and decides, `b` likewise group 2, `@0` is no group; since the last tick group 1 earned 1; `c`
decides, `d` has ended and `e` was cut; `f` decides and goes on in group 2; `g` decides and got 3 for itself. `?a` is
joined under way and decides nothing; `!` at the end of a line: no actions yet; `-a` went away, told apart. The
behavior name is "A" for `a` to `m` and "B" for the others. `a3` is what `a` saw, or did, in tick 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sparring.pipeline.assembly.assembler import Sizes
from sparring.pipeline.assembly.group_assembler import GroupAssembler
from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.steps import ActionsChosen, AgentsEnded, AgentsStarted, OutcomesReported
from tests.assembly.group_views import GroupView, read
from tests.assembly.group_world import Part, TickResult, parts_of

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
class Line:
    """A tick, for one behavior name."""

    ended: list[tuple[str, bool]] = field(default_factory=list)
    joined: list[tuple[str, bool]] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    own: Counter[str] = field(default_factory=Counter)
    shared: dict[str, float] = field(default_factory=dict)


class Story:
    """Tells an assembler of groups, and reads what it says."""

    def __init__(self, horizon: int = 99, *, largest: int = 10**6, sequence: int = 0) -> None:
        sizes = Sizes(horizon=horizon, message_steps=1, largest=largest, sequence=sequence)
        self.carrying = sequence > 0
        self.sequence = sequence
        self.assembler = GroupAssembler("s.1", "a.1", lambda _: sizes)
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

    def tell(self, *lines: str) -> Story:
        for line in lines:
            self.assembler.apply(parts_of([self._wake(line)]))
        return self

    def flush(self, name: str = "A") -> list[str]:
        """Segments of `name`, as `told` writes them."""
        return self.told(self.assembler.flush(name, 1), name)

    def rest(self, name: str = "A") -> list[str]:
        return self.told(self.assembler.rest(), name)

    def told(self, messages: Iterable[Segments], name: str) -> list[str]:
        """A line for each group segment: rewards: who was there at each time | and the next. what became of whom."""
        taken = [decode([bytes(frame) for frame in encode(message)]) for message in messages]
        self.messages += taken
        return [self._line(view, name) for m in taken if m.behavior == name for _, view in read(m, self.sequence)]

    # ---------------------------------------------------------------- reading

    def _line(self, view: GroupView, name: str) -> str:
        rewards = " ".join(f"{reward:g}" for reward in view.rewards)
        times = [" ".join(sorted(self._shown(*one) for one in there)) for there in view.present]
        agents = {agent: letter for letter, agent in self.agent_episodes.items()}
        flags = [(agents[one.who[0]], one.flags) for one in view.own]
        ends = sorted(letter + ("." if over else "~") for letter, (over, flush) in flags if over or flush)
        line = f"{rewards}: {' | '.join(times)}".strip()
        return " ".join([line, *(["over"] if view.over else []), *ends])

    def _shown(self, name: str, seen: Any, did: Any) -> str:
        ((number,),) = seen
        assert did is None or did == ((number,), ()), "what it did is what it decided then"
        assert behavior_of(name_of(number)[0]) == name
        return name_of(number)

    # ---------------------------------------------------------------- telling

    def _wake(self, text: str) -> TickResult:
        self.number += 1
        lines: dict[str, Line] = {"A": Line(), "B": Line()}
        backpressured = text.endswith("!")
        words = text.rstrip("!").split()
        for amount in [word for word in words if word.endswith(":")]:
            group, _, value = amount[:-1].rpartition("@")
            self.earned[int(group or 1)] += int(value)
        for word in words:
            if not word.endswith(":"):
                self._word(word, lines)
        if not backpressured:
            acting, self.waiting = self.waiting, set()
            self.acting |= acting
        else:
            acting = set()
        wake: TickResult = {}
        for name, line in lines.items():
            parts = [self._part(name, line, sorted(one for one in acting if behavior_of(one) == name))]
            parts += [self._empty(name, lost=np.array([ord(one)], np.int32), apart=True) for one in line.lost]
            wake[name] = [part for part in parts if any(getattr(part, kind) is not None for kind in _KINDS)]
        return {name: parts for name, parts in wake.items() if parts}

    def _word(self, word: str, lines: dict[str, Line]) -> None:
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

    def _decide(self, letter: str, line: Line) -> None:
        line.reported.append(letter)
        self.waiting.add(letter)
        self.bases[letter] = self.earned[self.groups[letter]]

    def _forget(self, letter: str) -> None:
        self.acting.discard(letter)
        self.waiting.discard(letter)

    def _empty(self, name: str, **columns: Any) -> Part:
        columns = dict.fromkeys(_KINDS) | {"apart": False, "completed": 0} | columns
        return Part(number=self.number, produced_before=self.produced[name], **columns)

    def _part(self, name: str, line: Line, acting: list[str]) -> Part:
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

    def _outcomes(self, letters: list[str], line: Line) -> dict[str, Any]:
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
