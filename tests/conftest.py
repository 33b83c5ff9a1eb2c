"""Fixtures of all tests, and the two hypothesis profiles.

`repeatable`, the default, runs the same examples every time on every machine, so a failure repeats itself.

`search` runs new examples every time, more of them where a test sets no number, and retries stored failures first:
`HYPOTHESIS_PROFILE=search pytest tests/queues tests/coordination`
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from trio.testing import MockClock

# The time that an example takes depends on the load of the machine, so it decides nothing.
_ANY_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}

settings.register_profile("repeatable", derandomize=True, max_examples=50, **_ANY_MACHINE)
settings.register_profile("search", derandomize=False, max_examples=1000, **_ANY_MACHINE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Workers and the processes that tests start import the same modules, and compile them once.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

SLOW_S = 900
"""Timeout of a slow test: generous, because a loaded machine is many times slower."""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Coroutines run on trio with a virtual clock, which jumps to the next deadline as soon as every task waits."""
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch uses one thread, so that sums are rounded the same way every time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))


def pytest_collection_finish() -> None:
    """Imported modules stay loaded, so the garbage collector need not visit them thousands of times."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A file or socket left open is reported here, with its module (a slow test: with itself), not in a later test."""
    last = nextitem is None or item.path != nextitem.path
    if last or item.get_closest_marker("slow"):
        gc.collect()


def pytest_sessionfinish() -> None:
    """The folders `pipeline` and `services` are imported below the name `sparring` only."""
    wrong = {name for name in sys.modules if name.partition(".")[0] in ("pipeline", "services")}
    assert not wrong, f"got modules {sorted(wrong)[:4]}; expected them below sparring only"
