"""The steps of simulators' processes, which may connect several times to one incarnation of stepping."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from sparring.pipeline.messages.state import SimulatorSteps
from sparring.pipeline.stepping.connections import SimulatorConnection

_MOST: Final = 4096
"""Processes that are distinguished; a peer may send a new name with each Hello."""


class SimulatorProcesses:
    """Counts steps by the name that a simulator's process has in Hello, "" for all that have none."""

    def __init__(self) -> None:
        self._records: dict[str, SimulatorSteps] = {}
        self._hellos: list[tuple[SimulatorConnection, Mapping[str, int]]] = []
        """Not applied so far: an earlier connection of the same process may hold a frame."""

    def connect(self, connection: SimulatorConnection, process: str, reported: Mapping[str, int]) -> None:
        """Names the process of a connection, which has reported so many steps since it started, by behavior name."""
        if process in self._records or len(self._records) + len(self._hellos) < _MOST:
            connection.process = process
        if connection.process:
            if process in self._records:
                self._records[process].total.clear()  # its Bye was not its end
            self._hellos.append((connection, reported))
        else:
            self._records.setdefault("", SimulatorSteps())

    def end(self, connection: SimulatorConnection, total: Mapping[str, int]) -> None:
        """Stores the steps that a process reports at its end."""
        if connection.process in self._records and connection.process:
            self._records[connection.process].total.update(total)

    def close(self, connection: SimulatorConnection) -> None:
        """Adds the steps of a connection that is closed."""
        completed = self._records.setdefault(connection.process, SimulatorSteps()).completed
        for name, steps in connection.completed.items():
            completed[name] = completed.get(name, 0) + steps

    def has_news(self, connections: Iterable[SimulatorConnection]) -> bool:
        """Returns whether `steps` will count a Hello for the first time."""
        return bool(self._hellos) and not any(one.is_closed for one in connections)

    def steps(self, connections: Iterable[SimulatorConnection]) -> dict[str, SimulatorSteps]:
        """Returns the steps of each process, those of present connections included."""
        present = [*connections]
        if self.has_news(present):
            self._apply_hellos(present)
        connected = {one.process for one in present}
        return {
            process: SimulatorSteps(
                before=dict(record.before),
                completed=dict(self._completed(process, present)),
                total=dict(record.total),
                connected=process in connected,
            )
            for process, record in self._records.items()
        }

    def _apply_hellos(self, connections: Sequence[SimulatorConnection]) -> None:
        """Computes what processes had reported before their Hello; none of their earlier connections holds a frame."""
        for connection, reported in self._hellos:
            record = self._records.setdefault(connection.process, SimulatorSteps())
            earlier = self._completed(connection.process, connections)
            earlier.subtract(connection.completed)  # these followed its Hello
            record.before.update({name: steps - earlier[name] for name, steps in reported.items()})
        self._hellos.clear()

    def _completed(self, process: str, connections: Iterable[SimulatorConnection]) -> Counter[str]:
        found = Counter(self._records[process].completed)
        for connection in connections:
            if connection.process == process:
                found.update(connection.completed)
        return found
