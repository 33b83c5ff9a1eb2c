"""What the supervisors of a run's machines say to each other.

The machine where the run was started publishes orders for each other machine, and those publish what has come of
them. Both are state: the latest counts. A *session* is one stay of a machine in the run; orders hold for one only.
"""

from __future__ import annotations

from dataclasses import field

from sparring.pipeline.messages.schema import Octets, record


@record("host_run")
class HostRun:
    """What a machine must have before it can start a part of the run.

    Attributes:
        content: `run.json`.
        files: further files by their path in the run's folder, with / between its parts.
    """

    content: Octets
    files: dict[str, Octets] = field(default_factory=dict)


@record("part_order")
class PartOrder:
    """One start of a service or simulator.

    Attributes:
        number: of the start; rises.
        start: name of the start; "" of a simulator.
        first: the service's first start in this run of the supervisor.
        stop: it is to end in order.
        kill: it is to end at once.
    """

    number: int
    start: str = ""
    first: bool = False
    stop: bool = False
    kill: bool = False


@record("host_orders")
class HostOrders:
    """What is to run on one machine.

    Attributes:
        session: of the machine that the orders are for.
        parts: by name.
        over: how the run has ended; "" while it goes on.
    """

    session: str
    parts: dict[str, PartOrder] = field(default_factory=dict)
    over: str = ""


@record("part_state")
class PartState:
    """What has come of an order.

    Attributes:
        number: of the start.
        pid: process id on its machine.
        ended: it runs no more.
        failure: what went wrong; "" where it ended in order.
        hopeless: a restart cannot mend it.
    """

    number: int
    pid: int = 0
    ended: bool = False
    failure: str = ""
    hopeless: bool = False


@record("host_state")
class HostState:
    """How a machine fares.

    Attributes:
        session: drawn when it joined.
        parts: the latest start of each part, by name.
        over: it has heard that the run has ended.
    """

    session: str
    parts: dict[str, PartState] = field(default_factory=dict)
    over: bool = False
