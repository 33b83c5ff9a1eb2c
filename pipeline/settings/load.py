"""Reads a configuration file, with the overrides of the command line, as one `Settings`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Final

from sparring.pipeline import plugins
from sparring.pipeline.errors import SettingsError, did_you_mean
from sparring.pipeline.files import Json, read_most
from sparring.pipeline.settings.conflicts import Conflict, ignored
from sparring.pipeline.settings.document import (
    DEEPEST,
    MOST_BYTES,
    Entry,
    Path,
    Place,
    Problem,
    implied,
    parse,
    refuse,
)
from sparring.pipeline.settings.explain import located, validate
from sparring.pipeline.settings.model import BehaviorSettings, Settings

COMMAND_LINE: Final = "command line"
OPTIONS: Final[Mapping[str, str]] = {"env_path": "--env", "device": "--torch-device", "export": "--no-export"}
"""Options whose keys have other names."""
_LESSON_KEYS: Final = frozenset({"name", "completion_criteria", "value"})
_KEYS: Final = frozenset(BehaviorSettings.model_fields)
_TRAINER_KEYS: Final = frozenset({"trainer_type", "hyperparameters", "network_settings", "reward_signals", "max_steps"})

Overrides = Mapping[str, Json]
"""What a command line says instead of the file, by dotted key; None leaves the file's word.

`behaviors.*` stands for every behavior, `default_settings` included: `behaviors.*.network_settings.deterministic`.
"""
_RESUME: Final = "checkpoint_settings.resume"
_FORCE: Final = "checkpoint_settings.force"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedSettings:
    """Valid settings and notices for their author.

    Attributes:
        settings: the settings in force.
        notices: old names that were accepted and keys that are ignored, each with its line.
        root: the document.
    """

    settings: Settings
    notices: tuple[str, ...]
    root: Entry

    def problem(self, path: Path, text: str) -> Problem:
        """Returns a problem with what is at a path, at the deepest place along it that is written."""
        return located(self.root, Conflict((path, *(path[:end] for end in range(len(path) - 1, 0, -1))), text))


def read(
    path: FilePath | str,
    overrides: Overrides | None = None,
    assigned: Sequence[str] = (),
    places: Mapping[str, Place] | None = None,
) -> LoadedSettings:
    """Reads the settings in a YAML file, with notices of accepted old names and ignored keys.

    Args:
        path: the file.
        overrides: values of the command line, which replace those of the file.
        assigned: further values of the command line, each as `behaviors.Ball.max_steps=5e5`, as if the file had them.
        places: where another file says some of these.

    Raises:
        SettingsError: lists every problem with line, key and remedy.
    """
    loaded = parse_settings(read_text(FilePath(path)), str(path), overrides, assigned, places)
    folder, pipeline = FilePath(path).absolute().parent, loaded.settings.pipeline
    python_path = tuple(dict.fromkeys(str(folder / one) for one in (".", *pipeline.python_path)))
    pipeline = pipeline.model_copy(update={"python_path": python_path})
    return replace(loaded, settings=loaded.settings.model_copy(update={"pipeline": pipeline}))


def parse_settings(
    text: str,
    file: str,
    overrides: Overrides | None = None,
    assigned: Sequence[str] = (),
    places: Mapping[str, Place] | None = None,
) -> LoadedSettings:
    """Does as `read`, from a text.

    Args:
        text: the YAML.
        file: name for messages.
        overrides: values of the command line, which replace those of the file.
        assigned: further ones, as in `read`.
        places: likewise.
    """
    root = parse(text, file)
    for one in assigned:
        _assign(root, one, (places or {}).get(one, Place(COMMAND_LINE, None)))
    if unnested := _unnested(root):
        raise refuse(file, unnested)
    defaults, notices = normalise(root, overrides or {})
    wrong: list[Problem] = []  # with `default_settings` alone, even if every behavior overrides or completes them
    if defaults is not None:
        wrong = validate(implied({"behaviors": {"default_settings": defaults}}, defaults.place))[1]
        if not wrong or root.mapping["behaviors"].value == {}:  # otherwise a behavior may add what is missing
            root.mapping["default_settings"], wrong = defaults, []
    settings, problems = validate(root)
    problems += [problem for problem in wrong if problem.alone]
    if settings is None or problems:
        raise refuse(file, problems)
    notices += [located(root, conflict) for conflict in ignored(settings)]
    return LoadedSettings(settings=settings, notices=tuple(dict.fromkeys(map(str, notices))), root=root)


_PIPE_S: Final = 10.0


def read_text(path: FilePath) -> str:
    """Returns the text of a configuration file.

    Raises:
        SettingsError: it cannot be read, is too large, or is no text.
    """
    if path.suffix == ".py":
        expected = "a configuration, which names the module of an environment as env_id"
        raise SettingsError(f"got {path}, a file of Python; expected {expected}; see docs/environments.md")
    try:
        raw = read_most(path, MOST_BYTES + 1, _PIPE_S)
        if len(raw) > MOST_BYTES:
            raise SettingsError(f"got {path}, more than {MOST_BYTES} bytes; expected a configuration; check the path")
        return raw.decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        more = "" if path.suffix else f" (`sparring try {path}` tries an environment, which a configuration names)"
        raise SettingsError(f"got {path}: {reason}; expected a configuration file; check the path{more}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"got {path} with {error.reason}; expected text in UTF-8; save it as that") from None


def _unnested(root: Entry) -> list[Problem]:
    """Returns the problem of keys that are on another level than that which their names belong to."""
    top = root.mapping
    behaviors = _section(top, "behaviors")
    for name in [name for name in behaviors if name in Settings.model_fields and not _is_behavior(behaviors[name])]:
        text = f"got the section {name} below behaviors; expected it beside them; move it to the left margin"
        return [Problem(behaviors[name].place, text)]
    own = [name for name, entry in behaviors.items() if name in _KEYS and not _is_behavior(entry)]
    if own:
        others = [name for name in behaviors if name not in _KEYS]
        text = f"got {own[0]} directly below behaviors; expected it below the name of a behavior; " + (
            f"indent it below {others[0]}"
            if others
            else f"write `NAME:` above {own[0]}, with the name that `sparring try` shows, and indent all keys below it"
        )
        return [Problem(behaviors[own[0]].place, text)]
    return [
        Problem(
            place=entry.place,
            text=f"got the trainer {name!r} at the top of the file; expected it below behaviors; "
            "write `behaviors:` above it and indent it",
        )
        for name, entry in top.items()
        if "behaviors" not in top and name != "default_settings" and _TRAINER_KEYS & entry.mapping.keys()
    ]


def _is_behavior(entry: Entry) -> bool:
    """Returns whether an entry below `behaviors` may be a behavior that has the name of a key."""
    return entry.value is None or entry.value == {} or bool(_KEYS & entry.mapping.keys())


_STEP: Final = re.compile(r'\.?(?:"([^"]+)"|([^.\[\]"=]+)|\[([0-9]{1,9})\])')
"""One step of a dotted key: "a name with dots", a name, or [a number]."""


def key_path(text: str) -> tuple[Path, int]:
    """Returns the path that a dotted key at the beginning of a text means, and where the key ends."""
    path: list[str | int] = []
    at = 0
    while step := _STEP.match(text, at):
        path.append(int(step[3]) if step[3] else step[1] or step[2])
        at = step.end()
    return tuple(path), at


def _assign(root: Entry, text: str, place: Place) -> None:
    """Writes KEY=VALUE into a document, as if `place` said it.

    Raises:
        SettingsError: there is no such place, or the value is no YAML.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SettingsError(f"got --set {text!r}; expected text in UTF-8; correct it") from None
    path, at = key_path(text)
    place, entry, last = replace(place, path=path), root, path[-1] if path else 0
    if not isinstance(last, str) or text[at : at + 1] != "=" or len(path) > DEEPEST:
        how = "KEY=VALUE, such as behaviors.Ball.max_steps=5e5 or simulators[0].count=2"
        raise SettingsError(f"got --set {text!r}; expected {how}; correct it")
    behaviors = _section(root.mapping, "behaviors")
    if path[0] == "behaviors" and len(path) > 1 and behaviors and path[1] not in behaviors:
        remedy = did_you_mean(str(path[1]), behaviors) or "name one of them"
        text = f"got {path[1]!r}; expected one of {', '.join(behaviors)}; {remedy}"
        raise refuse(place.file, [Problem(place, text)])
    for step_to in path[:-1]:
        if isinstance(step_to, int) or isinstance(entry.value, list):
            items = {str(number): one for number, one in enumerate(entry.items)}  # simulators.0 is simulators[0]
            if str(step_to) not in items:
                what = f"got entry {step_to} of a list of {len(entry.items)}; expected one that is there; correct it"
                raise refuse(place.file, [Problem(place, what)])
            entry = items[str(step_to)]
            continue
        inner = entry.mapping.get(step_to)
        if inner is None or inner.value is None:
            inner = entry.mapping[step_to] = implied({}, place)
        entry = inner
    if not isinstance(entry.value, dict):
        what = f"got {entry.text} above {last!r}; expected a section; correct the key"
        raise refuse(place.file, [Problem(place, what)])
    value = parse(f"value: {text[at + 1 :]}", place.file).mapping
    if value.keys() != {"value"}:
        raise refuse(place.file, [Problem(place, "got several lines; expected one value; write [a, b] or {a: b}")])
    entry.mapping[last] = _placed(value["value"], place)


def _placed(entry: Entry, place: Place) -> Entry:
    """Returns an entry whose parts are all at one place."""
    value = entry.value
    if isinstance(value, dict):
        value = {key: _placed(inner, place) for key, inner in value.items()}
    elif isinstance(value, list):
        value = [_placed(inner, place) for inner in value]
    return replace(entry, value=value, place=place)


# ---------------------------------------------------------------- the one form that the models know


def option(key: str) -> str:
    """Returns the option of a key, which has the name that `mlagents-learn` gives it."""
    return OPTIONS.get(key) or "--" + key.replace("_", "-")


def normalise(root: Entry, overrides: Overrides) -> tuple[Entry | None, list[Problem]]:
    """Changes a document in place: old names, merged defaults, named lessons, overrides.

    Returns:
        The `default_settings`, taken out and merged, and notices of old names that were accepted.
    """
    top = root.mapping
    for name in [name for name, entry in top.items() if entry.value is None]:
        del top[name]  # a section whose lines are all commented out
    defaults = top.pop("default_settings", None)
    behaviors = _section(top, "behaviors")
    notices = [notice for entry in (defaults, *behaviors.values()) if entry for notice in _old_names(entry)]
    notices += _renamed(_section(top, "checkpoint_settings"), "load_model", "resume", "the old name")
    notices += _renamed(_section(top, "pipeline"), "stall_timeout", "stall_timeout_s", "another name")
    if defaults is not None:
        _complete(defaults)
    for name, behavior in behaviors.items():
        own = replace(behavior, value={}) if behavior.value is None else behavior
        behaviors[name] = own if defaults is None else _merged(_scheduled(defaults, own), own)
    for parameter in _section(top, "environment_parameters").values():
        _name_lessons(parameter)
    if defaults is not None:
        defaults = _scheduled(defaults, defaults)
        top.setdefault("behaviors", replace(defaults, value={}, text="nothing"))
    _override(root, [entry for entry in (defaults, *behaviors.values()) if entry], overrides)
    return defaults, notices


def _section(top: dict[str, Entry], name: str) -> dict[str, Entry]:
    return top[name].mapping if name in top else {}


def _old_names(behavior: Entry) -> Iterator[Problem]:
    """Renames what has another name now; says so, and what of the rest is an old name."""
    self_play = _section(behavior.mapping, "self_play")
    ratios = "play_against_current_self_ratio", "play_against_latest_model_ratio"
    yield from _renamed(self_play, *ratios, "the old name")
    for signal in _section(behavior.mapping, "reward_signals").values():
        size = signal.child("encoding_size")
        if size is None or size.value is None:
            continue
        if "network_settings" in signal.mapping:
            yield Problem(size.place, "has no effect beside network_settings; write hidden_units there")
            continue
        units = signal.mapping.pop("encoding_size")
        signal.mapping["network_settings"] = implied({"hidden_units": units}, size.place)
        yield Problem(size.place, "accepted as the old name of network_settings.hidden_units")
    if (framework := behavior.mapping.pop("framework", None)) is not None:
        yield Problem(framework.place, "has no effect: there is one framework, torch")


def _renamed(section: dict[str, Entry], name: str, now: str, kind: str) -> Iterator[Problem]:
    if name in section and now not in section:
        other = section[now] = section.pop(name)
        yield Problem(other.place, f"accepted as {kind} of {now}")


def _complete(defaults: Entry) -> None:
    """Writes into `default_settings` what follows from other keys of theirs, or is there unless it is written.

    ML-Agents fills them in before a behavior adds to them, so that what follows there follows for every behavior.
    """
    defaults.mapping.setdefault("reward_signals", implied({"extrinsic": {}}, defaults.place))
    defaults.mapping.setdefault("hyperparameters", implied({}, defaults.place))
    self_play = _section(defaults.mapping, "self_play")
    save_steps = self_play.get("save_steps")
    if save_steps is not None and type(save_steps.value) is int and save_steps.value > 0:
        self_play.setdefault("team_change", implied(5 * save_steps.value, save_steps.place))


def _scheduled(defaults: Entry, own: Entry) -> Entry:
    """`defaults` with the schedules that follow from that of the learning rate, if the trainer of `own` has them."""
    trainer = own.child("trainer_type") or defaults.child("trainer_type") or implied("ppo", defaults.place)
    fields = getattr(dict(plugins.working(plugins.TRAINERS)).get(str(trainer.value)), "model_fields", ())
    hyperparameters = defaults.child("hyperparameters")
    if hyperparameters is None or not isinstance(hyperparameters.value, dict):
        return defaults
    schedule = hyperparameters.child("learning_rate_schedule") or implied("linear", hyperparameters.place)
    following = {name: schedule for name in ("beta_schedule", "epsilon_schedule") if name in fields}
    completed = replace(hyperparameters, value={**following, **hyperparameters.mapping})
    return replace(defaults, value={**defaults.mapping, "hyperparameters": completed})


def _merged(defaults: Entry, own: Entry) -> Entry:
    """`own` with what only `defaults` say, mapping by mapping."""
    if not isinstance(defaults.value, dict) or not isinstance(own.value, dict):
        return own
    both = {
        key: _merged(defaults.value[key], entry) if key in defaults.value else entry for key, entry in own.value.items()
    }
    return replace(own, value={**defaults.value, **both})


def _name_lessons(parameter: Entry) -> None:
    """Rewrites a lesson `NAME: {...}` as `{name: NAME, ...}`."""
    curriculum = parameter.child("curriculum")
    lessons = curriculum.items if curriculum else []
    for number, lesson in enumerate(lessons):
        name, body = next(iter(lesson.mapping.items()), ("", lesson))
        if len(lesson.mapping) == 1 and name not in _LESSON_KEYS and isinstance(body.value, dict):
            lessons[number] = replace(body, value={"name": implied(name, body.place), **body.value})


def _override(root: Entry, behaviors: Sequence[Entry], overrides: Overrides) -> None:
    said = {path: value for path, value in overrides.items() if value is not None}
    if said.get(_RESUME) or said.get(_FORCE):
        said = {_RESUME: False, _FORCE: False} | said  # one of the two replaces the other in the file
    for path, value in said.items():
        *sections, key = path.split(".")
        place = Place(COMMAND_LINE, None, (option(key),))
        of_behaviors = sections[:2] == ["behaviors", "*"]
        for entry in behaviors if of_behaviors else [root]:
            for section in sections[2:] if of_behaviors else sections:
                entry = entry.mapping.setdefault(section, implied({}, place))
            entry.mapping[key] = implied(value, place)
