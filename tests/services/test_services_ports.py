"""A port found for a service stays reserved for it until the run ends."""

from __future__ import annotations

import socket
import sys

import anyio
import pytest
import zmq

from sparring.pipeline.errors import SettingsError
from sparring.services.endpoint.listening import listen
from sparring.services.supervision.ports import Ports

HOST = "127.0.0.1"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot listen on a reserved port")


def bind(port: int) -> None:
    with socket.socket() as one:
        one.bind((HOST, port))


@linux_only
def test_port_is_reserved_until_the_run_ends() -> None:
    with Ports() as ports:
        port = ports.find(HOST)
        with pytest.raises(OSError, match="in use"):
            bind(port)
    bind(port)


@linux_only
@pytest.mark.asyncio
async def test_owner_of_a_port_can_listen_on_it_repeatedly() -> None:
    with Ports() as ports:
        port = ports.find(HOST)
        for _ in range(2):
            async with await listen(f"tcp://{HOST}:{port}"):
                await (await anyio.connect_tcp(HOST, port)).aclose()


@linux_only
def test_queue_can_listen_on_its_port() -> None:
    with Ports() as ports, zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"tcp://{HOST}:{ports.find(HOST)}")


def test_port_in_use_is_refused_with_a_remedy() -> None:
    with socket.create_server((HOST, 0)) as taken, Ports() as ports:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"got port {port} .*expected a free port; stop what uses it"):
            ports.find(HOST, port)
        with pytest.raises(SettingsError, match="not free"):  # again: the first failure reserves nothing
            ports.find(HOST, port)
    bind(port)
