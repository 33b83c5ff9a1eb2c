"""Reads the folder of keys. What others could read or change is refused, and no message holds a key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sparring.pipeline.errors import SettingsError

ROLES: Final = ("stepping", "assembly", "coordination", "learning", "monitor", "supervisor")
"""Who has a CURVE pair: all processes of a stage share one, and all supervisors of a run."""

CONNECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "steps": ("stepping",),
    "segments": ("assembly",),
    "updates": ("coordination",),
    "topic:stepping": ("coordination", "monitor", "supervisor"),
    "topic:assembly": ("monitor", "supervisor"),
    "topic:coordination": ("stepping", "assembly", "learning", "monitor", "supervisor"),
    "topic:ghosts": ("stepping",),
    "topic:learning": ("coordination", "monitor", "supervisor"),
    "topic:policy": ("stepping", "coordination"),
    "topic:monitor": ("supervisor",),
    "topic:supervisor": ("supervisor",),
    "topic:host": ("supervisor",),
}
"""Who connects to what in the graph: roles by the kind of queue or board."""

_OWNERS: Final = {"steps": "assembly", "segments": "coordination", "updates": "learning"}
_TOPIC_OWNERS: Final = {"ghosts": "coordination", "policy": "learning", "host": "supervisor"}

SIMULATORS: Final = "simulators"
"""The kind of endpoint whose list holds names of simulators, as their certificates have them."""

_KEY: Final = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A CURVE pair.

    Attributes:
        public: in Z85, 40 characters.
        secret: as well; not shown.
    """

    public: str
    secret: str = field(repr=False)


def read_curve(directory: Path, role: str) -> CurveKeys:
    """The pair of a role.

    Raises:
        SettingsError: a file is missing, holds no key, or can be read by others.
    """
    secret = _key(directory / "curve" / f"{role}.secret", secret=True)
    return CurveKeys(public=public_key(directory, role), secret=secret)


def public_key(directory: Path, role: str) -> str:
    """The public key of a role, in Z85. Raises as `read_curve`."""
    return _key(directory / "curve" / f"{role}.public", secret=False)


def endpoint_role(name: str) -> str:
    """The kind of a queue or board: "updates" of "updates:Ball", "topic:stepping" of "topic:stepping-0".

    Raises:
        KeyError: there is no such kind.
    """
    kind, _, rest = name.partition(":")
    kind = f"topic:{rest.partition('-')[0]}" if kind == "topic" else kind
    if kind not in CONNECTIONS:
        raise KeyError(name)
    return kind


def owner(kind: str) -> str:
    """The role that listens at queues or boards of a kind."""
    topic = kind.removeprefix("topic:")
    return _OWNERS[kind] if kind in _OWNERS else _TOPIC_OWNERS.get(topic, topic)


def allowed(directory: Path, role: str) -> frozenset[str]:
    """Who may connect to endpoints of a kind: roles, or names of simulators.

    Args:
        directory: of the keys.
        role: of the endpoint, a key of `CONNECTIONS` or `SIMULATORS`.

    Raises:
        SettingsError: the list is missing, is none, or can be changed by others.
    """
    import yaml  # a simulator's machine may lack it, and reads no list

    path = directory / "allowed.yaml"
    try:
        lists = yaml.safe_load(read_text(path, secret=False))
    except yaml.YAMLError:
        lists = None
    names = lists.get(role) if isinstance(lists, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SettingsError(
            f"got {path}, which has no list of names for {role!r}; expected one that says who may connect there; "
            f"write `{role}: [...]`, or make the keys anew with `sparring keys`"
        )
    return frozenset(names)


def token(directory: Path) -> str:
    """What simulators without a certificate show. Raises as `read_curve`."""
    path = directory / "token"
    text = read_text(path, secret=True).strip()
    if len(text) < 32 or not text.isascii():
        raise _no_key(path, "a token of at least 32 characters")
    return text


def _key(path: Path, *, secret: bool) -> str:
    text = read_text(path, secret=secret).strip()
    if not _KEY.fullmatch(text):
        raise _no_key(path, "a CURVE key of 40 characters")
    return text


def read_text(path: Path, *, secret: bool) -> str:
    """The text of a file of keys; its permissions are those of the file that is read.

    Args:
        path: of the file.
        secret: others may not even read it.

    Raises:
        SettingsError: it is missing, or others can read or change it.
    """
    try:
        with path.open("rb") as file:
            refuse_open(path, os.fstat(file.fileno()).st_mode, secret=secret)
            return file.read(2**20).decode("ascii")
    except OSError as error:
        raise SettingsError(
            f"got {path}, which cannot be read ({error.strerror}); expected a file of keys; "
            "make them with `sparring keys`, or copy this one from where they were made"
        ) from None
    except UnicodeDecodeError:
        raise _no_key(path, "text in ASCII") from None


def refuse_open(path: Path, mode: int, *, secret: bool) -> None:
    """Refuses a file that others than its owner can change, or read where it is a secret.

    Raises:
        SettingsError: they can.
    """
    others = 0o077 if secret else 0o022
    if os.name == "posix" and mode & others:
        can = "read" if secret else "change"
        raise SettingsError(
            f"got {path} with mode {mode & 0o777:o}, which others can {can}; expected mode 600; "
            f"say `chmod 600 {path}`, and make new keys if somebody may have done so"
        )


def _no_key(path: Path, expected: str) -> SettingsError:
    return SettingsError(
        f"got {path}, whose content is something else; expected {expected}; make new keys with `sparring keys`"
    )
