"""Calls into Ray, each of which may hang: a deadline for every one, and none holds up the end of a run."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import anyio
import ray
from ray.exceptions import RayError

from sparring.pipeline.errors import SettingsError

CALL_S: Final = 10.0
"""Seconds for an answer of an agent."""
CLOSE_S: Final = 10.0
"""Seconds for the cluster to end what belongs to a run."""
LOOK_S: Final = 0.5
"""Seconds between two looks at what does not report itself."""


@dataclass(kw_only=True)
class RemoteAgent:
    """An agent on a node.

    Attributes:
        actor: its Ray actor.
        part: that it owns.
        address: IP address of its node.
        folder: of the part there.
        fresh: it has got no files yet.
    """

    actor: Any
    part: str
    address: str
    folder: str
    fresh: bool = True

    async def call(self, method: str, *arguments: object, **options: object) -> Any:
        """Calls a method of the agent.

        Raises:
            TimeoutError: no answer in `CALL_S`.
            RayError: the agent failed, or its node is away.
        """
        with anyio.fail_after(CALL_S):
            return await getattr(self.actor, method).remote(*arguments, **options)

    def tell(self, method: str) -> None:
        """Calls a method of the agent without waiting for its end."""
        with suppress(RayError):
            getattr(self.actor, method).remote()


def alive() -> list[dict[str, Any]]:
    """Returns the nodes that work, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or its type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def refuse(text: str) -> None:
    """Raises a SettingsError for an error of an agent that another try would repeat."""
    for sign, remedy in (
        ("No module named 'sparring", "install sparring on every node, in the Python that runs Ray there"),
        ("got pipeline.interface", ""),
    ):
        line = next((line.strip() for line in text.splitlines() if sign in line), None)
        if line is not None:
            raise SettingsError(f"{line}; {remedy}" if remedy else line[line.index(sign) :])


async def ask(work: Callable[[], Any]) -> Any:
    """Calls into Ray in a thread of its own, which may hang without holding up anything, the end included."""
    done, loop = anyio.Event(), asyncio.get_running_loop()
    answers: list[tuple[Any, Exception | None]] = []

    def call() -> None:
        try:
            answers.append((work(), None))
        except Exception as error:
            answers.append((None, error))
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=call, daemon=True).start()
    await done.wait()
    answer, failure = answers[0]
    if failure is not None:
        raise failure
    return answer


def bounded(work: Callable[[], None]) -> None:
    """Works in a thread, for `CLOSE_S` at most: without its head, Ray may not answer any more."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(CLOSE_S)
