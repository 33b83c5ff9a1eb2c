"""`sparring doctor [CONFIG]`: checks whether this machine can run a configuration, and shows what is missing.

Its checks compare facts about the machine with what a run needs. It imports other libraries only where it uses them, so
that it runs where an installation is incomplete.
"""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

from sparring.pipeline.errors import FAILED, install_command
from sparring.pipeline.files import temporary_folder
from sparring.pipeline.queues.endpoints import LONGEST_PATH, refuse_used_path
from sparring.services.commands.runs import add_assigned, add_json, print_json

if TYPE_CHECKING:
    from sparring.pipeline.settings import Settings

State = Literal["ok", "warn", "bad"]
STATES: Final[Sequence[State]] = ("ok", "warn", "bad")

_GIB: Final = 2**30
_TORCH_BYTES: Final = 400 * 2**20
"""Resident memory of a process that has loaded torch."""
_PLAIN_BYTES: Final = 100 * 2**20
"""Resident memory of a process that has not."""
_PER_SIMULATOR: Final = 4
"""Most descriptors of a simulator."""
_OWN_DESCRIPTORS: Final = 256
_BRIDGES: Final = ("gymnasium", "pettingzoo", "unity")
"""Bridges that need the extra of their name."""
_PUBLIC: Final = (".pem", ".yaml")
"""Files of a folder of keys that other users may read, but not change."""
_REQUIREMENT: Final = re.compile(r"(?P<name>[\w.-]+)\s*(?:>=\s*(?P<floor>[\d.]+))?[^;]*(?:;(?P<marker>.*))?")
_EXTRA: Final = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")
_MARKS: Final = {"ok": "ok  ", "warn": "warn", "bad": "BAD "}


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="configuration to be run (default: any)")
    add_assigned(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a row for each requirement; returns 0, or 1 where one is not met.

    Raises:
        SettingsError: the configuration is invalid; `sparring check` prints the same error.
    """
    rows = list(_rows(args.config, args.assigned))
    if args.json:
        print_json([asdict(row) for row in rows])
    else:
        sys.stdout.writelines(f"{line}\n" for line in _lines(rows))
    return FAILED if worst(rows) == "bad" else 0


def _lines(rows: list[Row]) -> Iterator[str]:
    width = max(len(row.what) for row in rows)
    for row in rows:
        yield f"{_MARKS[row.state]}  {row.what:<{width}}  {row.got}"
        if row.state != "ok":
            yield f"{'':<6}{'':<{width}}  expected {row.expected}; {row.remedy}"
    yield ", ".join(f"{sum(row.state == state for row in rows)} {state}" for state in _MARKS)


def _rows(config: Path | None, assigned: Sequence[str]) -> Iterator[Row]:
    version, settings = platform.python_version(), None
    remedy = "install a newer one" if numbers(version) < (3, 11) else ""
    yield finding("python", f"{version}, {platform.platform()}", ">=3.11", remedy)
    if config is not None:
        try:
            from sparring.pipeline.settings import read

            settings = read(config, assigned=assigned).settings
        except ImportError as error:
            yield finding("configuration", str(error), "all libraries of the extra train", install_command("train"))
    yield from _libraries(settings)
    yield from _machine(settings)
    if settings is not None:
        yield from _endpoints(settings)
        from sparring.pipeline.settings import not_here

        for line in not_here(settings):
            yield finding("simulators", line, "a program", "correct its path")
        if keys := os.environ.get("SPARRING_KEYS") or settings.pipeline.keys:
            yield from private(Path(keys))


# ---------------------------------------------------------------- what is installed


def _libraries(settings: Settings | None) -> Iterator[Row]:
    version = _installed("sparring")
    remedy = "" if version else "pip install . in the folder of the sources"
    yield finding("sparring", version or "not installed", "an installation", remedy)
    if version:
        yield from versions(importlib.metadata.requires("sparring") or [], _extras(settings), _installed)


def _extras(settings: Settings | None) -> frozenset[str]:
    """Returns the extras that a run of these settings needs."""
    if settings is None:
        return frozenset({"train"})
    bridges = {one.name for one in settings.launched if one.name in _BRIDGES}
    return frozenset({"train", *bridges, *(("onnx",) if settings.pipeline.export else ())})


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


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
        if extra == "test":
            continue
        name, floor = found["name"], (found["floor"] or "0").rstrip(".")
        wanted, version = not extra or extra in needed, installed(name)
        what = f"{name} (extra {extra})" if extra else name
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


# ---------------------------------------------------------------- the machine


def _machine(settings: Settings | None) -> Iterator[Row]:
    behaviors, stepping, threads, simulators, results = 1, 1, 2, 1, "results"
    if settings is not None:
        each, ranks = settings.pipeline.torch_threads, settings.pipeline.ranks
        results = settings.checkpoint_settings.results_dir
        behaviors, stepping = len(settings.behaviors), settings.pipeline.stepping_processes
        threads = each.learning * ranks * behaviors + each.stepping * stepping
        simulators = sum(one.count for one in settings.launched)
    cpu, left = quota_of(_cgroup())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield cores(usable, threads, cpu)
    yield memory(_available(), left, (behaviors + stepping) * _TORCH_BYTES + (4 + simulators) * _PLAIN_BYTES)
    needed = _OWN_DESCRIPTORS + _PER_SIMULATOR * simulators
    yield descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[0], needed)
    folder = Path(results).absolute()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if not there.is_dir():
        yield finding("results", f"{there}, which is no folder", "a folder, or none yet", "choose another results_dir")
        there = there.parent
    for what, place, enough in ((f"results {folder}", there, 5), ("temporary files", temporary_folder(), 1)):
        usage, writable = shutil.disk_usage(place), os.access(place, os.W_OK)
        yield free_space(what, usage.free, writable=writable, enough=enough * _GIB, least=_GIB // 4)
    clock = time.get_clock_info("monotonic")
    got = f"monotonic {clock.monotonic}, resolution {clock.resolution:g} s"
    remedy = "" if clock.monotonic and clock.resolution <= 1e-3 else "run on a system that has one"
    yield finding("clock", got, "one that only rises, in steps of 1 ms at most", remedy)
    yield _gpu(settings)


def _cgroup() -> Path:
    """Returns the folder of this process's control group (version 2)."""
    own = read_text(Path("/proc/self/cgroup")).partition("0::")[2].strip().lstrip("/")
    folder = Path("/sys/fs/cgroup") / own
    return folder if folder.is_dir() else Path("/sys/fs/cgroup")


def _gpu(settings: Settings | None) -> Row:
    found = f"{len(list(Path('/dev').glob('nvidia[0-9]*')))} found"
    wanted = [] if settings is None else settings.torch_settings.beside_cpu(settings.behaviors or ("*",))
    if settings is None or not wanted:
        return finding("gpu", f"{found}, not used: learners and stepping use the CPU")
    from sparring.pipeline.settings import no_device

    if refused := no_device(settings):
        return finding("gpu", refused.got, refused.expected, refused.remedy)
    return finding("gpu", f"{found}, {' and '.join(wanted)} can be used")


# ---------------------------------------------------------------- what the configuration names


def _endpoints(settings: Settings) -> Iterator[Row]:
    """Checks the addresses at which simulators and services connect."""
    from sparring.services.process.encryption import socket_paths

    pipeline = settings.pipeline
    parts = urlsplit(pipeline.address)
    for what, path in socket_paths(settings):
        yield socket_path(what, path)
    if parts.port:
        for number in range(parts.port, parts.port + pipeline.stepping_processes):
            yield port("pipeline.address", parts.hostname or "127.0.0.1", number)
    for index in range(pipeline.stepping_processes if pipeline.websocket_address is not None else 0):
        parts = urlsplit(pipeline.websocket_of(index))
        yield port("pipeline.websocket_address", parts.hostname or "127.0.0.1", parts.port or 0)
    for what, number in _games(settings):
        yield port(what, "127.0.0.1", number, other="choose another with the option port or --base-port")


def _games(settings: Settings) -> Iterator[tuple[str, int]]:
    """Lists the ports on which this machine waits for games; those of builds rise with the numbers of simulators."""
    from sparring.pipeline.bridges.godot.game import PORT
    from sparring.pipeline.bridges.unity.build import BUILD_PORT, EDITOR_PORT

    number = 0
    for one in settings.launched:
        launched = "path" in one.options
        usual = {"unity": BUILD_PORT if launched else EDITOR_PORT, "godot": PORT}.get(one.name or "", 0)
        first = int(one.options.get("port", usual)) if usual else 0
        anywhere = one.name == "godot" and launched and first == PORT  # it gets another port where this is taken
        if first and not anywhere:
            what = "port of a Unity player" if one.name == "unity" else "port of a Godot game"
            yield from ((what, first + at) for at in (range(number, number + one.count) if launched else (0,)))
        number += one.count


# ---------------------------------------------------------------- where things listen


def port(what: str, host: str, number: int, *, other: str = "choose another port (0 for any)") -> Row:
    """Checks whether a port is free; if not, names the process there. `other` is a further remedy."""
    if (error := _binding_error(host, number)) is None:
        return finding(what, f"{host}:{number} is free")
    by = _listener(number)
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
        except OverflowError:  # further ports count up
            return OSError(errno.EINVAL, "the last port is 65535")
    return None


def _listener(number: int) -> str:
    """Returns the process that listens at a TCP port, as "name (pid 12)"; "" where the system does not show it."""
    with suppress(ImportError):
        import psutil

        with suppress(psutil.Error, OSError):
            for one in psutil.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN and one.pid and getattr(one.laddr, "port", 0) == number:
                    return f"{psutil.Process(one.pid).name()} (pid {one.pid})"
    return ""


def socket_path(what: str, path: Path) -> Row:
    """Checks whether a Unix socket can be made at a path."""
    got, remedy = str(path), ""
    if len(os.fsencode(path)) > LONGEST_PATH:
        got, remedy = f"{path}, {len(os.fsencode(path))} bytes", "choose a shorter one, as in /tmp"
    elif not os.access(path.parent, os.W_OK):
        got, remedy = f"{path.parent}, which is not there or cannot be written", "make it, or choose another"
    else:
        try:
            refuse_used_path(path)
        except OSError:
            got, remedy = f"{path}, which is in use", "stop what uses it, or choose another"
    return finding(what, got, f"a path of at most {LONGEST_PATH} bytes in a folder that can be written", remedy)


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
    remedy = "a run is possible, but slower; lower pipeline.ranks or torch_threads, or run on more cores" if few else ""
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
    """Checks a folder of keys: a run can use it, and no other user may change it, or read its secrets."""
    if not folder.is_dir():
        yield finding("keys", f"{folder}, which is not there", "a folder of keys", f"sparring keys {folder}")
        return
    found = [path for path in (folder, *sorted(folder.rglob("*"))) if _open_to_others(path)]
    for path in found:
        mode = "700" if path.is_dir() else "600"
        got = f"{path} with mode {stat.S_IMODE(path.stat().st_mode):o}"
        yield finding("keys", got, f"mode {mode}", f"chmod {mode} {path}")
    if found:
        return
    from sparring.services.process.encryption import unusable

    errors = unusable(folder)
    for error in errors:
        yield finding("keys", error.removeprefix("got "), "keys for a run", "make new ones, or copy these again")
    if not errors:
        yield finding("keys", f"{folder}, of which only its owner can read the secrets and change anything")


def _open_to_others(path: Path) -> bool:
    public = path.is_dir() or path.suffix in _PUBLIC
    return path.exists() and bool(path.stat().st_mode & (0o022 if public else 0o077))  # no link to nowhere


def quota_of(cgroup: Path) -> tuple[float | None, int | None]:
    """Returns what a control group (version 2) allows: CPU time in cores, and bytes of memory that are left."""
    names = ("cpu.max", "memory.max", "memory.current")
    (allowed, period), most, used = (read_text(cgroup / name).split() or ("", "") for name in names)
    cpu = int(allowed) / int(period) if allowed.isdigit() else None
    return cpu, int(most[0]) - int(used[0]) if (most[0] + used[0]).isdigit() else None


def _available() -> int | None:
    """Returns the available bytes of main memory; None where psutil is missing."""
    with suppress(ImportError):
        import psutil

        return int(psutil.virtual_memory().available)
    return None


def read_text(path: Path) -> str:
    """Returns the text of a file of the system; "" where there is none, or it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
