"""What coordination decides from what the stages report: who may step, who plays whom, and where every step is.

The service around it (`services/stages/coordination.py`) receives, writes the file and publishes.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from sparring.pipeline.coordination.ghosts import Ghosts
from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.coordination.simulators import SimulatorTotals
from sparring.pipeline.coordination.teaching import LessonPlan
from sparring.pipeline.coordination.tournament import Tournament
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.files import known_shape
from sparring.pipeline.messages.incarnations import service_of
from sparring.pipeline.messages.matches import MatchupAssignment, Results
from sparring.pipeline.messages.state import (
    AssemblyState,
    BehaviorSpecs,
    EpisodeReturns,
    FlushRequest,
    LearnerState,
    RunState,
    StepAllowance,
    SteppingState,
)
from sparring.pipeline.specs import BehaviorSpec

STATE_FILE: Final = "coordination.json"
LAST_EPISODES: Final = 100


@dataclass(slots=True)
class EpisodeCounts:
    """The episodes of one behavior that have ended, over all incarnations of its learner.

    Attributes:
        episodes: number of them.
        last_returns: of the latest.
        start: incarnation of the learner that reported them last, and `reported` how many it did.
    """

    episodes: int = 0
    last_returns: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_EPISODES))
    start: str = ""
    reported: int = 0

    @property
    def reward_mean(self) -> float | None:
        """Mean return of the last episodes; None before the first."""
        return sum(self.last_returns) / len(self.last_returns) if self.last_returns else None

    def new(self, latest: EpisodeReturns) -> EpisodeReturns:
        """Counts what a learner reports, and returns the part of it that is new."""
        if latest.start != self.start:
            self.start, self.reported = latest.start, 0
        new = latest.episodes - self.reported
        self.reported = latest.episodes
        self.episodes += new
        returns, lessons = latest.returns[-new:] if new else latest.returns[:0], latest.lessons[-new:]
        self.last_returns.extend(returns.tolist())
        return replace(latest, returns=returns, lessons=lessons if new else lessons[:0])


class Coordinator:
    """The step accounting of all behaviors, self-play and lessons of one run.

    Args:
        start: incarnation of the service.
        ghosts: self-play or a tournament; None without.
        teaching: the lessons of environment parameters; None without.

    Attributes:
        ledgers: by behavior name.
        assigned: serial of the published assignment, 0 before the first.
        specs: by behavior name, as the first simulator that has the behavior declares it.
        episodes: by behavior name.
    """

    def __init__(
        self,
        start: str,
        *,
        ghosts: Ghosts | None = None,
        teaching: LessonPlan | None = None,
    ) -> None:
        self.ledgers: dict[str, StepLedger] = {}
        self.ghosts = ghosts
        self.teaching = LessonPlan({}, None) if teaching is None else teaching
        self.assigned = 0
        self.specs: dict[str, BehaviorSpec] = {}
        self.episodes: dict[str, EpisodeCounts] = {}
        self._start = start
        self._added: set[str] = set()
        self._timed_out = False
        self._sources: dict[str, str] = {}  # by stepping service, its incarnation
        self._matches: dict[str, int] = {}  # by incarnation of stepping, results that it has reported
        self._simulators = SimulatorTotals()
        self._assembly: AssemblyState | None = None

    def add(self, name: str, ledger: StepLedger, max_steps: int, *, added: bool = False) -> None:
        """Adds a behavior.

        Args:
            name: of the behavior.
            ledger: of its steps.
            max_steps: where its learner ends.
            added: only simulators have named it; the run does not wait for it where it never steps.
        """
        self.ledgers[name] = ledger
        self.episodes[name] = EpisodeCounts()
        self.teaching.max_steps[name] = max_steps
        if added:
            self._added.add(name)

    # ---------------------------------------------------------------- what the stages report

    def on_stepping_state(self, specs: BehaviorSpecs, state: SteppingState) -> None:
        """Takes over what a stepping service reports; a new incarnation ends the one before it."""
        for behavior, spec in specs.behaviors.items():
            self.specs.setdefault(behavior, spec)
        name = service_of(state.source)
        self._sources[name] = state.source
        self._matches[state.source] = state.matches
        for behavior, produced in state.behaviors.items():
            if behavior in self.ledgers:  # one without a ledger has no steps yet
                self.ledgers[behavior].on_produced(state.source, produced)
        for behavior, steps in self._simulators.on_stepping_state(state).items():
            if behavior in self.ledgers:
                self.ledgers[behavior].recovered += steps
        for ledger in self.ledgers.values():
            ledger.replace(state.source)
        if self.ghosts is not None:
            self.ghosts.stepped(specs.teams, {name: ledger.ghosts for name, ledger in self.ledgers.items()})

    def on_learner_state(self, state: LearnerState, returns: EpisodeReturns | None) -> list[dict[str, Any]]:
        """Takes over what a learner reports; returns a log line for each lesson that this ends."""
        if returns is not None:
            self.teaching.count(state.behavior, self.episodes[state.behavior].new(returns))
        self.ledgers[state.behavior].on_learner_state(state)
        return list(self.teaching.learned(state, self.ledgers))

    def on_results(self, results: Results) -> list[tuple[str, float]]:
        """Rates matches that ended, and returns each of their learners with its score."""
        return [] if self.ghosts is None else self.ghosts.results(results)

    def on_assembly_state(self, state: AssemblyState) -> None:
        """Takes over what assembly holds."""
        self._assembly = state

    def close(self) -> None:
        """Writes off what no learner can receive any more; what assembly held when it ended in order stays open."""
        state = self._assembly
        held = state.held if state is not None and state.final else {}
        for name, ledger in self.ledgers.items():
            ledger.close(held.get(name, {}))

    def close_former_run(self) -> None:
        """Writes off what the processes of a run held before it was resumed."""
        for ledger in self.ledgers.values():
            ledger.close_former_run()

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
        """Decides flushes; returns the names of the behaviors that get a new one.

        None is made before the results of all matches that ended have arrived: new weights follow a flush, and with
        them new matchups, which depend on the results. So lockstep repeats them.
        """
        if any(self._matches[source] > self._received(source) for source in self._sources.values()):
            return []
        return [name for name, ledger in self.ledgers.items() if ledger.next_flush()]

    @property
    def flushes(self) -> dict[str, FlushRequest]:
        """The latest flush of each behavior that had one."""
        return {name: ledger.flush for name, ledger in self.ledgers.items() if ledger.flush.serial}

    def allowances(self) -> dict[str, dict[str, StepAllowance]]:
        """Shares out what the step budgets have left: by incarnation of stepping, by behavior name."""
        found: dict[str, dict[str, StepAllowance]] = {source: {} for source in self._sources.values()}
        for name, ledger in self.ledgers.items():
            if self.ghosts is not None and not self.ghosts.knows(name, ledger.version):
                continue  # it is not decided yet who plays with these weights
            for source, allowance in ledger.allowances().items():
                if source in found:
                    found[source][name] = replace(allowance, assignment=self.assigned, lessons=self.teaching.published)
        return found

    @property
    def finished(self) -> bool:
        """Whether every learner has reached its end, or the tournament is over."""
        if self.ghosts is not None and isinstance(self.ghosts.rules, Tournament):
            return self._timed_out or self.ghosts.rules.complete
        needed = [ledger for name, ledger in self.ledgers.items() if name not in self._added or ledger.produced]
        return bool(needed) and all(ledger.learner.done for ledger in needed)

    def state(self) -> RunState:
        """The run as it stands."""
        ledgers = self.ledgers
        step_counts = {name: ledger.step_counts() for name, ledger in ledgers.items()}
        means = {name: one.reward_mean for name, one in self.episodes.items()}
        learners = {f"learning-{name}": ledger.learner.start for name, ledger in ledgers.items()}
        return RunState(
            start=self._start,
            finished=self.finished,
            specs=dict(self.specs),
            step_counts=step_counts,
            losses={name: ledger.losses for name, ledger in ledgers.items()},
            unaccounted={name: self._simulators.total(name) - counts.produced for name, counts in step_counts.items()},
            versions={name: ledger.version for name, ledger in ledgers.items()},
            reward_mean_last100={name: mean for name, mean in means.items() if mean is not None},
            episodes={name: one.episodes for name, one in self.episodes.items()},
            ratings={} if self.ghosts is None else self.ghosts.ratings(),
            matches_lost=self._matches_lost(),
            incarnations={name: start for name, start in (self._sources | learners).items() if start},
        )

    def gauges(self) -> Iterator[tuple[str, float]]:
        """Yields name and value of each gauge."""
        for name, ledger in self.ledgers.items():
            for term, steps in asdict(ledger.step_counts()).items():
                yield f"step_counts.{term}/{name}", steps
            yield f"in_flight/{name}", ledger.in_flight
            yield f"budget/{name}", ledger.budget
            yield f"episodes/{name}", self.episodes[name].episodes
            if (mean := self.episodes[name].reward_mean) is not None:
                yield f"reward_mean_last100/{name}", mean
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
            "behaviors": {
                name: {
                    "ledger": ledger.to_plain(),
                    "episodes": {**asdict(self.episodes[name]), "last_returns": [*self.episodes[name].last_returns]},
                }
                for name, ledger in self.ledgers.items()
            },
            "self_play": None if self.ghosts is None else self.ghosts.keep(),
            "lessons": self.teaching.to_plain(),
            "matches": self._matches,
            "simulators": self._simulators.to_plain(),
        }

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Continues from what `to_plain` returned."""
        if self.ghosts is not None and plain["self_play"] is not None:
            self.ghosts.restore(plain["self_play"])
        self.teaching.restore(plain["lessons"])
        self._matches = dict(plain["matches"])
        self._simulators.restore(plain["simulators"])
        for name, saved in plain["behaviors"].items():
            if name in self.ledgers:
                self.ledgers[name].restore(saved["ledger"])
                returns = deque(saved["episodes"]["last_returns"], maxlen=LAST_EPISODES)
                self.episodes[name] = EpisodeCounts(**{**saved["episodes"], "last_returns": returns})

    # ---------------------------------------------------------------- inside

    def _received(self, source: str) -> int:
        return 0 if self.ghosts is None else self.ghosts.received(source)

    def _matches_lost(self) -> int:
        """Returns the results that died with an incarnation of stepping before they were read."""
        dead = self._matches.keys() - set(self._sources.values())
        return sum(self._matches[source] - self._received(source) for source in dead)


def read_state(path: Path) -> dict[str, Any] | None:
    """Returns what coordination has written to its file; None where there is none.

    Raises:
        ServiceError: a loss of power or another program has damaged it.
    """
    if not path.exists():
        return None
    with of_known_shape(path):
        plain: dict[str, Any] = dict(json.loads(path.read_bytes()))
    return plain


of_known_shape = partial(
    known_shape,
    refused=ServiceError,
    remedy="remove it to continue with new counts, which begin with the steps that the checkpoints hold",
)
"""Reports that coordination's file holds something else than coordination writes."""
