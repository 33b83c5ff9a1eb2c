"""How hypothesis draws its examples, and what a machine's speed has no say in.

`repeatable`, the default: the same examples at every run, on every machine. A test that fails here
fails again.

`search`: new examples at every run, more of them where a test does not say how many, and what failed is
kept and tried first. `HYPOTHESIS_PROFILE=search pytest tests/queues tests/coordination`
"""

from __future__ import annotations

import gc
import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more of the machine and of what else it does than of the example.
_ANY_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}

settings.register_profile("repeatable", derandomize=True, **_ANY_MACHINE)
settings.register_profile("search", derandomize=False, max_examples=1000, **_ANY_MACHINE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

SLOW_S = 900
"""What ends a slow test that hangs; how long it takes says more of the machine, as above."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))


def pytest_collection_finish() -> None:
    """What is imported stays: a full collection need not look at it again, thousands of times."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a module (a test, where it is slow) left open is found here, not in whichever test collects it by chance."""
    last = nextitem is None or item.path != nextitem.path
    if last or item.get_closest_marker("slow"):
        gc.collect()


def pytest_sessionfinish() -> None:
    """The only import name is `sparring`: its folders are never imported beside it."""
    wrong = {name for name in sys.modules if name.partition(".")[0] in ("pipeline", "services")}
    assert not wrong, f"got modules {sorted(wrong)[:4]}; expected them below sparring only"
