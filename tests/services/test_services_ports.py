"""A port that was found for somebody is his until the run ends."""

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
kept = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port that is kept cannot be listened on")


def bind(port: int) -> None:
    with socket.socket() as one:
        one.bind((HOST, port))


@kept
def test_a_port_is_nobody_elses_until_the_run_ends() -> None:
    with Ports() as ports:
        port = ports.find(HOST)
        with pytest.raises(OSError, match="in use"):
            bind(port)
    bind(port)


@kept
@pytest.mark.asyncio
async def test_whoever_it_was_found_for_listens_there_again_and_again() -> None:
    with Ports() as ports:
        port = ports.find(HOST)
        for _ in range(2):
            async with await listen(f"tcp://{HOST}:{port}"):
                await (await anyio.connect_tcp(HOST, port)).aclose()


@kept
def test_a_queue_listens_there_too() -> None:
    with Ports() as ports, zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"tcp://{HOST}:{ports.find(HOST)}")


def test_a_port_that_is_taken_is_told_with_what_to_do() -> None:
    with socket.create_server((HOST, 0)) as taken, Ports() as ports:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"got port {port} .*expected a free port; stop what uses it"):
            ports.find(HOST, port)
        with pytest.raises(SettingsError, match="not free"):  # and again: the first failure keeps nothing
            ports.find(HOST, port)
    bind(port)
