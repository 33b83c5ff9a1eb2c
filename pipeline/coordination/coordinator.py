"""What coordination decides from what the stages report: who may step, who plays whom, and where every step is.

The service around it (`services/stages/coordination.py`) receives, writes the file and publishes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sparring.pipeline.coordination.ghosts import Ghosts
from sparring.pipeline.coordination.route import LAST_EPISODES, Route
from sparring.pipeline.coordination.teaching import LessonPlan
from sparring.pipeline.coordination.tournament import Tournament
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.messages.incarnations import precedes, service_of
from sparring.pipeline.messages.matches import MatchupAssignment
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import (
    BehaviorSpecs,
    FlushRequest,
    LearnerState,
    RunState,
    StepAllowance,
    SteppingState,
)
from sparring.pipeline.specs import BehaviorSpec

STATE_FILE: Final = "coordination.json"


class Coordinator:
    """The routes of all behaviors, self-play and lessons of one run.

    Args:
        start: incarnation of the service.
        routes: by behavior name.
        added: behavior names that the run was extended by; the run does not wait for one that never stepped.
        ghosts: self-play or a tournament; None without.
        teaching: the lessons of environment parameters; None without.

    Attributes:
        assigned: serial of the published assignment, 0 before the first.
        specs: by behavior name, as the first simulator that has the behavior declares it.
    """

    def __init__(
        self,
        start: str,
        routes: Mapping[str, Route],
        *,
        added: Iterable[str] = (),
        ghosts: Ghosts | None = None,
        teaching: LessonPlan | None = None,
    ) -> None:
        self.routes = routes
        self.ghosts = ghosts
        self.teaching = LessonPlan({}, {}, None) if teaching is None else teaching
        self.assigned = 0
        self.specs: dict[str, BehaviorSpec] = {}
        self._start = start
        self._added = frozenset(added)
        self._timed_out = False
        self._sources: dict[str, str] = {}  # by stepping service, its incarnation

    # ---------------------------------------------------------------- what the stages report

    def on_stepping_state(self, specs: BehaviorSpecs, state: SteppingState) -> None:
        """Takes over what a stepping service reports; a new incarnation ends the one before it."""
        for behavior, spec in specs.behaviors.items():
            self.specs.setdefault(behavior, spec)
        name = service_of(state.source)
        former = self._sources.get(name)
        if former is not None and former != state.source:
            for route in self.routes.values():
                route.ledger.source_gone(former)
        self._sources[name] = state.source
        for behavior, produced in state.behaviors.items():
            if behavior in self.routes:  # one without a route gets a learner now, and this service a new incarnation
                self.routes[behavior].ledger.stepped(state.source, produced)
        if self.ghosts is not None:
            self.ghosts.stepped(specs.teams, {name: route.ledger.ghosts for name, route in self.routes.items()})

    def on_learner_state(self, route: Route, state: LearnerState) -> int:
        """Takes over what a learner reports.

        Returns:
            Steps that its weights hold and that were not counted as produced before.
        """
        unrecorded = route.ledger.unrecorded
        route.ledger.on_learner_state(state)
        route.ledger.learner(state, route.ledger.taken_earlier)
        route.done, route.latest = state.done, state.latest
        return route.ledger.unrecorded - unrecorded

    def on_segments(self, route: Route, segments: Segments) -> tuple[bool, list[tuple[str, float]]]:
        """Counts segments that arrive.

        Returns:
            Whether they are new, and not sent again after a restart; and each learner of a match that ended, with its
            score.
        """
        ledger = route.ledger
        for known in [known for known in ledger.sources if precedes(known, segments.source)]:
            ledger.source_closed(known)  # no message of an earlier incarnation follows the first of a later one
        new = ledger.is_new(segments)
        ledger.routed(segments)
        if not new:
            return False, []
        scores = []
        if self.ghosts is not None and segments.results is not None:
            scores = self.ghosts.results(segments.source, route.name, segments.results)
        self.teaching.count(segments)
        returns = segments.episodes.returns
        route.last_returns.extend(returns[-LAST_EPISODES:].tolist())
        route.episodes += len(returns)
        return True, scores

    def close_former_run(self) -> None:
        """Writes off the steps that the processes of a run held before it was resumed."""
        for route in self.routes.values():
            for source in route.ledger.sources:
                route.ledger.source_closed(source)
            route.ledger.on_all_delivered()

    def close(self) -> None:
        """Holds what is queued, and writes off what no learner can receive any more."""
        for route in self.routes.values():
            route.empty()
            route.ledger.mark_lost(route.latest, over=True)

    def time_out(self) -> bool:
        """Ends a tournament without the matches that are missing; returns False if it is over already."""
        if self.finished:
            return False
        self._timed_out = True
        return True

    # ---------------------------------------------------------------- what follows

    @property
    def assignment(self) -> MatchupAssignment | None:
        """The assignment that is decided and not published; None where there is none."""
        decided = None if self.ghosts is None else self.ghosts.rules.assignment
        return None if decided is None or decided.serial == self.assigned else decided

    def next_flushes(self) -> list[str]:
        """Decides flushes; returns the names of the behaviors that get a new one."""
        return [name for name, route in self.routes.items() if route.ledger.next_flush()]

    @property
    def flushes(self) -> dict[str, FlushRequest]:
        """The latest flush of each behavior that had one."""
        return {name: route.ledger.flush for name, route in self.routes.items() if route.ledger.flush.serial}

    def allowances(self) -> dict[str, dict[str, StepAllowance]]:
        """Shares out what the step budgets have left: by incarnation of stepping, by behavior name."""
        found: dict[str, dict[str, StepAllowance]] = {source: {} for source in self._sources.values()}
        for name, route in self.routes.items():
            if self.ghosts is not None and not self.ghosts.knows(name, route.ledger.version):
                continue  # it is not decided yet who plays with these weights
            for source, allowance in route.ledger.allowances().items():
                if source in found:
                    found[source][name] = replace(allowance, assignment=self.assigned, lessons=self.teaching.published)
        return found

    @property
    def finished(self) -> bool:
        """Whether every learner has reached its end, or the tournament is over."""
        if self.ghosts is not None and isinstance(self.ghosts.rules, Tournament):
            return self._timed_out or self.ghosts.rules.complete
        needed = [route for name, route in self.routes.items() if name not in self._added or route.ledger.produced]
        return bool(needed) and all(route.done for route in needed)

    def state(self) -> RunState:
        """The run as it stands."""
        routes = self.routes
        means = {name: route.reward_mean for name, route in routes.items()}
        return RunState(
            start=self._start,
            finished=self.finished,
            specs=dict(self.specs),
            step_counts={name: route.ledger.step_counts() for name, route in routes.items()},
            routed={name: route.steps for name, route in routes.items()},
            versions={name: route.ledger.version for name, route in routes.items()},
            reward_mean_last100={name: mean for name, mean in means.items() if mean is not None},
            episodes={name: route.episodes for name, route in routes.items()},
            ratings={} if self.ghosts is None else self.ghosts.ratings(),
            known_incarnations=self._known_incarnations(),
        )

    def gauges(self) -> Iterator[tuple[str, float]]:
        """Yields name and value of each gauge."""
        for name, route in self.routes.items():
            yield from route.gauges()
            yield from self.teaching.gauges(name)
        if self.ghosts is not None:
            yield from self.ghosts.gauges()

    # ---------------------------------------------------------------- on disk

    def to_plain(self) -> dict[str, Any]:
        """Returns all that a restart needs, as plain JSON values, and brings the files of self-play up to date.

        Raises:
            OSError: the disk is full or the folder cannot be written.
        """
        return {
            "behaviors": {name: route.to_plain() for name, route in self.routes.items()},
            "self_play": None if self.ghosts is None else self.ghosts.keep(),
            "lessons": self.teaching.to_plain(),
        }

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Continues from what `to_plain` returned."""
        if self.ghosts is not None and plain["self_play"] is not None:
            self.ghosts.restore(plain["self_play"])
        self.teaching.restore(plain.get("lessons"))  # a file may be older than the lessons
        for name, saved in plain["behaviors"].items():
            if name in self.routes:
                self.routes[name].restore(saved)

    # ---------------------------------------------------------------- inside

    def _known_incarnations(self) -> dict[str, str]:
        known = {name: route.ledger.known_incarnations for name, route in self.routes.items()}
        assembly = [one for one, _ in known.values() if one]
        first = next((one for one in assembly if not any(precedes(other, one) for other in assembly)), "")
        learners = {f"learning-{name}": learner for name, (_, learner) in known.items()}
        return {name: start for name, start in (self._sources | learners | {"assembly": first}).items() if start}


def read_state(path: Path) -> dict[str, Any] | None:
    """Returns what coordination has written to its file; None where there is none.

    Raises:
        ServiceError: a loss of power or another program has damaged it.
    """
    if not path.exists():
        return None
    try:
        plain: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise ServiceError(
            f"got {path}, which cannot be read ({error}); expected the step counts of this run; "
            "remove the file to continue with new counts, which begin with the steps that the checkpoints hold"
        ) from error
    return plain
