"""Reads YAML as a tree of entries, each with its place in the file, and describes problems with theirs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import yaml

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.files import Json

MOST_BYTES: Final = 2**20
MOST_ENTRIES: Final = 100_000
DEEPEST: Final = 50
LARGEST_INTEGER: Final = 2**53

_TAG: Final = "tag:yaml.org,2002:"
_TOO_DEEP: Final = (
    f"got a document nested deeper than {DEEPEST} levels, larger than {MOST_ENTRIES} entries, or one that "
    "contains itself; expected a configuration; remove the anchors or brackets that expand it"
)
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


# ---------------------------------------------------------------- reading


@dataclass(kw_only=True, slots=True)
class Entry:
    """Holds a value of the document.

    Attributes:
        value: a dict or list of entries, or a scalar.
        place: its place in the file.
        text: its form in a message.
    """

    value: Json
    place: Place
    text: str

    @property
    def mapping(self) -> dict[str, Entry]:
        """Returns the entries by key; an empty dict if the value is no mapping."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def items(self) -> list[Entry]:
        """Returns the entries in order; an empty list if the value is no list."""
        return self.value if isinstance(self.value, list) else []

    def child(self, key: str | int) -> Entry | None:
        """Returns the entry at a key or index, if there is one."""
        if isinstance(key, str):
            return self.mapping.get(key)
        return self.items[key] if key < len(self.items) else None


def implied(value: Json | Entry, place: Place) -> Entry:
    """Returns a value that follows from something else in the document, as an entry at the place of that."""
    if isinstance(value, Entry):
        return value
    if isinstance(value, dict):
        return Entry(value={key: implied(inner, place) for key, inner in value.items()}, place=place, text="a mapping")
    if isinstance(value, list):
        return Entry(value=[implied(inner, place) for inner in value], place=place, text="a list")
    return Entry(value=value, place=place, text=repr(value))


class _Loader(yaml.SafeLoader):
    """Loads YAML with the plain scalars that people expect: 5e5 is a number, 010 is ten, 1:30 is text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - a class attribute of the base class


for _name, _pattern, _first in (
    ("bool", r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", "yYnNtTfFoO"),
    ("int", r"[-+]?(?:[0-9][0-9_]*|0x[0-9a-fA-F]+)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", r"<<", "<"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), list(_first))


def parse(text: str, file: str, example: str = "behaviors: {Ball: {trainer_type: ppo}}") -> Entry:
    """Returns the tree of a YAML text whose top is a mapping.

    Args:
        text: the whole file.
        file: name of the file, for messages.
        example: of such a text, whose key is missing in an empty one.

    Raises:
        SettingsError: the text is no YAML or no mapping, repeats a key, or exceeds a limit.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise refuse(file, [_syntax(error, text, file)]) from None
    except RecursionError:
        raise refuse(file, [Problem(Place(file, 1), _TOO_DEEP)]) from None
    if not isinstance(node, yaml.MappingNode):
        got = "an empty file" if node is None else f"{_kind(node)} at the top"
        key = example.partition(":")[0]
        text = f"got {got}; expected a mapping with the key {key}; write for example `{example}`"
        raise refuse(file, [Problem(Place(file, 1), text)])
    builder = _Builder(file)
    entry = builder.entry(node, (), node.start_mark.line + 1)
    if builder.problems:
        raise refuse(file, builder.problems)
    return entry


class _Builder:
    """Turns nodes into entries and collects the problems."""

    def __init__(self, file: str) -> None:
        self.problems: list[Problem] = []
        self._file = file
        self._count = 0

    def entry(self, node: yaml.Node, path: Path, line: int) -> Entry:
        self._count += 1
        place = Place(self._file, line, path)
        if len(path) > DEEPEST or self._count > MOST_ENTRIES:
            raise refuse(self._file, [Problem(Place(self._file, line, path[:3]), _TOO_DEEP)])
        if not isinstance(node, yaml.ScalarNode) and node.tag not in (_TAG + "map", _TAG + "seq"):
            self._refuse(line, path, f"got {_kind(node)} tagged {node.tag}; expected one without a tag; remove the tag")
        if isinstance(node, yaml.MappingNode):
            return Entry(value=self._mapping(node, path), place=place, text="a mapping")
        if isinstance(node, yaml.SequenceNode):
            items = [self.entry(item, (*path, i), item.start_mark.line + 1) for i, item in enumerate(node.value)]
            return Entry(value=items, place=place, text="a list")
        return self._scalar(node, place)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        merged: dict[str, Entry] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(line, path, f"got {_kind(key)} as a key; expected a word; correct it")
            elif not is_text(key.value):
                self._refuse(line, path, f"got {key.value!r} as a key; expected a word; correct it")
            elif key.tag == _TAG + "merge":
                for source in self._merged(value, path, line):
                    merged = {**source, **merged}
            elif key.value in entries:
                first = entries[key.value].place.line
                text = f"got the key a second time, after line {first}; expected it once; delete one of them"
                self._refuse(line, (*path, key.value), text)
            else:
                entries[key.value] = self.entry(value, (*path, key.value), line)
        return {**merged, **entries}

    def _merged(self, node: yaml.Node, path: Path, line: int) -> Iterator[dict[str, Entry]]:
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if isinstance(source, yaml.MappingNode):
                yield self.entry(source, (*path, "<<"), line).mapping
            else:
                text = f"got << with {_kind(source)}; expected a mapping to merge; refer to the anchor of one"
                self._refuse(line, path, text)

    def _refuse(self, line: int, path: Path, text: str) -> None:
        self.problems.append(Problem(Place(self._file, line, path), text))

    def _scalar(self, node: yaml.Node, place: Place) -> Entry:
        kind = node.tag.removeprefix(_TAG)
        text = repr(node.value) if kind == "str" else node.value or "nothing"
        try:
            value = _READ[kind](node.value)
        except (KeyError, ValueError):
            expected = "a scalar that YAML itself defines, whole numbers up to 2^53"
            problem = f"got {node.value!r} ({node.tag}); expected {expected}; correct the value"
            self.problems.append(Problem(place, problem))
            value = None
        if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_INTEGER and not _is_option(place):
            value = int(value)  # so that 5.0e5 is a valid number of steps
        return Entry(value=value, place=place, text=text)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.CollectionNode):
        return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
    return "a scalar"


def _whole(text: str) -> int:
    value = int(text, 16 if "x" in text.lower() else 10)
    if abs(value) > LARGEST_INTEGER:
        raise ValueError(text)
    return value


def is_text(text: str) -> bool:
    """Returns whether a text can be in a file and an argument of a program, as those with half a character cannot."""
    return re.search("[\0\ud800-\udfff]", text) is None


def _text(text: str) -> str:
    if not is_text(text):
        raise ValueError(text)
    return text


_READ: Final[Mapping[str, Callable[[str], str | bool | float | None]]] = {
    "str": _text,
    "null": lambda _: None,
    "bool": lambda text: text.lower() in ("yes", "true", "on"),
    "int": _whole,
    "float": lambda text: float(text.lower().replace("_", "").replace(".inf", "inf").replace(".nan", "nan")),
}
"""What reads a scalar of each kind."""


def _is_option(place: Place) -> bool:
    return place.path[:1] == ("simulators",) and "options" in place.path


def _syntax(error: yaml.YAMLError, text: str, file: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    line = mark.line + 1 if mark is not None else text.count("\n", 0, getattr(error, "position", 0)) + 1
    got = f"text that is no YAML ({getattr(error, 'problem', None) or 'characters that YAML does not allow'})"
    lines = text.splitlines()
    if line <= len(lines) and "\t" in lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())]:
        got = "a tab in the indentation"
    elif "<document start>" in got:
        got = "a line with less indentation than the first one, which may lack a key above it, as `behaviors:`"
    remedy = "correct the line, or the one before it (indent with spaces, a space after each colon, quotes in pairs)"
    return Problem(Place(file, line), f"got {got}; expected YAML; {remedy}")
