"""Shows what a sweep has found: a table, best first, and the configuration with the best values."""

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from sparring.pipeline.files import Json, write_atomically
from sparring.pipeline.settings import read
from sparring.pipeline.settings.load import key_path
from sparring.services.sweeps.space import Values, words_of

Curve = Sequence[tuple[int, float]]
"""The objective over steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Describes a trial, or a member of a population.

    Attributes:
        name: of its folder.
        state: `complete`, `pruned`, `failed`, `interrupted`, or `member`.
        value: of the objective; None for none.
        steps: trained; None if unknown.
        seconds: that it took.
        values: by key.
        own: it has the values of the configuration.
        curve: the objective meanwhile.
        error: why it failed.
    """

    name: str
    state: str
    value: float | None
    steps: int | None
    seconds: float | None
    values: Values
    own: bool = False
    curve: Curve = ()
    error: str = ""

    @property
    def is_whole(self) -> bool:
        """Returns whether it can be the best: it was trained to its end."""
        return self.state in ("complete", "member") and self.value is not None


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Returns outcomes, the best first: whole ones, then pruned ones, then the others."""

    def rank(one: Outcome) -> tuple[bool, bool, float]:
        value = -one.value if one.value is not None else 0.0
        return not one.is_whole, one.state != "pruned", value

    return sorted(outcomes, key=rank)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Returns the last word of each dotted key, and the whole key where several end alike."""
    last = {key: str(key_path(key)[0][-1]) for key in keys}
    count = Counter(last.values())
    return {key: name if count[name] == 1 else key for key, name in last.items()}


def lines(outcomes: Sequence[Outcome], keys: Sequence[str], importance: Mapping[str, float]) -> Iterator[str]:
    """Yields the table for a reader."""
    names = short_names(keys)
    rows = [["", "trial", "value", "state", "steps", "seconds", *names.values()]]
    for place, one in enumerate(ranked(outcomes), 1):
        name = f"{one.name} (the file's own)" if one.own else one.name
        steps = "" if one.steps is None else f"{one.steps:,}"
        cells = [_cell(one.values.get(key), ".4g") for key in keys]
        rows.append([f"{place}", name, _cell(one.value, ".5g"), one.state, steps, _cell(one.seconds, ".0f"), *cells])
    if importance:
        rows.append(["", "importance", "", "", "", "", *(f"{importance.get(key, 0.0):.0%}" for key in keys)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cell(value: Json, form: str) -> str:
    return "" if value is None else format(value, form) if isinstance(value, float) else str(value)


def write_table(path: Path, outcomes: Sequence[Outcome], keys: Sequence[str]) -> None:
    """Writes the table with all digits, as comma-separated values."""
    stream = io.StringIO()
    table = csv.writer(stream)
    table.writerow(["trial", "state", "value", "steps", "seconds", "own", *keys, "error"])
    for one in ranked(outcomes):
        cells = [one.values.get(key) for key in keys]
        table.writerow([one.name, one.state, one.value, one.steps, one.seconds, int(one.own), *cells, one.error])
    write_atomically(path, stream.getvalue().encode())


def write_best(path: Path, config: Path, assigned: Sequence[str], values: Values) -> None:
    """Writes a whole configuration with values of a space: with the length that it has itself."""
    written = read(config, {}, [*assigned, *words_of(values)]).settings.written
    write_atomically(path, yaml.safe_dump(written, sort_keys=False, allow_unicode=True).encode())
