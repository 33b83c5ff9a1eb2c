"""Waits without a deadline, and what notices if one of them never ends.

The simulation regularly inspects every blocked task of a service and of the supervisor. Either a deadline of the task
or of its callers ends the wait, or the wait is listed here with the mechanism, with its own deadline, that notices it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import trio

from tests.world.world_schedule import PART

ROOT: Final = Path(__file__).parents[2]
_OURS: Final = f"{ROOT}/src/sparring/"

FLOW: Final = "the flow"
"""A full or empty queue; the stage reports what it waits for and from which service, which stall detection uses."""
SILENCE: Final = "silence"
"""A link; a silent peer is disconnected after a timeout."""
CHILD: Final = "a process"
"""The end of a process, whose missing heartbeat is noticed within 10 s."""
ORDER: Final = "an order"
"""A request such as a stop or a new connection; until it arrives there is nothing to do, and no part waits for it."""

WATCHED: Final = {
    "pipeline/queues/sending.py Sender.put": FLOW,
    "pipeline/queues/receiving_end.py Receiver._arrival": FLOW,
    "pipeline/queues/topic.py Subscription.changed": SILENCE,
    "services/endpoint/simulators.py Simulators.read": SILENCE,
    "services/endpoint/sockets.py Outgoing.run": SILENCE,
    "services/supervision/active_run.py ActiveRun._keep_running": CHILD,
    "services/supervision/supervisor.py Supervisor.supervise": ORDER,
    "pipeline/queues/ends.py Timer.run": ORDER,
    "services/process/runtime.py cancel_at_stop": ORDER,
    "services/endpoint/admission.py ConnectionAcceptor.run": ORDER,
    "services/stages/assembly.py run": ORDER,
    "services/stages/coordination.py run": ORDER,
    "services/stages/outboxes.py MatchOutbox._send_to_present": ORDER,
    "services/stages/assembly.py Assembly.announce": ORDER,
    "services/stages/stepping.py run": ORDER,
    "services/stages/stepping.py Stepping.loop": ORDER,
    "services/stages/assembly.py Assembly.flush": FLOW,  # likewise
    "services/stages/assembly.py Assembly.take": FLOW,
    "services/stages/assembly.py Assembly.settle": FLOW,
    "services/stages/outboxes.py StepOutbox.run": ORDER,
}
"""What notices an endless wait, by module and function that waits."""


def endless() -> Iterator[tuple[str, str]]:
    """Yields the part and the place of each wait in our code that no deadline ends."""
    tasks = [trio.lowlevel.current_root_task()]
    while tasks:
        task = tasks.pop()
        assert task is not None
        for nursery in task.child_nurseries:
            tasks.extend(nursery.child_tasks)
        blocked = task._abort_func is not None
        if blocked and task._cancel_status.effective_deadline() == math.inf and (place := _place(task)):
            yield task.context.get(PART, ""), place


def _place(task: Any) -> str:
    """Returns the innermost function of ours that waits; "" if there is none or it waits only for its own tasks."""
    place = ""
    for frame, _ in task.iter_await_frames():
        code = frame.f_code
        if code.co_filename.startswith(_OURS) and code.co_qualname != "End._until":  # its callers have the reason
            place = f"{code.co_filename.removeprefix(_OURS)} {code.co_qualname}"
        elif code.co_name == "_nested_child_finished":
            return ""
    return place
