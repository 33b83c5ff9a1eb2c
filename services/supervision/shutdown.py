"""The end of a run: stops its parts along the flow, after every service that still runs has reported its state.

consumes       the state that each service publishes
produces       stop signals, and kills of what does not end in time
waits for      the reports of restarted services; the end of each part
unblocked by   these, or the deadlines `pipeline.stop_timeout_s`
"""

from collections.abc import Iterator
from typing import Final

import anyio

from sparring.pipeline.messages.channels import ASSEMBLY_STATE, LEARNER_STATE, RUN, STEPPING_STATE
from sparring.services.supervision.active_run import ActiveRun, Part

TURN_S: Final = 0.05
_SIMULATORS_S: Final = 5.0
_MONITOR_LIMITS: Final = 3
"""The monitor draws curves at the lowest priority, which takes long on a busy machine."""
_KILLED_S: Final = 5.0


async def stop_in_order(active: ActiveRun) -> None:
    """Stops the parts of a run along the flow, so that each stage can send on what it holds.

    Learners stop before coordination, so that an update that was under way then is in its step accounting.
    """
    limit_s, topology = active.settings.stop_timeout_s, active.topology
    reported_by = active.clock() + limit_s
    services = [plan.name for plan in topology.services]
    stepping = [name for name in services if name in topology.run.stepping]
    await _stop(active, stepping, limit_s, reported_by)
    await _stop(active, [plan.name for plan in topology.simulators], _SIMULATORS_S, reported_by, ask=False)
    late = {"coordination": 1, "monitor": 2}
    for name in sorted((name for name in services if name not in stepping), key=lambda name: late.get(name, 0)):
        await _stop(active, [name], limit_s * (_MONITOR_LIMITS if name == "monitor" else 1), reported_by)


async def _stop(active: ActiveRun, names: list[str], limit_s: float, reported_by: float, *, ask: bool = True) -> None:
    """Stops some parts, once all services that are still to run have reported their state."""
    with anyio.move_on_after(reported_by - active.clock()):
        services = [part for part in active.parts.values() if part.name in active.topology.run.services]
        while not all(_has_reported(active, part) for part in services):  # noqa: ASYNC110 (retained topics)
            await anyio.sleep(TURN_S)
    parts = [active.parts[name] for name in names if name in active.parts]  # a learner may be about to be added
    for part in parts:
        part.stopping = True
        if part.hosted is not None and ask:
            part.hosted.stop()
    await _wait_until_ended(parts, limit_s)
    late = [part for part in parts if not part.ended.is_set()]
    for part in late:
        # Where the run has failed, its cause is on the console.
        log = active.log.info if active.status == "failed" else active.log.warning
        log("stopped_by_force", part=part.name, seconds=limit_s)
        if part.hosted is not None:
            part.hosted.stop() if not ask else part.hosted.kill()
    await _wait_until_ended(late, _KILLED_S)
    for part in late:  # a simulator that ignores SIGTERM, or is stopped
        part.kill()
    for part in parts if ask and not active.hurried else ():
        if part.failure and part not in late:
            _report_failure(active, part)


async def _wait_until_ended(parts: list[Part], limit_s: float) -> None:
    with anyio.move_on_after(limit_s):
        for part in parts:
            await part.ended.wait()


def _report_failure(active: ActiveRun, part: Part) -> None:
    """Fails the run where a service that saves something at the end has failed: a learner, or coordination."""
    if part.name == "coordination" or part.name.startswith("learning-"):
        active.fail_late(f"{part.name} failed at the end: {part.failure}")
    else:
        active.log.warning("failed_at_the_end", part=part.name, error=part.failure, notice=True)


def _has_reported(active: ActiveRun, part: Part) -> bool:
    """Returns whether a service is no longer to run, or has reported its state since it died last.

    The incarnation of one that was restarted is then in all reports.
    """
    if part.ended.is_set() or not active.is_wanted(part):
        return True
    known = _reported_incarnations(active, part.name) if part.starts > 1 else ()
    return not part.down and all(one == active.incarnation(part.name, part.starts) for one in known)


def _reported_incarnations(active: ActiveRun, service: str) -> Iterator[str]:
    """Yields the incarnation of a service that its latest state names, and the one that coordination has counted."""
    if stepping := active.latest(service, STEPPING_STATE):
        yield stepping.source
    if assembly := active.latest(service, ASSEMBLY_STATE):
        yield assembly.origin
    if run := active.latest(service, RUN):
        yield run.start
    if learner := active.latest(service, LEARNER_STATE):
        yield learner.start
    counted = active.latest("coordination", RUN)
    if counted is not None and service in counted.incarnations:
        yield counted.incarnations[service]
