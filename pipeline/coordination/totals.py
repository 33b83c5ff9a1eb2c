"""What simulators count themselves, beside what stepping reports of them: arithmetic without I/O."""

from collections import Counter
from dataclasses import dataclass, field

from sparring.pipeline.messages import state as records
from sparring.pipeline.messages.incarnations import is_restart, is_restart_of, service_of


@dataclass(slots=True)
class SimulatorTotals:
    """Compares what simulators' processes count with what stepping reports of them.

    A process that connects again says how many steps it has reported in all. What is beyond the last report of stepping
    was in the memory of an incarnation that died, or on a connection that broke.

    Attributes:
        known: by process, the incarnation of stepping that it last reported to, and this report.
        first: by process, what it had reported to earlier runs.
        unnamed: steps of processes without a name, by stepping's incarnation.
        unheard: processes that may have reported more than is known, because their stepping process died, or a session
            of the run ended without its last counts, and they have not connected since; "" for those without a name.
    """

    known: dict[str, tuple[str, records.SimulatorSteps]] = field(default_factory=dict)
    first: dict[str, dict[str, int]] = field(default_factory=dict)
    unnamed: dict[str, dict[str, int]] = field(default_factory=dict)
    unheard: set[str] = field(default_factory=set)

    def miss_last_counts(self) -> None:
        """Notes that the last counts of a former session are missing; those that reported a total are complete."""
        self.unheard |= {process for process, (_, steps) in self.known.items() if not steps.total}
        if self.unnamed:
            self.unheard.add("")

    def retire(self, service: str, present: str = "") -> None:
        """Notes that processes which were connected to a stepping service that died may have reported more to it.

        Those without a name never tell how much.

        Args:
            service: of stepping.
            present: its living incarnation; "" where it has none.
        """
        for process, (source, steps) in self.known.items():
            is_open = steps.connected and not steps.total
            if is_open and source != present and service_of(source) == service:
                self.unheard.add(process)
        if any(is_restart_of(present, one) if present else service_of(one) == service for one in self.unnamed):
            self.unheard.add("")

    def miss(self, service: str) -> None:
        """Notes that the last report of a stepping service is missing: of its processes what was saved is known."""
        own = [steps for source, steps in self.known.values() if service_of(source) == service]
        self.retire(service)
        if not own:
            self.unheard.add("")

    def on_stepping_state(self, state: records.SteppingState) -> Counter[str]:
        """Takes over the steps of simulators; returns by behavior those that no report of stepping has counted."""
        found: Counter[str] = Counter()
        for process, steps in state.processes.items():
            if not process:
                self.unnamed[state.source] = dict(steps.completed)
                continue
            self.unheard.discard(process)
            source, known = self.known.get(process, ("", records.SimulatorSteps()))
            # A process that is new to a restarted stepping service had reported to the one that died.
            first = self.first.setdefault(process, {} if is_restart(state.source) else dict(steps.before))
            for name, before in steps.before.items():
                counted = known.before.get(name, first.get(name, 0))
                if source != state.source:
                    counted += known.completed.get(name, 0)
                found[name] += before - counted
            self.known[process] = state.source, steps
        return found

    def total(self, behavior: str) -> int:
        """Returns the steps of a behavior that simulators have reported in this run."""
        named = 0
        for process, (_, steps) in self.known.items():
            counted = steps.before.get(behavior, 0) + steps.completed.get(behavior, 0)
            named += steps.total.get(behavior, counted) - self.first[process].get(behavior, 0)
        return named + sum(steps.get(behavior, 0) for steps in self.unnamed.values())
