"""The end of a run: stops its parts along the flow, after every service that still runs has reported its state.

consumes       the state that each service publishes
produces       stop signals, and kills of what does not end in time
waits for      the reports of restarted services; the end of each part
unblocked by   these, or the deadlines `pipeline.stop_timeout_s`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio
from structlog.typing import FilteringBoundLogger

from sparring.pipeline.messages.state import AssemblyState, LearnerState, RunState, SteppingState
from sparring.services.supervision.outcome import FinalReports
from sparring.services.supervision.parts import Part, Parts
from sparring.services.supervision.topology import Topology

TURN_S: Final = 0.05
_SIMULATORS_S: Final = 5.0
_KILLED_S: Final = 5.0
_REPORTS: Final = (
    ("state", SteppingState, "source"),
    ("state", AssemblyState, "origin"),
    ("run", RunState, "start"),
    ("state", LearnerState, "start"),
)
"""The reports of a service on its state: key, record, and the field that holds the incarnation of the service."""


class Shutdown:
    """Stops the parts of one run.

    Args:
        topology: of the run.
        parts: that are kept running.
        reports: of the services.
        keeps: whether a part is still to run.
        incarnation: names an incarnation, given a service and a number.
        fail: called with what a service could not save.
        clock: seconds, only rising.
        log: of the supervisor.
    """

    def __init__(
        self,
        topology: Topology,
        parts: Parts,
        reports: FinalReports,
        *,
        keeps: Callable[[Part], bool],
        incarnation: Callable[[str, int], str],
        fail: Callable[[str], None],
        clock: Callable[[], float],
        log: FilteringBoundLogger,
    ) -> None:
        self._parts = parts
        self._reports = reports
        self._keeps = keeps
        self._incarnation = incarnation
        self._fail = fail
        self._clock = clock
        self._log = log
        self._timeout_s = topology.run.settings.pipeline.stop_timeout_s
        self._since = 0.0
        self.hurried = False
        self.adopt(topology)

    def adopt(self, topology: Topology) -> None:
        """Takes over a topology that has more behaviors than before."""
        self._topology = topology
        self._run = topology.run

    async def stop_in_order(self) -> None:
        """Stops along the flow, so that each stage can send on what it holds.

        Learners stop before coordination, so that an update that was under way then is in its step accounting.
        """
        self._since = self._clock()
        stepping = [plan.name for plan in self._topology.services if plan.name in self._run.stepping]
        simulators = [plan.name for plan in self._topology.simulators]
        await self._stop(stepping, self._timeout_s)
        await self._stop(simulators, _SIMULATORS_S, ask=False)
        rest = [plan.name for plan in self._topology.services if plan.name not in stepping]
        for name in sorted(rest, key=_stopped_late):
            await self._stop([name], self._timeout_s)

    def is_counted(self, part: Part) -> bool:
        """Returns whether a service runs and, unless it was never restarted, its incarnation is in all reports."""
        if part.starts < 2:
            return not part.down
        records = [self._reports.of(part.name, key, kind) for key, kind, _ in _REPORTS]
        known = [getattr(one, field) for one, (*_, field) in zip(records, _REPORTS, strict=True) if one is not None]
        run = self._reports.of("coordination", "run", RunState)
        if run is not None and part.name in run.incarnations:
            known.append(run.incarnations[part.name])
        return not part.down and all(one == self._incarnation(part.name, part.starts) for one in known)

    def _has_reported(self, part: Part) -> bool:
        """Returns whether a service is no longer to run, or has reported its state since it died last."""
        return part.ended.is_set() or not self._keeps(part) or self.is_counted(part)

    async def _stop(self, names: list[str], timeout_s: float, *, ask: bool = True) -> None:
        """Stops some parts, once all services that are still to run have reported their state."""
        with anyio.move_on_after(self._timeout_s - (self._clock() - self._since)):
            services = [part for part in self._parts if part.name in self._run.services]
            while not all(map(self._has_reported, services)):  # noqa: ASYNC110 (retained topics)
                await anyio.sleep(TURN_S)
        parts = [part for part in self._parts if part.name in names]  # a learner that was about to be added has none
        for part in parts:
            part.stopping = True
            if part.hosted is not None and ask:
                part.hosted.stop()
        with anyio.move_on_after(timeout_s):
            for part in parts:
                await part.ended.wait()
        late = [part for part in parts if not part.ended.is_set()]
        for part in late:
            self._log.warning("stopped_by_force", part=part.name, seconds=timeout_s)
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
            self._fail(f"{part.name} failed at the end: {part.failure}")
        else:
            self._log.warning("failed_at_the_end", part=part.name, error=part.failure, notice=True)


def _stopped_late(name: str) -> int:
    """Returns the rank of a service among those that are stopped one after the other."""
    return {"coordination": 1, "monitor": 2}.get(name, 0)
