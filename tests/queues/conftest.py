from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from tests.queues.queues_worlds import World, short_folder

PLACES = ("memory-trio", "memory-asyncio", "ipc-asyncio", "ipc-uvloop", "tcp-asyncio", "lossy-trio")


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def anyio_backend(place: str) -> tuple[str, dict[str, Any]]:
    loop = place.partition("-")[2]
    if loop == "trio":
        return "trio", {"clock": MockClock(autojump_threshold=0)}
    return "asyncio", {"use_uvloop": loop == "uvloop"}


@pytest.fixture
def world(place: str) -> Iterator[World]:
    kind, _, loop = place.partition("-")
    with short_folder() as folder:
        yield World(kind, virtual=loop == "trio", folder=Path(folder))


@pytest.fixture
def topic_world(world: World) -> World:
    if world.kind == "lossy":
        pytest.skip("topics have no lossy shell: their rules are tested in test_queues_topic.py")
    return world
