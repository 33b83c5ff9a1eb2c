"""What waits without a deadline of its own, and who notices where that never ends.

Every blocked task of a service, and of the supervisor, is looked at from time to time. Either a deadline of its own or
of what called it ends its wait, or the wait is one of these: each has somebody who notices, with a deadline of his own.
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
"""A full queue, or an empty one: the stage says what it waits for and from whom, and stalls are judged by that."""
SILENCE: Final = "silence"
"""A link: who is not heard of is given up after a time."""
CHILD: Final = "a process"
"""The end of a process, of which is known within 10 s that it does not answer."""
ORDER: Final = "an order"
"""To stop, to take a guest in, to do what is asked for: until then there is nothing to do, and nobody waits for it."""

WATCHED: Final = {
    "pipeline/queues/sending_end.py SendingEnd._turn": FLOW,
    "pipeline/queues/receiving_end.py ReceivingEnd._arrival": FLOW,
    "pipeline/queues/topic_ends.py SubscriptionEnd.changed": SILENCE,
    "services/endpoint/simulators.py Simulators._read": SILENCE,
    "services/endpoint/outgoing.py Outgoing.run": SILENCE,
    "services/supervision/parts.py Parts._run": CHILD,
    "services/supervision/supervisor.py Supervisor.supervise": ORDER,
    "pipeline/queues/timer.py Timer._sleep": ORDER,
    "services/process/runtime.py cancel_at_stop": ORDER,
    "services/endpoint/admission.py ConnectionAcceptor.run": ORDER,
    "services/stages/assembly.py run": ORDER,
    "services/stages/coordination.py run": ORDER,
    "services/stages/coordination.py _follow_learner.<locals>.look_again": ORDER,
    "services/stages/stepping.py run": ORDER,
    "services/stages/stepping.py Stepping.loop": ORDER,
    "services/stages/stepping.py Stepping._step": FLOW,  # while it hands steps on
    "services/stages/assembly.py Assembly.cut": FLOW,  # likewise
    "services/stages/assembly.py Assembly.take": FLOW,
    "services/stages/assembly.py Assembly.settle": FLOW,
    "services/stages/stepping.py Stepping.hand_on_in_time": ORDER,
}
"""By module and function that waits."""


def endless() -> Iterator[tuple[str, str]]:
    """The part and the place of each wait of ours that no deadline ends."""
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
    """Where one of our functions waits; "" where none does, or only for tasks that it has started."""
    place = ""
    for frame, _ in task.iter_await_frames():
        code = frame.f_code
        if code.co_filename.startswith(_OURS):
            place = f"{code.co_filename.removeprefix(_OURS)} {code.co_qualname}"
        elif code.co_name == "_nested_child_finished":
            return ""
    return place
