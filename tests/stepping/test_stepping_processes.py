"""The steps that simulators' processes count, as their connections to stepping come and go."""

from __future__ import annotations

from sparring.pipeline.stepping.connections import SimulatorConnection
from sparring.pipeline.stepping.processes import SimulatorProcesses


def connected(processes: SimulatorProcesses, key: int, reported: int) -> SimulatorConnection:
    """Returns a new connection of process "p", which has reported so many steps of behavior B."""
    connection = SimulatorConnection(number=0, key=key)
    processes.connect(connection, "p", {"B": reported})
    return connection


def counts(processes: SimulatorProcesses, *present: SimulatorConnection) -> tuple[int | None, int]:
    """Returns the steps of the process before the connections, and those that they completed."""
    steps = processes.steps(present)["p"]
    return steps.before.get("B"), steps.completed["B"]


def test_what_a_process_reported_before_does_not_depend_on_when_it_is_asked_for() -> None:
    """A frame may complete steps between Hello and the next report of stepping; the Hello did not count them."""
    processes = SimulatorProcesses()
    connection = connected(processes, 1, reported=100)
    connection.completed["B"] = 32
    assert counts(processes, connection) == (100, 32)
    connection.completed["B"] = 40
    assert counts(processes, connection) == (100, 40)


def test_steps_of_earlier_connections_are_not_counted_twice() -> None:
    """Of the 150 steps of the second Hello, the first connection completed 40: 110 came before both, or broke."""
    processes = SimulatorProcesses()
    former = connected(processes, 1, reported=100)
    former.completed["B"] = 32
    assert counts(processes, former) == (100, 32)
    former.is_closed = True
    latter = connected(processes, 2, reported=150)
    former.completed["B"] = 40  # a frame that waited at the end of the connection
    latter.completed["B"] = 8
    assert counts(processes, former, latter) == (100, 48), "the former connection may still hold a frame"
    processes.close(former)
    assert counts(processes, latter) == (110, 48)


def test_a_connection_that_ended_before_it_was_asked_for_counts_the_same() -> None:
    processes = SimulatorProcesses()
    connection = connected(processes, 1, reported=100)
    connection.completed["B"] = 32
    connection.is_closed = True
    processes.close(connection)
    assert counts(processes) == (100, 32)


def test_a_process_that_comes_back_after_its_bye_has_not_ended() -> None:
    processes = SimulatorProcesses()
    former = connected(processes, 1, reported=0)
    former.completed["B"] = 40
    assert counts(processes, former) == (0, 40)
    processes.end(former, {"B": 40})
    assert processes.steps([former])["p"].total == {"B": 40}
    processes.close(former)
    latter = connected(processes, 2, reported=40)
    assert processes.steps([latter])["p"].total == {}
