"""A configuration file, with what the command line overrides, as one `Settings`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Final

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.settings.document import MOST_BYTES, Entry, parse
from sparring.pipeline.settings.explain import located, validate, validate_defaults
from sparring.pipeline.settings.ignored import ignored
from sparring.pipeline.settings.model import Settings
from sparring.pipeline.settings.normal import Overrides, normalise
from sparring.pipeline.settings.problems import Problem, refuse

_OLD_KEYS: Final = frozenset({"trainer", "trainer_type", "hyperparameters", "batch_size", "buffer_size", "max_steps"})
_OLD_CURRICULUM: Final = frozenset({"measure", "parameters", "min_lesson_length", "signal_smoothing"})
_OLD_SAMPLER: Final = "sampler-type"
_OLD_SECTIONS: Final = {"parameter_randomization": "environment_parameters", "curriculum": "environment_parameters"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedSettings:
    """Valid settings and what their author may want to know.

    Attributes:
        settings: the settings.
        notices: old names that were accepted and keys that are ignored, each with its line.
    """

    settings: Settings
    notices: tuple[str, ...] = ()


def load(path: FilePath | str, overrides: Overrides | None = None) -> Settings:
    """The settings in a YAML file.

    Args:
        path: of the file.
        overrides: what the command line says instead.

    Raises:
        SettingsError: all that is wrong with the file, each with line, key, remedy.
    """
    return read(path, overrides).settings


def read(path: FilePath | str, overrides: Overrides | None = None) -> LoadedSettings:
    """As `load`, with notices about what is accepted under an old name, and what is ignored."""
    loaded = parse_settings(_text(FilePath(path)), str(path), overrides)
    folder, pipeline = FilePath(path).absolute().parent, loaded.settings.pipeline
    python_path = tuple(dict.fromkeys(str(folder / one) for one in (".", *pipeline.python_path)))
    pipeline = pipeline.model_copy(update={"python_path": python_path})
    return LoadedSettings(settings=loaded.settings.model_copy(update={"pipeline": pipeline}), notices=loaded.notices)


def parse_settings(text: str, file: str, overrides: Overrides | None = None) -> LoadedSettings:
    """As `read`, from a text.

    Args:
        text: the YAML.
        file: its name, for messages.
        overrides: what the command line says instead.
    """
    root = parse(text, file)
    if old := list(_old_formats(root)):
        raise refuse(file, old)
    defaults, notices = normalise(root, overrides or Overrides())
    wrong = validate_defaults(defaults) if defaults else []
    alone = defaults is not None and root.mapping["behaviors"].value == {}
    if defaults is not None and (alone or not wrong):  # else they count where a behavior adds what is missing
        root.mapping["default_settings"], wrong = defaults, []
    settings, problems = validate(root)
    problems += [problem for problem in wrong if problem.alone]
    if settings is None or problems:
        raise refuse(file, problems)
    notices += [located(root, conflict) for conflict in ignored(settings)]
    return LoadedSettings(settings=settings, notices=tuple(dict.fromkeys(map(str, notices))))


def _text(path: FilePath) -> str:
    try:
        with path.open("rb") as stream:
            raw = stream.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise SettingsError(f"got {path}, more than {MOST_BYTES} bytes; expected a configuration; check the path")
        return raw.decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SettingsError(f"got {path}: {reason}; expected a configuration file; check the path") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"got {path} with {error.reason}; expected text in UTF-8; save it as that") from None


def _old_file(top: dict[str, Entry]) -> Problem | None:
    """What curricula and samplers were written with, in files of their own."""
    for name, entry in top.items():
        own = entry.mapping
        alone = "behaviors" not in top and name in _OLD_CURRICULUM
        if alone or name == "thresholds" or "thresholds" in own:
            got = "a curriculum as before ML-Agents 1.0"
            what = "lessons with a value and completion_criteria (measure, threshold) each"
        elif name == "resampling-interval" or _OLD_SAMPLER in own:
            got = "samplers as before ML-Agents 1.0"
            what = "sampler_type and sampler_parameters (there is no interval: games draw when they ask)"
        else:
            continue
        return Problem(
            place=entry.place,
            text=f"got {got}; expected environment_parameters beside behaviors; "
            f"write for each parameter {what} there, as docs/configuration.md shows",
        )
    return None


def _old_formats(root: Entry) -> Iterator[Problem]:
    """What only formats before ML-Agents 1.0, or a forgotten `behaviors:`, would hold."""
    top = root.mapping
    if (other := _old_file(top)) is not None:
        yield other
        return
    if "default" in top:
        yield Problem(
            place=top["default"].place,
            text="got `default:` at the top, a format before ML-Agents 1.0; expected behaviors and default_settings; "
            "indent each trainer below `behaviors:` and its hyperparameters and network_settings below those keys, "
            "and call the defaults default_settings (ML-Agents' docs/Migrating.md shows how)",
        )
    for name, entry in top.items():
        if name in _OLD_SECTIONS:
            yield Problem(
                place=entry.place,
                text=f"got the section {name!r} of an older format; expected {_OLD_SECTIONS[name]}; "
                "rewrite it as docs/configuration.md shows",
            )
        elif (
            "behaviors" not in top and name not in ("default", "default_settings") and _OLD_KEYS & entry.mapping.keys()
        ):
            yield Problem(
                place=entry.place,
                text=f"got the trainer {name!r} at the top of the file; expected it below behaviors; "
                "write `behaviors:` above it and indent it",
            )
