"""What coordination decides from what the stages report: who may step, who plays whom, and where every step is.

The service around it (`services/stages/coordination.py`) receives, writes the file and publishes.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sparring.pipeline.coordination.ghosts import Ghosts, SavedGhosts
from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.coordination.lessons import Change, Lessons, WeightsUpdate
from sparring.pipeline.coordination.opponents import Tournament
from sparring.pipeline.coordination.totals import SimulatorTotals
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.files import regular
from sparring.pipeline.messages import state as records
from sparring.pipeline.messages.channels import LESSONS
from sparring.pipeline.messages.incarnations import service_of
from sparring.pipeline.messages.matches import MatchupAssignment
from sparring.pipeline.queues.interface import Publisher
from sparring.pipeline.specs import BehaviorSpec

STATE_FILE: Final = "coordination.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """The content of `coordination.json`: what a restart of coordination needs.

    Attributes:
        behaviors: by name.
        self_play: None without.
        lessons: of environment parameters.
        matches: by incarnation of stepping, results that it has reported.
        simulators: what they count themselves.
        final: coordination has ended in order; these counts are the last of a session.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    behaviors: dict[str, StepLedger]
    self_play: SavedGhosts | None
    lessons: Lessons
    matches: dict[str, int]
    simulators: SimulatorTotals
    final: bool = False


SAVED: Final = TypeAdapter(SavedState)


class Coordinator:
    """The step accounting of all behaviors, self-play and lessons of one run.

    Args:
        start: incarnation of the service.
        ghosts: self-play or a tournament; None without.
        lessons: of environment parameters; None without.

    Attributes:
        ledgers: by behavior name.
        lessons: of environment parameters.
        assigned: serial of the published assignment, 0 before the first.
        specs: by behavior name, as the first simulator that has the behavior declares it.
        timed_out: a tournament ends without the matches that are missing.
    """

    def __init__(self, start: str, *, ghosts: Ghosts | None = None, lessons: Lessons | None = None) -> None:
        self.ledgers: dict[str, StepLedger] = {}
        self.ghosts = ghosts
        self.lessons = Lessons() if lessons is None else lessons
        self._published_lessons: int | None = None  # their serial
        self.assigned = 0
        self.specs: dict[str, BehaviorSpec] = {}
        self._start = start
        self.timed_out = False
        self._is_closed = False
        self._sources: dict[str, str] = {}  # by stepping service, its incarnation
        self._matches: dict[str, int] = {}  # by incarnation of stepping, results that it has reported
        self._simulators = SimulatorTotals()
        self._self_play: SavedGhosts | None = None  # of an earlier session; what it is where this one has none
        self._absent: dict[str, StepLedger] = {}  # of behaviors that an earlier session had, and this one has not

    def add(self, name: str, ledger: StepLedger) -> None:
        """Adds a behavior, which continues from what an earlier session has counted of it."""
        former = self._absent.pop(name, None)
        self.ledgers[name] = ledger if former is None else ledger.continue_from(former)

    # ---------------------------------------------------------------- what the stages report

    def on_stepping_state(self, specs: records.BehaviorSpecs, state: records.SteppingState) -> None:
        """Takes over what a stepping service reports; a new incarnation ends the one before it."""
        for behavior, spec in specs.behaviors.items():
            self.specs.setdefault(behavior, spec)
        name = service_of(state.source)
        if self._sources.get(name) != state.source:
            self._simulators.retire(name, state.source)
        self._sources[name] = state.source
        self._matches[state.source] = state.matches
        for behavior, produced in state.behaviors.items():
            if behavior in self.ledgers:  # one without a ledger has no steps yet
                self.ledgers[behavior].on_produced(state.source, produced)
        for behavior, steps in self._simulators.on_stepping_state(state).items():
            if behavior in self.ledgers:
                self.ledgers[behavior].recover(steps)
        for ledger in self.ledgers.values():
            ledger.replace(state.source)
        if self.ghosts is not None:
            self.ghosts.stepped(specs.teams, {name: ledger.ghosts for name, ledger in self.ledgers.items()})

    def on_learner_state(self, state: records.LearnerState, returns: records.EpisodeReturns | None) -> list[Change]:
        """Takes over what a learner reports; returns the changes of lessons that follow."""
        name, ledger = state.behavior, self.ledgers[state.behavior]
        if returns is not None:
            self.lessons.ended(name, ledger.episodes.new(returns))
        ledger.on_learner_state(state)
        if not (self.lessons.curricula and state.updates):  # a learner that only plays completes no lesson
            return []
        progress = state.trained / ledger.max_steps
        rating = None if self.ghosts is None else self.ghosts.rating(name)
        update = WeightsUpdate(version=state.version, progress=progress, rating=rating, done=ledger.done)
        return self.lessons.updated(name, update, {one: ledger.produced for one, ledger in self.ledgers.items()})

    def close(
        self,
        assemblies: Iterable[records.AssemblyState | None],
        unfinished: Iterable[str] = (),
        unheard: Iterable[str] = (),
    ) -> None:
        """Writes off what no learner can receive any more; what assemblies held that ended in order stays open.

        Args:
            assemblies: their latest states.
            unfinished: stepping services that died at the end: what their simulators have reported last is unknown.
            unheard: stepping services that ended before this incarnation heard of them.
        """
        for service in unfinished:
            self._simulators.retire(service)
        for service in unheard:
            self._simulators.miss(service)
        final = [one.held for one in assemblies if one is not None and one.final]
        for name, ledger in self.ledgers.items():
            ledger.close({source: steps for held in final for source, steps in held.get(name, {}).items()})
        self._is_closed = True

    # ---------------------------------------------------------------- what follows

    @property
    def assignment(self) -> MatchupAssignment | None:
        """The assignment that is decided and not published; None where there is none."""
        decided = None if self.ghosts is None else self.ghosts.rules.assignment
        return None if decided is None or decided.serial == self.assigned else decided

    def publish_lessons(self, topic: Publisher, save: Callable[[], None]) -> None:
        """Publishes new lessons, once `save` has written them; an allowance waits for those published before it."""
        if self.lessons.curricula and self._published_lessons != self.lessons.serial:
            save()
            self._published_lessons = self.lessons.serial
            topic.publish(LESSONS, self.lessons.state)

    def next_flushes(self) -> list[str]:
        """Decides flushes; returns the names of the behaviors that get a new one.

        None is made before the results of all matches that ended have arrived: new weights follow a flush, and with
        them new matchups, which depend on the results. So lockstep repeats them.
        """
        if self._unread(self._sources.values()):
            return []
        return [name for name, ledger in self.ledgers.items() if ledger.next_flush()]

    @property
    def flushes(self) -> dict[str, records.FlushRequest]:
        """The latest flush of each behavior that had one."""
        return {name: ledger.flush for name, ledger in self.ledgers.items() if ledger.flush.serial}

    def allowances(self) -> dict[str, dict[str, records.StepAllowance]]:
        """Shares out what the step budgets have left: by incarnation of stepping, by behavior name."""
        lessons = self._published_lessons or 0
        found: dict[str, dict[str, records.StepAllowance]] = {source: {} for source in self._sources.values()}
        for name, ledger in self.ledgers.items():
            if self.ghosts is not None and not self.ghosts.knows(name, ledger.version):
                continue  # it is not decided yet who plays with these weights
            for source, allowance in ledger.allowances().items():
                if source in found:
                    found[source][name] = replace(allowance, assignment=self.assigned, lessons=lessons)
        return found

    @property
    def finished(self) -> bool:
        """Whether every learner has reached its end, or the tournament is over."""
        if self.ghosts is not None and isinstance(self.ghosts.rules, Tournament):
            return self.timed_out or self.ghosts.rules.complete
        needed = [ledger for ledger in self.ledgers.values() if not ledger.added or ledger.produced]
        return bool(needed) and all(ledger.learner.done for ledger in needed)

    def state(self) -> records.RunState:
        """The run as it stands."""
        ledgers = self.ledgers
        step_counts = {name: ledger.step_counts() for name, ledger in ledgers.items()}
        means = {name: ledger.episodes.reward_mean for name, ledger in ledgers.items()}
        learners = {f"learning-{name}": ledger.learner.start for name, ledger in ledgers.items()}
        return records.RunState(
            start=self._start,
            finished=self.finished,
            specs=dict(self.specs),
            step_counts=step_counts,
            losses={name: ledger.losses for name, ledger in ledgers.items()},
            unaccounted={
                name: self._simulators.total(name) - counts.produced
                for name, counts in step_counts.items()
                if not self._simulators.unheard
            },
            versions={name: ledger.version for name, ledger in ledgers.items()},
            reward_mean_last100={name: mean for name, mean in means.items() if mean is not None},
            episodes={name: ledger.episodes.episodes for name, ledger in ledgers.items()},
            ratings={} if self.ghosts is None else self.ghosts.ratings(),
            matches_lost=self._unread(self._matches.keys() - set(self._sources.values())),
            incarnations={name: start for name, start in (self._sources | learners).items() if start},
            final=self._is_closed,
        )

    def gauges(self) -> Iterator[tuple[str, float]]:
        """Yields name and value of each gauge."""
        for name, ledger in self.ledgers.items():
            for term, steps in asdict(ledger.step_counts()).items():
                yield f"step_counts.{term}/{name}", steps
            yield f"in_flight/{name}", ledger.in_flight
            yield f"budget/{name}", ledger.limit
            yield f"episodes/{name}", ledger.episodes.episodes
            if (mean := ledger.episodes.reward_mean) is not None:
                yield f"reward_mean_last100/{name}", mean
            for parameter, number in self.lessons.numbers(name).items():
                yield f"lesson/{parameter}/{name}", number
        if self.ghosts is not None:
            yield from self.ghosts.gauges()

    # ---------------------------------------------------------------- on disk

    def saved(self) -> bytes:
        """Returns all that a restart needs as JSON, and brings the files of self-play up to date.

        Raises:
            OSError: the disk is full or the folder cannot be written.
        """
        state = SavedState(
            behaviors=self._absent | self.ledgers,
            self_play=self._self_play if self.ghosts is None else self.ghosts.keep(),
            lessons=self.lessons,
            matches=self._matches,
            simulators=self._simulators,
            final=self._is_closed,
        )
        return SAVED.dump_json(state)

    def restore(self, saved: SavedState) -> None:
        """Continues from what an earlier incarnation has saved."""
        self._self_play = saved.self_play
        if self.ghosts is not None and saved.self_play is not None:
            self.ghosts.restore(saved.self_play)
        self.lessons = self.lessons.continue_from(saved.lessons)
        self._matches, self._simulators = saved.matches, saved.simulators
        self._absent = dict(saved.behaviors)
        for name, ledger in self.ledgers.items():
            self.add(name, ledger)

    def begin_session(self, saved: SavedState | None) -> None:
        """Begins another session of a run, after `saved` of the former one; None where its file is gone."""
        for ledger in (*self.ledgers.values(), *self._absent.values()):
            ledger.close_former_run()
        if saved is None:
            self._simulators.unheard.add("")
        elif not saved.final:
            self._simulators.miss_last_counts()

    # ---------------------------------------------------------------- inside

    def _unread(self, sources: Iterable[str]) -> int:
        """Returns how many results of matches these incarnations of stepping have reported that have not arrived."""
        received = {source: 0 if self.ghosts is None else self.ghosts.received(source) for source in sources}
        return sum(max(0, self._matches[source] - arrived) for source, arrived in received.items())


def read_state(path: Path) -> SavedState | None:
    """Returns what coordination has written to its file; None where there is none.

    Raises:
        ServiceError: a loss of power or another program has damaged it, or another version has written it.
    """
    if not path.exists():
        return None
    try:
        return SAVED.validate_json(regular(path).read_bytes())
    except OSError as error:
        raise ServiceError(
            f"got {path}, which cannot be read ({error.strerror}); expected the step counts of this run; correct its "
            "permissions, or remove what is in its place"
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ServiceError(
            f"got {path}, which cannot be read ({where}: {first['msg']}); expected the step counts of this run; "
            "remove the file to continue with new counts, which begin with the steps that the checkpoints hold"
        ) from error
