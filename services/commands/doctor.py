"""`sparring doctor [CONFIG]`: checks whether this machine can run a configuration, and shows what is missing."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
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
from sparring.services.commands.doctor_checks import Row, finding
from sparring.services.commands.runs import add_json, print_json

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
_BRIDGES: Final = ("gymnasium", "pettingzoo", "unity")
"""Bridges that need the extra of their name."""
_MARKS: Final = {"ok": "ok  ", "warn": "warn", "bad": "BAD "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="configuration to be run (default: any)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a row for each requirement; returns 0, or 1 where one is not met.

    Raises:
        SettingsError: the configuration is invalid; `sparring check` prints the same error.
    """
    rows = list(_rows(args.config))
    if args.json:
        print_json([dataclasses.asdict(row) for row in rows])
    else:
        sys.stdout.writelines(f"{line}\n" for line in _lines(rows))
    return FAILED if doctor.worst(rows) == "bad" else 0


def _lines(rows: list[Row]) -> Iterator[str]:
    width = max(len(row.what) for row in rows)
    for row in rows:
        yield f"{_MARKS[row.state]}  {row.what:<{width}}  {row.got}"
        if row.state != "ok":
            yield f"{'':<6}{'':<{width}}  expected {row.expected}; {row.remedy}"
    yield ", ".join(f"{sum(row.state == state for row in rows)} {state}" for state in _MARKS)


def _rows(config: Path | None) -> Iterator[Row]:
    version, settings = platform.python_version(), None
    remedy = "install a newer one" if doctor.numbers(version) < (3, 11) else ""
    yield finding("python", f"{version}, {platform.platform()}", ">=3.11", remedy)
    if config is not None:
        try:
            from sparring.pipeline.settings import read

            settings = read(config).settings
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
            yield from doctor.private(Path(keys))


# ---------------------------------------------------------------- what is installed


def _libraries(settings: Settings | None) -> Iterator[Row]:
    version = _installed("sparring")
    remedy = "" if version else "pip install . in the folder of the sources"
    yield finding("sparring", version or "not installed", "an installation", remedy)
    if version:
        yield from doctor.versions(importlib.metadata.requires("sparring") or [], _extras(settings), _installed)


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


# ---------------------------------------------------------------- the machine


def _machine(settings: Settings | None) -> Iterator[Row]:
    behaviors, stepping, threads, simulators, results = 1, 1, 2, 1, "results"
    if settings is not None:
        each, results = settings.pipeline.torch_threads, settings.checkpoint_settings.results_dir
        behaviors, stepping = len(settings.behaviors), settings.pipeline.stepping_processes
        threads = each.learning * behaviors + each.stepping * stepping
        simulators = sum(one.count for one in settings.launched)
    cpu, memory = doctor.quota_of(_cgroup())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield doctor.cores(usable, threads, cpu)
    needed = (behaviors + stepping) * _TORCH_BYTES + (4 + simulators) * _PLAIN_BYTES
    yield doctor.memory(doctor.available(doctor.read_text(Path("/proc/meminfo"))), memory, needed)
    if os.name == "posix":
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        yield doctor.descriptors(limit, _OWN_DESCRIPTORS + _PER_SIMULATOR * simulators)
    folder = Path(results).absolute()
    there = next(one for one in (folder, *folder.parents) if one.is_dir())
    for what, place, enough in ((f"results {folder}", there, 5), ("temporary files", Path(tempfile.gettempdir()), 1)):
        usage, writable = shutil.disk_usage(place), os.access(place, os.W_OK)
        yield doctor.free_space(what, usage.free, writable=writable, enough=enough * _GIB, least=_GIB // 4)
    clock = time.get_clock_info("monotonic")
    got = f"monotonic {clock.monotonic}, resolution {clock.resolution:g} s"
    remedy = "" if clock.monotonic and clock.resolution <= 1e-3 else "run on a system that has one"
    yield finding("clock", got, "one that only rises, in steps of 1 ms at most", remedy)
    yield _gpu(settings)


def _cgroup() -> Path:
    """Returns the folder of this process's control group (version 2)."""
    own = doctor.read_text(Path("/proc/self/cgroup")).partition("0::")[2].strip().lstrip("/")
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
        yield doctor.socket_path(what, path)
    if pipeline.hosts:
        yield from _between_machines(settings)
    elif parts.port:
        for port in range(parts.port, parts.port + pipeline.stepping_processes):
            yield doctor.port("pipeline.address", parts.hostname or "127.0.0.1", port)
    for what, port in _games(settings):
        yield doctor.port(what, "127.0.0.1", port, other="choose another with the option port or --base-port")


def _between_machines(settings: Settings) -> Iterator[Row]:
    """Checks the numbered ports of a run on several machines, at the addresses of this machine."""
    what = "ports between machines"
    try:
        wanted = _numbered(settings)
    except (ImportError, SettingsError) as error:
        remedy = "repair that first: the ports are unknown until then"
        yield finding(what, str(error), "libraries and keys of a run", remedy)
        return
    addresses = list(dict.fromkeys(host for host, _ in wanted))
    here = [host for host in addresses if doctor.ours(host)]
    if not here:
        got = f"none of {', '.join(addresses)} is an address of this machine"
        remedy = "run the doctor there too, or correct pipeline.hosts"
        yield finding(what, got, "a machine of pipeline.hosts", remedy, "warn")
    for host in here:
        ports = sorted(number for one, number in wanted if one == host)
        rows = [doctor.port(what, host, number, other="set pipeline.port to another first one") for number in ports]
        free = finding(what, f"{host}: the {len(ports)} from {ports[0]} to {ports[-1]} are free")
        yield from [row for row in rows if row.state != "ok"] or [free]


def _numbered(settings: Settings) -> list[tuple[str, int]]:
    """Returns the addresses and ports of all machines of a run."""
    from sparring.services.supervision.ports import Ports
    from sparring.services.supervision.topology import build

    class FreePortProbe(Ports):
        """Accepts every wanted port as free."""

        def find(self, host: str, wanted: int = 0) -> int:
            del host
            return wanted

    made = build(settings, FreePortProbe(), run_id="doctor", directory=Path(), seed=0)
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
