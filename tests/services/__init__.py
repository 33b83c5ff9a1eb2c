from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def inline(work: Callable[[], T]) -> T:
    """Runs `work` at once in place of `Context.compute`: a virtual clock must not overtake a thread."""
    return work()
