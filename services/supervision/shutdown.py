"""The end of a run: stops its parts along the flow, after every service that still runs has reported its state.

consumes       the state that each service publishes
produces       stop signals, and kills of what does not end in time
waits for      the reports of restarted services; the end of each part
unblocked by   these, or the deadlines `pipeline.stop_timeout_s`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import anyio
from structlog.typing import FilteringBoundLogger

from sparring.pipeline.messages.channels import ASSEMBLY_STATE, LEARNER_STATE, RUN, STEPPING_STATE
from sparring.services.supervision.outcome import FinalReports
from sparring.services.supervision.parts import Part, Parts
from sparring.services.supervision.topology import Topology

TURN_S: Final = 0.05
_SIMULATORS_S: Final = 5.0
_KILLED_S: Final = 5.0


@dataclass
class Shutdown:
    """Stops the parts of one run.

    Attributes:
        topology: of the run.
        parts: that are kept running.
        reports: of the services.
        keeps: whether a part is still to run.
        incarnation: names an incarnation, given a service and a number.
        fail: called with what a service could not save.
        clock: seconds, only rising.
        log: of the supervisor.
        hurried: a second signal came, so that what fails is not reported.
    """

    topology: Topology
    parts: Parts
    reports: FinalReports
    keeps: Callable[[Part], bool]
    incarnation: Callable[[str, int], str]
    fail: Callable[[str], None]
    clock: Callable[[], float]
    log: FilteringBoundLogger
    hurried: bool = False
    _since: float = field(default=0.0, init=False)

    def adopt(self, topology: Topology) -> None:
        """Takes over a topology that has more behaviors than before."""
        self.topology = topology

    @property
    def _timeout_s(self) -> float:
        return self.topology.run.settings.pipeline.stop_timeout_s

    async def stop_in_order(self) -> None:
        """Stops along the flow, so that each stage can send on what it holds.

        Learners stop before coordination, so that an update that was under way then is in its step accounting.
        """
        self._since = self.clock()
        stepping = [plan.name for plan in self.topology.services if plan.name in self.topology.run.stepping]
        simulators = [plan.name for plan in self.topology.simulators]
        await self._stop(stepping, self._timeout_s)
        await self._stop(simulators, _SIMULATORS_S, ask=False)
        rest = [plan.name for plan in self.topology.services if plan.name not in stepping]
        for name in sorted(rest, key=_stopped_late):
            await self._stop([name], self._timeout_s)

    def is_counted(self, part: Part) -> bool:
        """Returns whether a service runs and, unless it was never restarted, its incarnation is in all reports."""
        if part.starts < 2:
            return not part.down
        known = [*_reported_incarnations(self.reports, part.name)]
        run = self.reports.of("coordination", RUN)
        if run is not None and part.name in run.incarnations:
            known.append(run.incarnations[part.name])
        return not part.down and all(one == self.incarnation(part.name, part.starts) for one in known)

    def _has_reported(self, part: Part) -> bool:
        """Returns whether a service is no longer to run, or has reported its state since it died last."""
        return part.ended.is_set() or not self.keeps(part) or self.is_counted(part)

    async def _stop(self, names: list[str], timeout_s: float, *, ask: bool = True) -> None:
        """Stops some parts, once all services that are still to run have reported their state."""
        with anyio.move_on_after(self._timeout_s - (self.clock() - self._since)):
            services = [part for part in self.parts if part.name in self.topology.run.services]
            while not all(map(self._has_reported, services)):  # noqa: ASYNC110 (retained topics)
                await anyio.sleep(TURN_S)
        parts = [part for part in self.parts if part.name in names]  # a learner that was about to be added has none
        for part in parts:
            part.stopping = True
            if part.hosted is not None and ask:
                part.hosted.stop()
        with anyio.move_on_after(timeout_s):
            for part in parts:
                await part.ended.wait()
        late = [part for part in parts if not part.ended.is_set()]
        for part in late:
            self.log.warning("stopped_by_force", part=part.name, seconds=timeout_s)
            if part.hosted is not None:
                part.hosted.stop() if not ask else part.hosted.kill()
        with anyio.move_on_after(_KILLED_S):
            for part in late:
                await part.ended.wait()
        for part in parts if ask else ():
            if part.failure and part not in late and not self.hurried:
                self._report_failure(part)

    def _report_failure(self, part: Part) -> None:
        """Fails the run where a service that saves something at the end has failed: a learner, or coordination."""
        if part.name == "coordination" or part.name.startswith("learning-"):
            self.fail(f"{part.name} failed at the end: {part.failure}")
        else:
            self.log.warning("failed_at_the_end", part=part.name, error=part.failure, notice=True)


def _reported_incarnations(reports: FinalReports, service: str) -> Iterator[str]:
    """Yields the incarnation of a service that its latest state names."""
    if stepping := reports.of(service, STEPPING_STATE):
        yield stepping.source
    if assembly := reports.of(service, ASSEMBLY_STATE):
        yield assembly.origin
    if run := reports.of(service, RUN):
        yield run.start
    if learner := reports.of(service, LEARNER_STATE):
        yield learner.start


def _stopped_late(name: str) -> int:
    """Returns the rank of a service among those that are stopped one after the other."""
    return {"coordination": 1, "monitor": 2}.get(name, 0)
