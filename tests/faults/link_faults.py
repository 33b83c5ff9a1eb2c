"""Faults of links: between simulators and stepping, and between services."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from tests.faults.bench import ABSENCE_S, PAUSE_S, Bench, Outcome, complete
from tests.faults.faulty_proxy import FaultyProxy
from tests.faults.judge import ANY, AllowedEffects, expect
from tests.faults.places import destroy, network
from tests.faults.trial import (
    AREAS,
    SIMULATORS,
    Trial,
)


@contextlib.contextmanager
def proxied(bench: Bench, host: str = "127.0.0.1", prefix: tuple[str, ...] = ()) -> Iterator[tuple[Trial, FaultyProxy]]:
    """Starts a run whose simulators connect through a faulty proxy."""

    def upstream() -> tuple[str, int]:
        plain = json.loads((bench.folder / "results" / "run" / "run.json").read_text())
        parts = urlsplit(plain["addresses"]["stepping-0"])
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    proxy = FaultyProxy(upstream, host)
    try:
        with bench.trial(simulator=(*prefix, "...", "--connect", proxy.address)) as trial:
            yield trial, proxy
    finally:
        proxy.close()


LINKS: dict[str, Callable[[FaultyProxy], None]] = {}
_HARMLESS = ("delayed", "briefly-silent")
"""Link faults that break no connection."""


def _link(act: Callable[[FaultyProxy], None]) -> Callable[[FaultyProxy], None]:
    LINKS[act.__name__.replace("_", "-")] = act
    return act


@_link
def reset(proxy: FaultyProxy) -> None:
    """Resets all connections."""
    proxy.reset()


@_link
def reset_within_message(proxy: FaultyProxy) -> None:
    """Resets all connections within a message."""
    proxy.reset_within_message()


@_link
def reset_and_refused(proxy: FaultyProxy) -> None:
    """Resets all connections and refuses new ones for a while."""
    proxy.refuse(on=True)
    proxy.reset()
    time.sleep(PAUSE_S)
    proxy.refuse(on=False)


@_link
def half_closed_to_trainer(proxy: FaultyProxy) -> None:
    """Ends the streams to the trainer."""
    proxy.close_to_trainer()


@_link
def half_closed_to_simulator(proxy: FaultyProxy) -> None:
    """Ends the streams to the simulators."""
    proxy.close_to_simulator()


@_link
def delayed(proxy: FaultyProxy) -> None:
    """Delays everything for a while."""
    proxy.delay(0.2)
    time.sleep(PAUSE_S)
    proxy.delay(0)


@_link
def briefly_silent(proxy: FaultyProxy) -> None:
    """Holds everything back for less than the deadline."""
    proxy.silence(on=True)
    time.sleep(PAUSE_S)
    proxy.silence(on=False)


@_link
def silent_beyond_deadline(proxy: FaultyProxy) -> None:
    """Holds everything back for longer than the deadline, then releases it."""
    proxy.silence(on=True)
    time.sleep(ABSENCE_S)
    proxy.silence(on=False)


def link(kind: str, bench: Bench) -> Outcome:
    """Injects a fault into the links between simulators and stepping."""
    with proxied(bench) as (trial, proxy):
        trial.under_way()
        with trial.recovering():
            LINKS[kind](proxy)
        expect(kind in _HARMLESS or connections(trial) > SIMULATORS, "no simulator had to reconnect")
        expect(kind not in _HARMLESS or proxy.late > 0, "nothing was delayed")
        return complete(trial, allowed_for_link(kind))


def connections(trial: Trial) -> int:
    """Returns how often simulators have connected."""
    return len(trial.log("stepping-0", "simulator_connected"))


def allowed_for_link(kind: str) -> AllowedEffects:
    """Returns what a link fault allows; a step that a simulator sent may never arrive."""
    broken = kind not in (*_HARMLESS, "briefly-down")
    # A simulator that reconnects before its old connection timed out may find its number taken and is restarted.
    lossy = AllowedEffects(failed="simulator", times=ANY, certain=False, unreceived=2 * AREAS, counted=False)
    return lossy if broken else AllowedEffects(times=0)


def network_down(seconds: float, kind: str, bench: Bench) -> Outcome:
    """Takes the link to the simulators' network down for some seconds."""
    with network() as own, proxied(bench, own.host, own.prefix) as (trial, _):
        trial.under_way()
        with trial.recovering():
            own.down()
            time.sleep(seconds)
            own.up()
        expect(kind == "briefly-down" or connections(trial) > SIMULATORS, "no simulator had to reconnect")
        return complete(trial, allowed_for_link(kind))


def reset_services(bench: Bench) -> Outcome:
    """Resets all links between services one after the other; no process fails and nothing is lost."""
    with bench.trial(transport="tcp") as trial:
        trial.under_way()
        with trial.recovering():
            for name, endpoint in sorted(trial.endpoints().items()):
                port = urlsplit(endpoint).port
                assert port is not None
                # Without self-play no service subscribes to the weights of ghosts.
                expect(destroy(port) > 0 or name == "topic:ghosts", f"there was no connection to {name}")
                time.sleep(trial.random.uniform(0.0, 0.3))
        return complete(trial, AllowedEffects(times=0))


def services_down(bench: Bench) -> Outcome:
    """Takes the loopback device of the network of services and simulators down briefly."""
    with network() as own, bench.trial(transport="tcp", prefix=own.prefix) as trial:
        trial.under_way()
        with trial.recovering():
            own.down("lo")
            time.sleep(PAUSE_S)
            own.up("lo")
        return complete(trial, AllowedEffects(times=0))
