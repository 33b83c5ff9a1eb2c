"""Compares what a machine has with what a run needs, as rows that `sparring doctor` prints.

It uses only the standard library, so that it runs where an installation is incomplete. Facts about the machine are
arguments, so that a test can set them.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from sparring.pipeline.errors import install_command

State = Literal["ok", "warn", "bad"]

LONGEST_SOCKET: Final = 107
"""Most bytes of the path of a Unix socket."""

_GIB: Final = 2**30
_PUBLIC: Final = (".public", ".pem", ".yaml")
"""Files of a folder of keys that other users may read, but not change."""
_REQUIREMENT: Final = re.compile(r"(?P<name>[\w.-]+)\s*(?:>=\s*(?P<floor>[\d.]+))?[^;]*(?:;(?P<marker>.*))?")
_EXTRA: Final = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One finding.

    Attributes:
        what: name of the requirement.
        state: ok; warn: a run is possible, but worse; bad: no run is possible.
        got: what was found.
        expected: what a run needs.
        remedy: what the user can do.
    """

    what: str
    state: State
    got: str
    expected: str = ""
    remedy: str = ""


# ---------------------------------------------------------------- what is installed


def versions(
    requirements: Sequence[str], needed: frozenset[str], installed: Callable[[str], str | None]
) -> Iterator[Row]:
    """Checks every library: those of the core, those of needed extras, and those of other extras that are installed.

    Args:
        requirements: as the distribution declares them, `name>=floor; extra == "train"`.
        needed: extras that a run needs.
        installed: version of a distribution, None where it is not installed.
    """
    for text in requirements:
        name, floor, extra = parsed(text)
        if extra == "test" or ("win32" in text and sys.platform == "win32"):
            continue
        version, part = installed(name), f" (extra {extra})" if extra else ""
        wanted = not extra or extra in needed
        install = install_command(extra)
        if version is None:
            if wanted:
                yield Row(what=f"{name}{part}", state="bad", got="not installed", expected=f">={floor}", remedy=install)
        elif numbers(version) < numbers(floor):
            state: State = "bad" if wanted else "warn"
            yield Row(what=f"{name}{part}", state=state, got=version, expected=f">={floor}", remedy=f"{install} -U")
        else:
            yield Row(what=f"{name}{part}", state="ok", got=version, expected=f">={floor}")


def parsed(requirement: str) -> tuple[str, str, str]:
    """Splits a declared requirement into name, floor ("0" for none) and extra ("" for none)."""
    found = _REQUIREMENT.match(requirement)
    assert found is not None, requirement
    extra = _EXTRA.search(found["marker"] or "")
    return found["name"], (found["floor"] or "0").rstrip("."), "" if extra is None else extra[1]


def numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers that a version begins with, without zeros at the end: `2.13.0+cu128` gives (2, 13)."""
    found = [int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part]  # type: ignore[index]
    while found and not found[-1]:
        found.pop()
    return tuple(found)


# ---------------------------------------------------------------- where things listen


def port(
    what: str, host: str, number: int, proc: Path = Path("/proc"), *, other: str = "choose another port (0 for any)"
) -> Row:
    """Checks whether a port is free; if not, names the process there. `other` is a further remedy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            by = listener(number, proc)
            got = f"{host}:{number} is not free: {error.strerror}" + (f"; {by} listens there" if by else "")
            remedy = f"stop what uses it, or {other}"
            return Row(what=what, state="bad", got=got, expected="a free port", remedy=remedy)
    return Row(what=what, state="ok", got=f"{host}:{number} is free")


def ours(host: str) -> bool:
    """Returns whether an address belongs to this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def listener(number: int, proc: Path = Path("/proc")) -> str:
    """Returns the process that listens at a TCP port, as "name (pid 12)"; "" where the system does not show it."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        lines = _read(proc / "net" / table).splitlines()[1:]
        fields = [line.split() for line in lines]
        inodes |= {one[9] for one in fields if one[3] == "0A" and int(one[1].rpartition(":")[2], 16) == number}
    targets = {f"socket:[{inode}]" for inode in inodes - {"0"}}
    for folder in proc.glob("[0-9]*") if targets else ():
        if targets & set(_open_files(folder)):
            return f"{_read(folder / 'comm').strip()} (pid {folder.name})"
    return ""


def _open_files(process: Path) -> Iterator[str]:
    """Lists what a process has open, as far as this user may see it."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                yield str(link.readlink())


def socket_path(what: str, path: Path) -> Row:
    """Checks whether a Unix socket can be made at a path."""
    expected = f"a path of at most {LONGEST_SOCKET} bytes in a folder that can be written"
    if len(os.fsencode(path)) > LONGEST_SOCKET:
        got = f"{path}, {len(os.fsencode(path))} bytes"
        return Row(what=what, state="bad", got=got, expected=expected, remedy="choose a shorter one, as in /tmp")
    if not os.access(path.parent, os.W_OK):
        got = f"{path.parent}, which is not there or cannot be written"
        return Row(what=what, state="bad", got=got, expected=expected, remedy="make it, or choose another")
    if path.exists() and _answers(path):
        remedy = "stop what uses it, or choose another"
        return Row(what=what, state="bad", got=f"{path}, which is in use", expected=expected, remedy=remedy)
    return Row(what=what, state="ok", got=str(path))


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True


# ---------------------------------------------------------------- what the machine has


def cores(usable: int, busy: int, quota: float | None) -> Row:
    """Checks the CPU cores.

    Args:
        usable: number of cores that this process may run on.
        busy: number of threads that a run keeps busy at once: those of learners and stepping.
        quota: CPU time that a control group allows, in cores; None for no limit.
    """
    share = usable if quota is None else min(usable, quota)
    got = f"{usable} cores" + ("" if quota is None else f", of which the control group allows {quota:g}")
    expected = f"{busy}: one for each torch thread of learners and stepping, better one more for the rest"
    if share < busy:
        remedy = "a run is possible, but slower; lower pipeline.torch_threads, or run on more cores"
        return Row(what="cores", state="warn", got=got, expected=expected, remedy=remedy)
    return Row(what="cores", state="ok", got=got, expected=expected)


def memory(free: int | None, limit: int | None, needed: int) -> Row:
    """Checks the main memory, in bytes.

    Args:
        free: available on the machine, None where the system does not report it.
        limit: what a control group leaves, None for no limit.
        needed: by the processes of a run before they hold any data.
    """
    known = [value for value in (free, limit) if value is not None]
    if not known:
        return Row(what="memory", state="warn", got="unknown", expected=_size(needed), remedy="check it by hand")
    got = f"{_size(min(known))} available" + ("" if limit is None else " within the control group")
    expected = f"{_size(needed)} for the processes alone"
    if min(known) < needed:
        remedy = "run fewer simulators and stepping processes, or end other programs"
        return Row(what="memory", state="warn", got=got, expected=expected, remedy=remedy)
    return Row(what="memory", state="ok", got=got, expected=expected)


def descriptors(soft: int, needed: int) -> Row:
    """Checks the limit of open files of a process."""
    expected = f"{needed} at least"
    if soft < needed:
        return Row(what="open files", state="bad", got=str(soft), expected=expected, remedy=f"ulimit -n {needed}")
    return Row(what="open files", state="ok", got=str(soft), expected=expected)


def free_space(what: str, free: int, *, writable: bool, enough: int, least: int) -> Row:
    """Checks the free space of a folder, in bytes: below `enough` a warning, below `least` no run is possible."""
    expected = f"a folder that can be written, with {_size(enough)} free"
    if not writable:
        return Row(what=what, state="bad", got="it cannot be written", expected=expected, remedy="choose another")
    state: State = "bad" if free < least else "warn" if free < enough else "ok"
    remedy = "" if state == "ok" else "free some space, or choose a folder on another disk"
    return Row(what=what, state=state, got=f"{_size(free)} free", expected=expected, remedy=remedy)


def private(folder: Path) -> Iterator[Row]:
    """Checks a folder of keys, which no other user may change, and whose secrets no other user may read."""
    if not folder.is_dir():
        got = f"{folder}, which is not there"
        yield Row(what="keys", state="bad", got=got, expected="a folder of keys", remedy=f"sparring keys {folder}")
        return
    found = [path for path in (folder, *sorted(folder.rglob("*"))) if _open_to_others(path)]
    for path in found:
        mode = "700" if path.is_dir() else "600"
        got = f"{path} with mode {stat.S_IMODE(path.stat().st_mode):o}"
        yield Row(what="keys", state="bad", got=got, expected=f"mode {mode}", remedy=f"chmod {mode} {path}")
    if not found:
        got = f"{folder}, of which only its owner can read the secrets and change anything"
        yield Row(what="keys", state="ok", got=got)


def _open_to_others(path: Path) -> bool:
    public = path.is_dir() or path.suffix in _PUBLIC
    return bool(path.stat().st_mode & (0o022 if public else 0o077))


def quota_of(cgroup: Path) -> tuple[float | None, int | None]:
    """Returns what a control group (version 2) allows: CPU time in cores, and bytes of memory that are left."""
    allowed, _, period = _read(cgroup / "cpu.max").strip().partition(" ")
    cpu = int(allowed) / int(period) if allowed.isdigit() and period.isdigit() and int(period) else None
    most, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    return cpu, int(most) - int(used) if most.isdigit() and used.isdigit() else None


def available(meminfo: str) -> int | None:
    """Returns the available bytes by the text of `/proc/meminfo`."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def worst(rows: Sequence[Row]) -> State:
    """Returns the worst state of all rows; "ok" for none."""
    order: Mapping[State, int] = {"ok": 0, "warn": 1, "bad": 2}
    return max((row.state for row in rows), key=lambda state: order[state], default="ok")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
