"""`sparring doctor [CONFIG]`: checks whether this machine can run a configuration, and shows what is missing."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from sparring.pipeline.errors import FAILED, SettingsError, install_command
from sparring.services.commands import doctor_checks as doctor
from sparring.services.commands.doctor_checks import Row

if TYPE_CHECKING:
    from sparring.pipeline.settings import Settings

_GIB: Final = 2**30
_TORCH_BYTES: Final = 400 * 2**20
"""Resident memory of a process that has loaded torch."""
_PLAIN_BYTES: Final = 100 * 2**20
"""Resident memory of a process that has not."""
_PER_SIMULATOR: Final = 4
"""Most descriptors of a simulator."""
_OWN_DESCRIPTORS: Final = 256
_BRIDGES: Final = {"gymnasium": "gymnasium", "pettingzoo": "pettingzoo", "unity": "unity"}
_MARKS: Final = {"ok": "ok  ", "warn": "warn", "bad": "BAD "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="configuration to be run (default: any)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints a row for each requirement; returns 0, or 1 where one is not met.

    Raises:
        SettingsError: the configuration is invalid; `sparring check` prints the same error.
    """
    rows = list(_rows(args.config))
    if args.json:
        sys.stdout.write(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in _lines(rows))
    return FAILED if doctor.worst(rows) == "bad" else 0


def _lines(rows: list[Row]) -> Iterator[str]:
    width = max(len(row.what) for row in rows)
    for row in rows:
        yield f"{_MARKS[row.state]}  {row.what:<{width}}  {row.got}"
        if row.state != "ok":
            yield f"{'':<6}{'':<{width}}  expected {row.expected}; {row.remedy}"
    counts = [(state, sum(row.state == state for row in rows)) for state in _MARKS]
    yield ", ".join(f"{count} {state}" for state, count in counts)


def _rows(config: Path | None) -> Iterator[Row]:
    settings, unread = _settings(config)
    yield _python()
    yield from _libraries(settings)
    if unread is not None:
        yield unread
    yield from _machine(settings)
    if settings is not None:
        yield from _endpoints(settings)
        yield from _programs(settings)
        yield from _keys(settings)


def _settings(config: Path | None) -> tuple[Settings | None, Row | None]:
    """Reads the settings; returns a row instead where an incomplete installation prevents that."""
    if config is None:
        return None, None
    try:
        from sparring.pipeline.settings import read
    except ImportError as error:
        remedy = install_command("train")
        expected = "all libraries of the extra train"
        return None, Row(what="configuration", state="bad", got=str(error), expected=expected, remedy=remedy)
    return read(config).settings, None


# ---------------------------------------------------------------- what is installed


def _python() -> Row:
    floor = "3.11"
    version = platform.python_version()
    if doctor.numbers(version) < doctor.numbers(floor):
        return Row(what="python", state="bad", got=version, expected=f">={floor}", remedy="install a newer one")
    return Row(what="python", state="ok", got=f"{version}, {platform.platform()}", expected=f">={floor}")


def _libraries(settings: Settings | None) -> Iterator[Row]:
    try:
        requirements = importlib.metadata.requires("sparring") or []
    except importlib.metadata.PackageNotFoundError:
        remedy = "pip install . in the folder of the sources"
        yield Row(what="sparring", state="bad", got="not installed", expected="an installation", remedy=remedy)
        return
    yield Row(what="sparring", state="ok", got=importlib.metadata.version("sparring"))
    yield from doctor.versions(requirements, _extras(settings), _installed)


def _extras(settings: Settings | None) -> frozenset[str]:
    """Returns the extras that a run of these settings needs."""
    if settings is None:
        return frozenset({"train"})
    names = {one.name for one in settings.launched if one.name is not None}
    bridges = {extra for name, extra in _BRIDGES.items() if name in names}
    return frozenset({"train", *bridges, *(("onnx",) if settings.pipeline.export else ())})


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------- the machine


def _machine(settings: Settings | None) -> Iterator[Row]:
    cpu, memory = doctor.quota_of(_cgroup())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield doctor.cores(usable, _busy(settings), cpu)
    free = doctor.available(_text(Path("/proc/meminfo")))
    yield doctor.memory(free, memory, _memory_needed(settings))
    if os.name == "posix":
        import resource

        yield doctor.descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _descriptors_needed(settings))
    results = Path("results" if settings is None else settings.checkpoint_settings.results_dir).absolute()
    there = next(folder for folder in (results, *results.parents) if folder.is_dir())
    for what, folder, enough in ((f"results {results}", there, 5), ("temporary files", Path(tempfile.gettempdir()), 1)):
        usage, writable = shutil.disk_usage(folder), os.access(folder, os.W_OK)
        yield doctor.free_space(what, usage.free, writable=writable, enough=enough * _GIB, least=_GIB // 4)
    yield from _clocks()
    yield from _gpu(settings)


def _cgroup() -> Path:
    """Returns the folder of this process's control group (version 2)."""
    own = _text(Path("/proc/self/cgroup")).partition("0::")[2].strip().lstrip("/")
    folder = Path("/sys/fs/cgroup") / own
    return folder if folder.is_dir() else Path("/sys/fs/cgroup")


def _busy(settings: Settings | None) -> int:
    if settings is None:
        return 2
    threads = settings.pipeline.torch_threads
    return threads.learning * len(settings.behaviors) + threads.stepping * settings.pipeline.stepping_processes


def _simulators(settings: Settings | None) -> int:
    return 1 if settings is None else sum(one.count for one in settings.launched)


def _memory_needed(settings: Settings | None) -> int:
    torch = 2 if settings is None else len(settings.behaviors) + settings.pipeline.stepping_processes
    return torch * _TORCH_BYTES + (4 + _simulators(settings)) * _PLAIN_BYTES


def _descriptors_needed(settings: Settings | None) -> int:
    return _OWN_DESCRIPTORS + _PER_SIMULATOR * _simulators(settings)


def _clocks() -> Iterator[Row]:
    clock = time.get_clock_info("monotonic")
    good = clock.monotonic and clock.resolution <= 1e-3
    got = f"monotonic {clock.monotonic}, resolution {clock.resolution:g} s"
    remedy = "" if good else "run on a system that has one"
    expected = "one that only rises, in steps of 1 ms at most"
    yield Row(what="clock", state="ok" if good else "bad", got=got, expected=expected, remedy=remedy)


def _gpu(settings: Settings | None) -> Iterator[Row]:
    seen = sorted(Path("/dev").glob("nvidia[0-9]*"))
    device = None if settings is None else settings.torch_settings.device
    if settings is None or device in (None, "cpu"):
        yield Row(what="gpu", state="ok", got=f"{len(seen)} found, not used: learners train on the CPU")
        return
    from sparring.pipeline.settings import no_device

    if refused := no_device(settings):
        yield Row(what="gpu", state="bad", got=refused.got, expected=refused.expected, remedy=refused.remedy)
    else:
        yield Row(what="gpu", state="ok", got=f"{len(seen)} found, torch_settings.device {device} can be used")


# ---------------------------------------------------------------- what the configuration names


def _endpoints(settings: Settings) -> Iterator[Row]:
    """Checks the addresses at which simulators and services connect."""
    pipeline = settings.pipeline
    parts = urlsplit(pipeline.address)
    for number in range(pipeline.stepping_processes):
        if parts.scheme == "unix":
            path = Path(parts.path if not number else f"{parts.path}.{number}")
            yield doctor.socket_path("pipeline.address", path)
        elif parts.port and not pipeline.hosts:
            yield doctor.port("pipeline.address", parts.hostname or "127.0.0.1", parts.port + number)
    if pipeline.hosts:
        yield from _between_machines(settings)
    elif pipeline.transport != "tcp" and os.name == "posix":
        yield doctor.socket_path("sockets of services", Path(tempfile.gettempdir()) / "sparring-12345678.99")
    for what, port in _games(settings):
        yield doctor.port(what, "127.0.0.1", port, other="choose another with the option port or --base-port")


def _between_machines(settings: Settings) -> Iterator[Row]:
    """Checks the numbered ports of a run on several machines, at the addresses of this machine."""
    what = "ports between machines"
    try:
        wanted = _numbered(settings)
    except (ImportError, SettingsError) as error:
        remedy = "repair that first: the ports are unknown until then"
        yield Row(what=what, state="bad", got=str(error), expected="libraries and keys of a run", remedy=remedy)
        return
    addresses = list(dict.fromkeys(host for host, _ in wanted))
    here = [host for host in addresses if doctor.ours(host)]
    if not here:
        got = f"none of {', '.join(addresses)} is an address of this machine"
        remedy = "run the doctor there too, or correct pipeline.hosts"
        yield Row(what=what, state="warn", got=got, expected="a machine of pipeline.hosts", remedy=remedy)
    for host in here:
        ports = sorted(number for one, number in wanted if one == host)
        rows = [doctor.port(what, host, number, other="set pipeline.port to another first one") for number in ports]
        got = f"{host}: the {len(ports)} from {ports[0]} to {ports[-1]} are free"
        yield from [row for row in rows if row.state != "ok"] or [Row(what=what, state="ok", got=got)]


def _numbered(settings: Settings) -> list[tuple[str, int]]:
    """Returns the addresses and ports of all machines of a run."""
    from sparring.services.supervision.ports import Ports
    from sparring.services.supervision.topology import build

    class FreePortProbe(Ports):
        """Accepts every wanted port as free."""

        def find(self, host: str, wanted: int = 0) -> int:
            del host
            return wanted

    made = build(settings, None, FreePortProbe(), run_id="doctor", directory=Path(), seed=0)
    parts = [urlsplit(address) for address in (*made.run.addresses.values(), *made.endpoints.values())]
    return [(one.hostname, one.port) for one in parts if one.scheme == "tcp" and one.hostname and one.port]


def _games(settings: Settings) -> Iterator[tuple[str, int]]:
    """Lists the ports on which this machine waits for games; those of builds rise with the numbers of simulators."""
    from sparring.pipeline.bridges.godot.game import PORT
    from sparring.pipeline.bridges.unity.build import BUILD_PORT, EDITOR_PORT
    from sparring.pipeline.settings.hosts import main

    number = 0
    for one in settings.launched:
        launched = "path" in one.options
        usual = {"unity": BUILD_PORT if launched else EDITOR_PORT, "godot": PORT}.get(one.name or "", 0)
        port = int(one.options.get("port", usual)) if usual else 0
        anywhere = one.name == "godot" and launched and port == PORT  # it gets another port where this is taken
        if port and not anywhere and one.host in (None, main(settings.pipeline.hosts)):
            what = "port of a Unity player" if one.name == "unity" else "port of a Godot game"
            yield from ((what, port + at) for at in (range(number, number + one.count) if launched else (0,)))
        number += one.count


def _programs(settings: Settings) -> Iterator[Row]:
    from sparring.pipeline.settings import not_here

    for line in not_here(settings):
        yield Row(what="simulators", state="bad", got=line, expected="a program", remedy="correct its path")


def _keys(settings: Settings) -> Iterator[Row]:
    named = os.environ.get("SPARRING_KEYS") or getattr(settings.pipeline, "keys", None)
    if named:
        yield from doctor.private(Path(named))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
