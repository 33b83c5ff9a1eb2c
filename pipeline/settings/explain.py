"""Explains errors of validation: each with its line, got, expected, remedy."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Annotated, Final, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sparring.pipeline import plugins
from sparring.pipeline.coordination.settings import OpponentSampling
from sparring.pipeline.errors import did_you_mean
from sparring.pipeline.files import Json
from sparring.pipeline.games import registry
from sparring.pipeline.learning.settings import RewardSignals, TrainerHyperparameters
from sparring.pipeline.networks.settings import EncoderSettings
from sparring.pipeline.settings.conflicts import Conflict, conflicts
from sparring.pipeline.settings.document import Entry, Path, Problem
from sparring.pipeline.settings.model import Settings
from sparring.pipeline.settings.writers import PLUGINS, section_model

_RANGE: Final = "write a value within that range"
_NUMBER: Final = "write a plain one"

_ADD: Final = {
    "behaviors": "write the settings of each behavior name below it, at least `behaviors: {NAME: {}}`",
    "demo_path": "name a demonstration file or folder",
    "value": "write a number or a sampler",
}

_OTHER_WORDS: Final = {
    "clip_coef": "epsilon",
    "clip_range": "epsilon",
    "ent_coef": "beta",
    "entropy_coef": "beta",
    "gae_lambda": "lambd",
    "lr": "learning_rate",
    "n_epochs": "num_epoch",
    "num_epochs": "num_epoch",
    "total_timesteps": "max_steps",
    "train_batch_size": "buffer_size",
    "minibatch_size": "batch_size",
}
"""What other libraries call a key."""

# type of a pydantic error -> expected (a template over its context), remedy
_EXPECTED: Final[dict[str, tuple[str, str]]] = {
    "int_type": ("a whole number", _NUMBER),
    "float_type": ("a number", _NUMBER),
    "finite_number": ("a finite number", "write one"),
    "bool_type": ("true or false", "write one of the two"),
    "string_type": ("a text", "write a text; put it into quotes if it looks like a number"),
    "string_pattern_mismatch": ("a text like {pattern}", "write one"),
    "string_too_short": ("a text that is not empty", "write it, or leave the key out"),
    "greater_than": ("more than {gt:g}", _RANGE),
    "greater_than_equal": ("at least {ge:g}", _RANGE),
    "less_than": ("less than {lt:g}", _RANGE),
    "less_than_equal": ("at most {le:g}", _RANGE),
    "multiple_of": ("a multiple of {multiple_of:g}", "write the next one above or below"),
    "model_type": ("a mapping of keys and values", "indent its keys below it, or leave it out for the defaults"),
    "dict_type": ("a mapping of keys and values", "indent its keys below it, or leave it out"),
    "tuple_type": ("a list", "write [a, b], or one `- item` a line, or leave it out"),
    "too_short": ("at least {min_length} entry", "add one"),
    "missing": ("a pair of numbers", "write [least, greatest]"),
    "too_long": ("at most {max_length} entries", "remove the rest"),
    "literal_error": ("{expected}", "write one of these"),
    "union_tag_invalid": ("one of {expected_tags}", "write one of these"),
    "union_tag_not_found": ("a number, or a mapping with {discriminator}", "write the kind of sampler"),
}


Model = TypeVar("Model", bound=BaseModel)


def validate(root: Entry) -> tuple[Settings | None, list[Problem]]:
    """Returns the settings of a document, and all problems with it."""
    return validate_as(Settings, root, conflicts)


def validate_as(
    model: type[Model], root: Entry, contradictions: Callable[[Model], Iterable[Conflict]]
) -> tuple[Model | None, list[Problem]]:
    """Returns the content of a document as a model, and all problems with it.

    Invalid entries are removed and the rest is validated again, so that one mistake does not hide another. A
    contradiction is reported only if it involves no removed key.
    """
    problems: list[Problem] = []
    removed: list[Path] = []
    while True:
        try:
            settings = model.model_validate(_without(root, frozenset(removed)), context=PLUGINS)
        except ValidationError as error:
            findings = list(_findings(model, root, error))
        else:
            found = [one for one in contradictions(settings) if not _follows(one.paths, removed)]
            problems += [located(root, conflict) for conflict in found]
            return (None if problems else settings), problems
        problems += [finding.problem for finding in findings if not _follows(finding.involves, removed)]
        blamed = [path for finding in findings if (path := _key_of(finding.blame)) and path not in removed]
        if not blamed:
            return None, problems
        removed += blamed


def located(root: Entry, conflict: Conflict) -> Problem:
    """Returns a conflict as a problem at the first of its keys that is written."""
    written = (found for found, way in map(partial(_descend, root), conflict.paths) if way in conflict.paths)
    return Problem(next(written, root).place, conflict.text)


@dataclass(frozen=True, slots=True)
class _Finding:
    """Describes one error of validation.

    Attributes:
        problem: its report.
        blame: entry to remove so that validation can continue.
        involves: the error is a consequence if an entry below one of these was removed before.
    """

    problem: Problem
    blame: Path
    involves: tuple[Path, ...]


def _follows(involved: tuple[Path, ...], removed: list[Path]) -> bool:
    """Returns whether a problem is a consequence of removed entries."""
    return any(
        path[: len(section)] == section or section[: len(path)] == path for path in removed for section in involved
    )


def _flat(error: ValidationError, above: Path = ()) -> Iterator[ErrorDetails]:
    """Yields the errors, and in place of an error of a plug-in's section those within it."""
    for detail in error.errors(include_url=False):
        loc, within = (*above, *detail["loc"]), detail.get("ctx", {}).get("error")
        if isinstance(within, ValidationError):
            yield from _flat(within, loc)
        elif detail["type"] != "default_factory_not_called":  # for lack of a key, whose error is another one
            detail["loc"] = loc
            yield detail


def _findings(model: type[BaseModel], root: Entry, error: ValidationError) -> Iterator[_Finding]:
    details = list(_flat(error))
    for detail in details:
        loc = detail["loc"]
        if not any(len(other["loc"]) > len(loc) and other["loc"][: len(loc)] == loc for other in details):
            yield from _explained(model, root, detail)


def _explained(model: type[BaseModel], root: Entry, detail: ErrorDetails) -> Iterator[_Finding]:
    kind, last = detail["type"], detail["loc"][-1:]
    missing = kind == "missing" and isinstance(last[0], str)
    entry, path = _descend(root, detail["loc"][:-1] if missing else detail["loc"])
    if kind == "value_error":
        yield _refused(model, entry, path, str(detail["ctx"]["error"]))
    elif missing:
        place = replace(entry.place, path=(*entry.place.path, *last))
        text = f"got nothing; expected {last[0]}, which has no default; {_ADD.get(str(last[0]), 'write it')}"
        yield _Finding(Problem(place, text, alone=False), path, ((*path, *last),))
    elif kind == "extra_forbidden" and path[-2:-1] == ("hyperparameters",):
        yield from _unknown_hyperparameter(root, entry, path)
    elif kind == "extra_forbidden":
        yield _Finding(Problem(entry.place, _unknown_key(model, path, _option(root, path))), path, (path,))
    elif kind == "union_tag_not_found" and (unknown := sorted(entry.mapping.keys() - known_keys(path, model))):
        for key in unknown:
            yield _Finding(Problem(entry.mapping[key].place, _unknown_key(model, (*path, key))), path, (path,))
    else:
        yield _Finding(_bad_value(entry, detail), path, (path,))


def _descend(root: Entry, loc: Path) -> tuple[Entry, Path]:
    """Returns the deepest entry along `loc`, and its path; skips steps that are tags of unions."""
    entry = root
    path: Path = ()
    for step in loc:
        child = entry.child(step)
        if child is not None:
            entry, path = child, (*path, step)
    return entry, path


def _refused(model: type[BaseModel], entry: Entry, path: Path, text: str) -> _Finding:
    """Returns the error of a validator of a key or of a model."""
    keys = dict.fromkeys([*known_keys(path, model), *entry.mapping])
    mentioned = {key: found.start() for key in keys if (found := re.search(rf"\b{re.escape(key)}\b", text))}
    written = [entry.mapping[key].place for key in sorted(mentioned, key=mentioned.__getitem__) if key in entry.mapping]
    own = (place for place in written if place.path[:1] != ("default_settings",))
    place = next(own, written[0] if written else entry.place)
    involves = tuple((*path, key) for key in mentioned) if 0 < len(written) == len(mentioned) else (path,)
    return _Finding(Problem(place, text, alone=not entry.mapping), path, involves)


def _unknown_hyperparameter(root: Entry, entry: Entry, path: Path) -> Iterator[_Finding]:
    """Yields the error of a key that the trainer does not have; nothing where the trainer is unknown itself."""
    above, key = path[:-2], str(path[-1])
    written = _descend(root, above)[0].child("trainer_type")
    known = {name: list(one.model_fields) for name, one in plugins.working(plugins.TRAINERS)}
    trainer = "ppo" if written is None else str(written.value)
    if trainer in known:
        others = ", ".join(sorted(name for name, keys in known.items() if key in keys))
        remedy = f"remove it: it belongs to {others}" if others else did_you_mean(key, known[trainer])
        elsewhere = [section for section in _sections_with(key) if section.startswith("behaviors")]
        if elsewhere and not remedy:
            remedy = f"move it: {key} belongs to {_either(elsewhere)}"
        if (own := _OTHER_WORDS.get(key)) in known[trainer]:
            remedy = f"write {own}"
        remedy = remedy or "remove it"
        text = (
            f"got the unknown key {key!r}; expected one of {', '.join(known[trainer])}, which {trainer} has; {remedy}"
        )
        yield _Finding(Problem(entry.place, text), path, (path, (*above, "trainer_type")))


def _option(root: Entry, path: Path) -> str:
    """Returns the remedy for a key that is an option of a bridge, another word for `areas`, or a behavior; or ""."""
    key = str(path[-1])
    behaviors = root.child("behaviors")
    if len(path) == 1 and behaviors is not None and key in behaviors.mapping:
        return f"write behaviors.{key}"
    if path[:1] in (("behaviors",), ("default_settings",)) and key in registry.option_types("pettingzoo")[0]:
        return f"move it: {key} belongs to simulators[].options, of pettingzoo"
    above, name = path[:-1], _descend(root, (*path[:-1], "name"))[0].value
    if above[:1] != ("simulators",) or len(above) != 2 or name not in registry.names():
        return ""
    if path[-1] in ("num_envs", "n_envs"):
        return f"write areas: {_descend(root, path)[0].text} (copies in one process)"
    return "move it into options" if path[-1] in registry.option_types(str(name))[0] else ""


def _unknown_key(model: type[BaseModel], path: Path, better: str = "") -> str:
    key, siblings = str(path[-1]), known_keys(path[:-1], model)
    if better:
        return f"got the unknown key {key!r}; expected one of {', '.join(siblings)}; {better}"
    own = _OTHER_WORDS.get(key, key)
    elsewhere = _sections_with(own, model)
    remedy = did_you_mean(key, siblings)
    if own != key and elsewhere:
        remedy = f"write {own}" + f", which belongs to {_either(elsewhere)}" * (own not in siblings)
    elif elsewhere:
        remedy = f"move it: {key} belongs to {_either(elsewhere)}"
    return f"got the unknown key {key!r}; expected one of {', '.join(siblings)}; {remedy or 'remove it'}"


def _sections_with(key: str, model: type[BaseModel] = Settings) -> list[str]:
    """Returns the sections that have a key: reward signals last, and of these that of the environment first."""
    found = [section for section, name in all_keys(model) if section and name == key]
    return sorted(found, key=lambda section: (".reward_signals" in section, not section.endswith("extrinsic")))


def _either(sections: list[str]) -> str:
    """Returns the first of some sections, and that of the environment's rewards, which all runs have."""
    return " or ".join(dict.fromkeys([sections[0], *(one for one in sections if one.endswith("extrinsic"))]))


def _bad_value(entry: Entry, detail: ErrorDetails) -> Problem:
    kind, context = detail["type"], detail.get("ctx", {})
    expected, remedy = _EXPECTED.get(kind, (detail["msg"], "see docs/configuration.md"))
    got, place = entry.text, entry.place
    if kind.startswith("union_tag") and (tag := entry.child(context["discriminator"].strip("'"))):
        got, place = tag.text, tag.place
    if kind in ("literal_error", "union_tag_invalid"):
        choices = re.findall(r"'([^']*)'", context.get("expected_tags") or context["expected"])
        remedy = did_you_mean(got.strip("'"), choices) or remedy
    if kind == "model_type":
        remedy = (
            "write {} for its defaults" if entry.value is True else "leave it out" if entry.value is False else remedy
        )
    if kind in ("int_type", "float_type", "bool_type") and isinstance(entry.value, str):
        remedy = f"{remedy}, without quotes"
    return Problem(place, f"got {got}; expected {expected.format(**context)}; {remedy}")


def _key_of(path: Path) -> Path:
    """Returns the nearest key above a path: removing a list item would renumber the others."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    return path


def _without(entry: Entry, removed: frozenset[Path], path: Path = ()) -> Json:
    """Returns plain data without the removed keys."""
    if isinstance(entry.value, list):
        return tuple(_without(item, removed, (*path, i)) for i, item in enumerate(entry.items))
    if isinstance(entry.value, dict):
        inner = ((key, item, (*path, key)) for key, item in entry.mapping.items())
        return {key: _without(item, removed, way) for key, item, way in inner if way not in removed}
    return entry.value


# ---------------------------------------------------------------- known keys


def known_keys(path: Path, model: type[BaseModel] = Settings) -> list[str]:
    """Returns the valid keys of the mapping at `path`; none if any key is valid."""
    if path[:1] == ("default_settings",):  # whose keys are those of a behavior
        path = ("behaviors", "", *path[1:])
    return list(dict.fromkeys(key for section, key in (*all_keys(model), *_writer_keys(path)) if _is_at(path, section)))


def _writer_keys(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (section, key) of writers: their names, and the keys that the package of the one in `path` brings."""
    if path == ("writers",):
        yield from (("writers", name) for name in plugins.names(plugins.WRITERS))
    if path[:1] == ("writers",) and len(path) > 1 and (model := section_model(str(path[1]))):
        sections = _sections(model, f"writers.{path[1]}")
        yield from ((section, key) for section, one in sections for key in one.model_fields)


def _is_at(path: Path, section: str) -> bool:
    steps = section.replace("[]", ".[]").split(".") if section else []
    return len(path) == len(steps) and all(
        step == "[]" if isinstance(key, int) else step in (key, "*") for key, step in zip(path, steps, strict=True)
    )


@cache
def all_keys(model: type[BaseModel] = Settings) -> tuple[tuple[str, str], ...]:
    """Returns every (section, key) of a configuration, with `*` for a free name and `[]` for a number."""
    keys = ((section, key) for section, inner in models(model) for key in _keys(inner))
    return tuple(dict.fromkeys(keys))


@cache
def models(model: type[BaseModel] = Settings) -> tuple[tuple[str, type[BaseModel]], ...]:
    """Returns every section of a configuration with its model; once for each model that it may have."""
    return tuple(_sections(model, ""))


def scalars(path: Path) -> set[object]:
    """Returns the types of scalars that the key of a configuration at `path` may have; none if it is unknown."""
    at = [inner.model_fields.get(str(path[-1])) for section, inner in models() if _is_at(path[:-1], section)]
    return {kind for info in at if info is not None for kind in _leaves(info.annotation)}


def _leaves(annotation: object) -> Iterator[object]:
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for argument in inner:
        yield from _leaves(argument)


_PLUGINS: Final[dict[type[BaseModel], str]] = {
    TrainerHyperparameters: plugins.TRAINERS,
    EncoderSettings: plugins.ENCODERS,
    OpponentSampling: plugins.OPPONENTS,
}
"""Models of which a plug-in has one in the same place."""


def _keys(model: type[BaseModel]) -> Iterable[str]:
    return plugins.names(plugins.REWARD_SIGNALS) if model is RewardSignals else model.model_fields


def _sections(annotation: object, section: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yields the sections below a value with this annotation."""
    if isinstance(annotation, type) and annotation in _PLUGINS:
        for _, model in plugins.working(_PLUGINS[annotation]):
            yield from _sections(model, section)
        return
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation is RewardSignals:
            yield section, annotation
            for name, model in plugins.working(plugins.REWARD_SIGNALS):
                yield from _sections(model, f"{section}.{name}")
            return
        yield section, annotation
        for key, info in annotation.model_fields.items():
            if key != "default_settings":
                yield from _sections(info.annotation, f"{section}.{key}".removeprefix("."))
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    end = ".*" if origin is dict else "[]" if origin is tuple else ""
    for argument in arguments[:1] if origin is Annotated else arguments:
        yield from _sections(argument, section + end)
