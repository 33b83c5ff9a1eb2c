"""Addresses at which the services of a run listen for each other and for simulators, on one machine."""

import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.queues.endpoints import refuse_used_path, socket_folder
from sparring.pipeline.settings import Settings
from sparring.services.process.encryption import long_paths, socket_paths


class Ports(ExitStack):
    """Finds free ports and reserves them until it is closed.

    A service listens seconds after its port was found, and again after each restart; meanwhile the system could give
    that port to any program that asks for one, as each connection does. On Linux a socket that is bound and does not
    listen prevents this, and a service that names the port can still listen there. Elsewhere such a socket would keep
    the service from listening, so nothing is reserved.

    Attributes:
        sockets: folder for the Unix sockets between services; None for loopback ports.
    """

    sockets: Path | None = None

    def find(self, host: str, wanted: int = 0, key: str = "address") -> int:
        """Returns the wanted port, or any free one for 0.

        Args:
            host: IP address or name of this machine.
            wanted: port.
            key: of the section `pipeline`, which names the port.

        Raises:
            SettingsError: the port is not free.
        """
        with ExitStack() as stack:
            probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, wanted))
            except (OSError, OverflowError) as error:  # further ports count up
                why = error.strerror if isinstance(error, OSError) else "the last port is 65535"
                raise SettingsError(
                    f"got port {wanted} on {host}, which is not free ({why}); expected a free port; "
                    f"stop what uses it, or set pipeline.{key} to another port"
                ) from error
            if sys.platform == "linux":
                self.push(stack.pop_all())
            return int(probe.getsockname()[1])

    def endpoint(self, service: str, number: int) -> str:
        """Returns an endpoint at which a service can listen for others.

        Args:
            service: name.
            number: of the endpoint among those of the run.

        Raises:
            SettingsError: there is no free port.
        """
        del service
        if self.sockets is not None:
            return f"ipc://{self.sockets}/{number}"
        return endpoint("127.0.0.1", self.find("127.0.0.1"))

    def local(self, stepping: Sequence[str]) -> dict[str, str]:
        """Returns an address in the private folder for each stepping service; none without that folder."""
        if self.sockets is None:
            return {}
        return {name: f"unix://{self.sockets}/s{index}" for index, name in enumerate(stepping)}

    def address(self, service: str, host: str, port: int) -> str:
        """Returns the address at which a stepping service can listen for simulators: a given port, or any for 0.

        Raises:
            SettingsError: it is not free.
        """
        del service
        return endpoint(host, self.find(host, port))


def open_ports(settings: Settings, *, in_process: bool) -> Ports:
    """Returns the ports of a run, with a private folder for Unix sockets where these are used.

    Raises:
        SettingsError: the path of a socket is too long, or a port for WebSockets is not free.
    """
    if lines := long_paths(settings, in_process=in_process):
        raise SettingsError("\n".join(lines))
    pipeline, ports = settings.pipeline, Ports()
    with ExitStack() as unless_complete:
        unless_complete.enter_context(ports)
        for index in range(pipeline.stepping_processes if pipeline.websocket_address is not None else 0):
            parts = urlsplit(pipeline.websocket_of(index))
            ports.find(parts.hostname or "127.0.0.1", parts.port or 0, "websocket_address")
        unless_complete.pop_all()
    if any(what == "TMPDIR" for what, _ in socket_paths(settings, in_process=in_process)):
        ports.sockets = ports.enter_context(socket_folder())
    return ports


def addresses_of(settings: Settings, stepping: list[str], ports: Ports) -> dict[str, str]:
    """Returns the address for simulators of each stepping service; it stays the same over restarts.

    Raises:
        SettingsError: an address is not free.
    """
    parts = urlsplit(settings.pipeline.address)
    if parts.scheme == "unix":
        paths = [path for what, path in socket_paths(settings) if what == "pipeline.address"]
        for path in paths:
            _refuse_path(path)
        return {name: f"unix://{path}" for name, path in zip(stepping, paths, strict=True)}
    host = parts.hostname or "127.0.0.1"
    first = parts.port or 0
    return {name: ports.address(name, host, first and first + index) for index, name in enumerate(stepping)}


def _refuse_path(path: Path) -> None:
    try:
        path.parent.stat()
        refuse_used_path(path)
    except OSError as error:
        raise SettingsError(
            f"got pipeline.address with a socket at {path}, which cannot be used ({error.strerror}); expected one in a "
            "folder that exists, at which there is neither a file nor the socket of a living process; choose another"
        ) from error


def endpoint(host: str, port: int) -> str:
    """Returns the endpoint of an IP address and a port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def endpoints_of(listeners: Mapping[str, str], ports: Ports, first: int = 0) -> dict[str, str]:
    """Returns the addresses of queues and topics.

    Args:
        listeners: by queue, and by topic as "topic:NAME", the service that listens there.
        ports: finds free ports.
        first: number of the first socket.

    Raises:
        SettingsError: a port is not free.
    """
    return {name: ports.endpoint(service, number) for number, (name, service) in enumerate(listeners.items(), first)}
