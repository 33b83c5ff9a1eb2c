"""Compares what a machine has with what a run needs, as rows that `sparring doctor` prints.

It uses only the standard library, so that it runs where an installation is incomplete. Facts about the machine are
arguments, so that a test can set them.
"""

import contextlib
import os
import re
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from sparring.pipeline.errors import install_command
from sparring.pipeline.queues.endpoints import LONGEST_PATH

State = Literal["ok", "warn", "bad"]
STATES: Final[Sequence[State]] = ("ok", "warn", "bad")

_GIB: Final = 2**30
_PUBLIC: Final = (".pem", ".yaml")
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


def finding(what: str, got: str, expected: str = "", remedy: str = "", fault: State = "bad") -> Row:
    """Returns a row whose state is `fault` where there is a remedy, else ok."""
    return Row(what=what, state=fault if remedy else "ok", got=got, expected=expected, remedy=remedy)


def worst(rows: Sequence[Row]) -> State:
    """Returns the worst state of all rows; "ok" for none."""
    return max((row.state for row in rows), key=STATES.index, default="ok")


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
        found = _REQUIREMENT.match(text)
        assert found is not None, text
        marked = _EXTRA.search(found["marker"] or "")
        extra = "" if marked is None else marked[1]
        if extra == "test" or ("win32" in text and sys.platform == "win32"):
            continue
        name, floor = found["name"], (found["floor"] or "0").rstrip(".")
        what, wanted, version = (
            f"{name} (extra {extra})" if extra else name,
            not extra or extra in needed,
            installed(name),
        )
        if version is not None:
            remedy = f"{install_command(extra)} -U" if numbers(version) < numbers(floor) else ""
            yield finding(what, version, f">={floor}", remedy, "bad" if wanted else "warn")
        elif wanted:
            yield finding(what, "not installed", f">={floor}", install_command(extra))


def numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers that a version begins with, without zeros at the end: `2.13.0+cu128` gives (2, 13)."""
    found = [int(part) for part in re.findall(r"\d+", re.sub(r"[^\d.].*", "", version))]
    while found and not found[-1]:
        found.pop()
    return tuple(found)


# ---------------------------------------------------------------- where things listen


def port(
    what: str, host: str, number: int, proc: Path = Path("/proc"), *, other: str = "choose another port (0 for any)"
) -> Row:
    """Checks whether a port is free; if not, names the process there. `other` is a further remedy."""
    if (error := _binding_error(host, number)) is None:
        return finding(what, f"{host}:{number} is free")
    by = listener(number, proc)
    got = f"{host}:{number} is not free: {error.strerror}" + (f"; {by} listens there" if by else "")
    return finding(what, got, "a free port", f"stop what uses it, or {other}")


def ours(host: str) -> bool:
    """Returns whether an address belongs to this machine."""
    return _binding_error(host, 0) is None


def _binding_error(host: str, number: int) -> OSError | None:
    """Returns why no program can listen at a port, 0 for any; None where one can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            return error
    return None


def listener(number: int, proc: Path = Path("/proc")) -> str:
    """Returns the process that listens at a TCP port, as "name (pid 12)"; "" where the system does not show it."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in read_text(proc / "net" / table).splitlines()[1:]]
    listening = {one[9] for one in lines if one[3] == "0A" and int(one[1].rpartition(":")[2], 16) == number}
    targets = {f"socket:[{inode}]" for inode in listening - {"0"}}
    for folder in proc.glob("[0-9]*") if targets else ():
        if not targets.isdisjoint(_open_files(folder)):
            return f"{read_text(folder / 'comm').strip()} (pid {folder.name})"
    return ""


def _open_files(process: Path) -> Iterator[str]:
    """Lists what a process has open, as far as this user may see it."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                yield str(link.readlink())


def socket_path(what: str, path: Path) -> Row:
    """Checks whether a Unix socket can be made at a path."""
    got, remedy = str(path), ""
    if len(os.fsencode(path)) > LONGEST_PATH:
        got, remedy = f"{path}, {len(os.fsencode(path))} bytes", "choose a shorter one, as in /tmp"
    elif not os.access(path.parent, os.W_OK):
        got, remedy = f"{path.parent}, which is not there or cannot be written", "make it, or choose another"
    elif path.exists() and _answers(path):
        got, remedy = f"{path}, which is in use", "stop what uses it, or choose another"
    return finding(what, got, f"a path of at most {LONGEST_PATH} bytes in a folder that can be written", remedy)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(os.fspath(path)) == 0


# ---------------------------------------------------------------- what the machine has


def cores(usable: int, busy: int, quota: float | None) -> Row:
    """Checks the CPU cores.

    Args:
        usable: number of cores that this process may run on.
        busy: number of threads that a run keeps busy at once: those of learners and stepping.
        quota: CPU time that a control group allows, in cores; None for no limit.
    """
    got = f"{usable} cores" + ("" if quota is None else f", of which the control group allows {quota:g}")
    expected = f"{busy}: one for each torch thread of learners and stepping, better one more for the rest"
    few = (usable if quota is None else min(usable, quota)) < busy
    remedy = "a run is possible, but slower; lower pipeline.torch_threads, or run on more cores" if few else ""
    return finding("cores", got, expected, remedy, "warn")


def memory(free: int | None, limit: int | None, needed: int) -> Row:
    """Checks the main memory, in bytes.

    Args:
        free: available on the machine, None where the system does not report it.
        limit: what a control group leaves, None for no limit.
        needed: by the processes of a run before they hold any data.
    """
    left = min((value for value in (free, limit) if value is not None), default=None)
    if left is None:
        return finding("memory", "unknown", _size(needed), "check it by hand", "warn")
    got = f"{_size(left)} available" + ("" if limit is None else " within the control group")
    remedy = "run fewer simulators and stepping processes, or end other programs" if left < needed else ""
    return finding("memory", got, f"{_size(needed)} for the processes alone", remedy, "warn")


def descriptors(soft: int, needed: int) -> Row:
    """Checks the limit of open files of a process."""
    return finding("open files", str(soft), f"{needed} at least", f"ulimit -n {needed}" if soft < needed else "")


def free_space(what: str, free: int, *, writable: bool, enough: int, least: int) -> Row:
    """Checks the free space of a folder, in bytes: below `enough` a warning, below `least` no run is possible."""
    expected = f"a folder that can be written, with {_size(enough)} free"
    if not writable:
        return finding(what, "it cannot be written", expected, "choose another")
    remedy = "free some space, or choose a folder on another disk" if free < enough else ""
    return finding(what, f"{_size(free)} free", expected, remedy, "bad" if free < least else "warn")


def private(folder: Path) -> Iterator[Row]:
    """Checks a folder of keys, which no other user may change, and whose secrets no other user may read."""
    if not folder.is_dir():
        yield finding("keys", f"{folder}, which is not there", "a folder of keys", f"sparring keys {folder}")
        return
    found = [path for path in (folder, *sorted(folder.rglob("*"))) if _open_to_others(path)]
    for path in found:
        mode = "700" if path.is_dir() else "600"
        got = f"{path} with mode {stat.S_IMODE(path.stat().st_mode):o}"
        yield finding("keys", got, f"mode {mode}", f"chmod {mode} {path}")
    if not found:
        yield finding("keys", f"{folder}, of which only its owner can read the secrets and change anything")


def _open_to_others(path: Path) -> bool:
    public = path.is_dir() or path.suffix in _PUBLIC
    return bool(path.stat().st_mode & (0o022 if public else 0o077))


def quota_of(cgroup: Path) -> tuple[float | None, int | None]:
    """Returns what a control group (version 2) allows: CPU time in cores, and bytes of memory that are left."""
    names = ("cpu.max", "memory.max", "memory.current")
    (allowed, period), most, used = (read_text(cgroup / name).split() or ("", "") for name in names)
    cpu = int(allowed) / int(period) if allowed.isdigit() else None
    return cpu, int(most[0]) - int(used[0]) if (most[0] + used[0]).isdigit() else None


def available(meminfo: str) -> int | None:
    """Returns the available bytes by the text of `/proc/meminfo`."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def read_text(path: Path) -> str:
    """Returns the text of a file of the system; "" where there is none, or it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
