"""Reads a configuration file, with the overrides of the command line, as one `Settings`."""

from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Final

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.settings.conflicts import ignored
from sparring.pipeline.settings.document import MOST_BYTES, Entry, parse
from sparring.pipeline.settings.explain import located, validate, validate_defaults
from sparring.pipeline.settings.model import Settings
from sparring.pipeline.settings.normal import Overrides, normalise
from sparring.pipeline.settings.problems import Problem, refuse

_TRAINER_KEYS: Final = frozenset({"trainer_type", "hyperparameters", "network_settings", "reward_signals", "max_steps"})


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedSettings:
    """Valid settings and notices for their author.

    Attributes:
        settings: the settings in force.
        notices: old names that were accepted and keys that are ignored, each with its line.
    """

    settings: Settings
    notices: tuple[str, ...] = ()


def load(path: FilePath | str, overrides: Overrides | None = None) -> Settings:
    """Reads the settings in a YAML file.

    Args:
        path: the file.
        overrides: values of the command line, which replace those of the file.

    Raises:
        SettingsError: lists every problem with line, key and remedy.
    """
    return read(path, overrides).settings


def read(path: FilePath | str, overrides: Overrides | None = None) -> LoadedSettings:
    """Does as `load`, and returns notices of accepted old names and ignored keys."""
    loaded = parse_settings(_text(FilePath(path)), str(path), overrides)
    folder, pipeline = FilePath(path).absolute().parent, loaded.settings.pipeline
    python_path = tuple(dict.fromkeys(str(folder / one) for one in (".", *pipeline.python_path)))
    pipeline = pipeline.model_copy(update={"python_path": python_path})
    return LoadedSettings(settings=loaded.settings.model_copy(update={"pipeline": pipeline}), notices=loaded.notices)


def parse_settings(text: str, file: str, overrides: Overrides | None = None) -> LoadedSettings:
    """Does as `read`, from a text.

    Args:
        text: the YAML.
        file: name for messages.
        overrides: values of the command line, which replace those of the file.
    """
    root = parse(text, file)
    if unnested := _unnested(root):
        raise refuse(file, unnested)
    defaults, notices = normalise(root, overrides or {})
    wrong = validate_defaults(defaults) if defaults else []
    alone = defaults is not None and root.mapping["behaviors"].value == {}
    if defaults is not None and (alone or not wrong):  # otherwise a behavior may add what is missing
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


def _unnested(root: Entry) -> list[Problem]:
    """Returns a problem for each trainer at the top of a file without `behaviors:`."""
    top = root.mapping
    return [
        Problem(
            place=entry.place,
            text=f"got the trainer {name!r} at the top of the file; expected it below behaviors; "
            "write `behaviors:` above it and indent it",
        )
        for name, entry in top.items()
        if "behaviors" not in top and name != "default_settings" and _TRAINER_KEYS & entry.mapping.keys()
    ]
