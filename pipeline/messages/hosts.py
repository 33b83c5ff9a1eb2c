"""The supervisors of a run's machines exchange these records.

The main machine, where the run was started, publishes orders for each other machine; these publish the state of their
parts. Only the latest record counts. A *session* lasts while a machine takes part in the run; orders hold for one.
"""

from dataclasses import field

from sparring.pipeline.messages.schema import Octets, record


@record("host_run")
class HostRun:
    """A machine needs these files before it can start a part of the run.

    Attributes:
        content: bytes of `run.json`.
        files: further files by their path in the run's folder, with / as separator.
    """

    content: Octets
    files: dict[str, Octets] = field(default_factory=dict)


@record("part_order")
class PartOrder:
    """An order starts or ends one incarnation of a service or simulator.

    Attributes:
        number: of the incarnation; it only rises.
        start: name of the incarnation; "" for a simulator.
        first: True for the service's first incarnation under this supervisor.
        stop: the part must end in order.
        kill: the part must end at once.
    """

    number: int
    start: str = ""
    first: bool = False
    stop: bool = False
    kill: bool = False


@record("host_orders")
class HostOrders:
    """The main machine states what must run on another machine.

    Attributes:
        session: session of the machine that the orders are for.
        parts: orders by part name.
        over: how the run ended; "" while it continues.
    """

    session: str
    parts: dict[str, PartOrder] = field(default_factory=dict)
    over: str = ""


@record("part_state")
class PartState:
    """A machine reports how an order was carried out.

    Attributes:
        number: of the incarnation.
        pid: process id on its machine; 0 before the start.
        ended: the part no longer runs.
        failure: what went wrong; "" where the part ended in order.
        hopeless: a restart would fail again.
    """

    number: int
    pid: int = 0
    ended: bool = False
    failure: str = ""
    hopeless: bool = False


@record("host_state")
class HostState:
    """A machine reports the state of its parts.

    Attributes:
        session: random id, chosen when the machine joined.
        parts: latest incarnation of each part, by name.
        over: the machine knows that the run has ended.
    """

    session: str
    parts: dict[str, PartState] = field(default_factory=dict)
    over: bool = False
