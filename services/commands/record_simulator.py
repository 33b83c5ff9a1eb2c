"""A single simulator: its process and its connection."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from sparring.pipeline.compliance.peer import SimulatorProcess
from sparring.pipeline.errors import QueueError, SettingsError
from sparring.pipeline.queues.endpoints import is_open, listen
from sparring.pipeline.settings import Settings
from sparring.services.commands.compliance import simulator_process
from sparring.services.process.encryption import exposed
from sparring.services.supervision.topology import build


@contextlib.contextmanager
def lone_simulator(settings: Settings, seed: int) -> Iterator[SimulatorProcess]:
    """Starts the first simulator of a configuration, as the supervisor does; without one, waits for any to connect."""
    topology = build(settings.alone, run_id="record", directory=Path(), seed=seed)
    plan = next(iter(topology.simulators), None)
    address = next(iter(topology.run.addresses.values())) if plan is None else plan.environment["SPARRING_ADDRESS"]
    if is_open(address):
        raise SettingsError(
            f"got {address} for the simulator, which other machines can reach; expected loopback or unix:///PATH, "
            "because a recording is not encrypted; set pipeline.address to one"
        )
    if lines := exposed(topology.run.settings, insecure=False):
        raise SettingsError("\n".join(lines))
    command, environment = ((), {}) if plan is None else (plan.command, plan.environment)
    with contextlib.closing(_listen(address)) as listener:
        simulator = simulator_process(address, listener, command, environment)
        try:
            simulator.start()
            yield simulator
        finally:
            simulator.stop()


def _listen(address: str) -> socket.socket:
    parts = urlsplit(address)
    try:
        if parts.scheme == "unix":
            return listen(Path(parts.path))
        family = socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET
        return socket.create_server((parts.hostname or "127.0.0.1", parts.port or 0), family=family, backlog=1)
    except (OSError, QueueError) as error:
        raise SettingsError(
            f"got {address} for the simulator, which cannot be used ({error}); expected a free address; "
            "stop what uses it, or set pipeline.address to another"
        ) from error
