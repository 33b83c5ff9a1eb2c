"""Describes problems of a configuration, each with its place."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from sparring.pipeline.errors import SettingsError

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Describes where something was written.

    Attributes:
        file: path of the file, or `command line`.
        line: counted from 1; None on a command line.
        path: keys and list indices that lead to it.
    """

    file: str
    line: int | None
    path: Path = ()

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{where}: {dotted(self.path)}" if self.path else where


@dataclass(frozen=True, slots=True)
class Problem:
    """Describes one thing to correct.

    Attributes:
        text: got, expected, remedy.
        alone: the key is wrong by itself, whatever other keys are written.
    """

    place: Place
    text: str
    alone: bool = True

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def refuse(file: str, problems: Iterable[Problem]) -> SettingsError:
    """Returns one error with all `problems`, each once, in the order of the lines."""
    ordered = sorted(dict.fromkeys(problems), key=lambda problem: problem.place.line or 0)
    count = "1 problem" if len(ordered) == 1 else f"{len(ordered)} problems"
    return SettingsError("\n".join([f"{count} in {file}", *map(str, ordered)]))


def dotted(path: Path) -> str:
    """Returns a path in its written form: `behaviors.Ball.max_steps`, `simulators[0].count`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}"
    return text.removeprefix(".")


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Returns a question with the most similar of the `known` words; None if none is similar."""
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {nearest[0]}?" if nearest else None
