"""The step budget and the books of one behavior: arithmetic without I/O.

One rule bounds how old the data can be (`docs/decisions/0003-freshness.md`):

    in flight = produced + permitted and not yet produced - done <= (1 + overlap) x buffer_size
    done = trained + ghost + stale + lost

and one rule keeps the learner from starving: once `buffer_size` steps have been produced that no
update has used or is using, everything open is cut. While an update runs, that is the moment the
budget is used up: no further step would come before its end, so cutting then, and not when the
learner is idle, changes no segment and lets the data arrive before they are wanted. The books use
the same counts:

    produced = trained + ghost + stale + lost + open

Counts of a source, an origin or a learner are cumulative since its start. A restart is seen by its
new name; what the old one had counted stays counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.starts import comes_before
from sparring.pipeline.messages.state import FlushRequest, LearnerState, Marks, ProducedSteps, StepAllowance, StepCounts


@dataclass(slots=True)
class Origin:
    """One start of assembly, as far as it concerns one source.

    Attributes:
        began: steps the source had produced when this start first heard of it.
        sequence: of its last message.
        received: steps that came in its messages.
        orphaned: steps it could not record.
        taken: of those received, steps that learners have taken.
        taken_before: of these, those that starts before the present one of the learner have.
        settled: of these, those that are accounted for: trained, played, too old or lost.
        kept: of these, those that the weights restored then hold.
    """

    began: int
    sequence: int = 0
    received: int = 0
    orphaned: int = 0
    taken: int = 0
    taken_before: int = 0
    settled: int = 0
    kept: int = 0


@dataclass(slots=True)
class SteppingSource:
    """One start of a stepping process.

    Attributes:
        serial: of the permit it was given last.
        allowance: steps it may produce, cumulative.
        produced: steps it has completed, as far as known.
        origins: by assembly start that sent its segments, in their order.
        agents: live agents; without any it needs no permit, but in lockstep, where all wait for one another's updates.
        ghosts: steps that ghosts have played; all else here counts those of agents that learn.
        alive: the process runs.
        closed: all that it produced and that was not lost has come.
    """

    serial: int = 0
    allowance: int = 0
    produced: int = 0
    origins: dict[str, Origin] = field(default_factory=dict)
    agents: int = 0
    ghosts: int = 0
    alive: bool = True
    closed: bool = False

    def origin(self, name: str, began: int) -> Origin:
        """One start of assembly; entered in its place where it is new."""
        if name not in self.origins:
            later = [one for one in self.origins if comes_before(name, one)]
            moved = {one: self.origins.pop(one) for one in later}
            self.origins[name] = Origin(began)
            self.origins.update(moved)
        return self.origins[name]

    @property
    def received(self) -> int:
        """Steps that came in segments."""
        return sum(origin.received for origin in self.origins.values())

    @property
    def lost(self) -> int:
        """Steps that a crash took before they came.

        An assembly start has the steps from its beginning to that of the next one. What came late of an
        earlier start is taken off again.
        """
        if self.closed:
            return max(0, self.produced - self.received)
        origins = list(self.origins.values())
        if not origins:
            return 0
        lost = sum(after.began - one.began - one.received for one, after in itertools.pairwise(origins))
        return origins[0].began + lost + origins[-1].orphaned

    @property
    def committed(self) -> int:
        """Steps it has produced or may still produce."""
        return max(self.allowance, self.produced) if self.alive else self.produced

    @property
    def missing(self) -> int:
        """Steps it has produced that neither came nor are known to be lost."""
        return max(0, self.produced - self.received - self.lost)


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """Steps lost in one crash.

    Attributes:
        stage: whose process died.
        start: that start of it; of assembly and of a learner the next one, by which the crash was noticed.
        steps: how many; below 0 for some that were told of too soon.
        cause: what they were doing there.
    """

    stage: str
    start: str
    steps: int
    cause: str


class StepLedger:
    """The budget and the books of one behavior.

    Attributes:
        ghost: steps that came to a learner that only plays, by all its starts.
        stale: steps dropped as too old, by all learner starts.
        lost_learning: steps that learners had taken and the weights restored after them do not hold.
        unrecorded: steps in restored weights that the books had not heard of; they count as produced.
        trained: steps in the lineage of the current weights.
        training: steps in the update under way.
        flush: the latest.
        version: highest that a learner said it had published.

    Args:
        buffer_size: steps of an update.
        overlap: 1 lets one buffer be collected while another is trained, 0 is lockstep.
        processes: stepping processes that share the budget.
    """

    def __init__(self, *, buffer_size: int, overlap: int, processes: int = 1) -> None:
        self.buffer_size = buffer_size
        self.budget = (1 + overlap) * buffer_size
        self.overlap = overlap
        self.sources: dict[str, SteppingSource] = {}
        self.incidents: list[Incident] = []
        self.ghost = 0
        self.stale = 0
        self.lost_learning = 0
        self.unrecorded = 0
        self.trained = 0
        self.training = 0
        self.flush = FlushRequest(serial=0, marks={})
        self.version = 0
        self._slice = self.budget if processes == 1 else max(1, buffer_size // (2 * processes))
        self._learner = ""
        self._learner_stale = 0
        self._learner_ghost = 0
        self._flushed_at = -1
        self._reported = 0
        self._serving = ""
        self._seen: dict[tuple[str, str], int] = {}  # by source and origin, steps that have come in this start of ours

    # ---------------------------------------------------------------- the sums

    @property
    def produced(self) -> int:
        """Steps produced so far."""
        return self.unrecorded + sum(source.produced for source in self.sources.values())

    @property
    def ghosts(self) -> int:
        """Steps that ghosts have played so far, of self-play."""
        return sum(source.ghosts for source in self.sources.values())

    @property
    def lost(self) -> int:
        """Steps lost in crashes so far."""
        return self.lost_learning + sum(source.lost for source in self.sources.values())

    @property
    def done(self) -> int:
        """Steps that are no longer in flight."""
        return self.trained + self.ghost + self.stale + self.lost

    @property
    def in_flight(self) -> int:
        """Steps produced or permitted that no finished update has used."""
        return self.unrecorded + sum(source.committed for source in self.sources.values()) - self.done

    @property
    def waiting(self) -> int:
        """Steps produced that no update has used or is using."""
        return self.produced - self.done - self.training

    def step_counts(self) -> StepCounts:
        """Where every produced step is; `open` is what the other terms leave.

        A ghost's step is produced and done with at once: no budget holds it back and no segment carries it.
        """
        return StepCounts(
            produced=self.produced + self.ghosts,
            trained=self.trained,
            ghost=self.ghost + self.ghosts,
            stale=self.stale,
            lost=self.lost,
            open=self.produced - self.done,
        )

    # ---------------------------------------------------------------- what the stages say

    def stepped(self, name: str, produced: ProducedSteps) -> None:
        """A source says how far it is, and what it keeps of its permit."""
        source = self._source(name)
        source.produced = max(source.produced, produced.steps)
        source.ghosts = max(source.ghosts, produced.ghosts)
        source.agents = produced.agents
        source.alive = not source.closed  # a learner may have told of it before it was heard of
        if produced.serial >= source.serial:
            source.serial, source.allowance = produced.serial, produced.allowance

    def is_new(self, segments: Segments) -> bool:
        """Whether `routed` has not counted these: after our own restart they are sent again."""
        source = self.sources.get(segments.source)
        origin = None if source is None else source.origins.get(segments.origin)
        return origin is None or segments.sequence > origin.sequence

    def routed(self, segments: Segments) -> int:
        """Segments arrived: counts them, and what their assembly start could not have.

        Returns:
            Steps newly found lost. Segments sent again after our own restart count nothing twice.
        """
        source = self._source(segments.source)
        before = source.lost
        origin = source.origin(segments.origin, segments.began)
        way = segments.source, segments.origin
        self._seen[way] = max(self._seen.get(way, 0), segments.handed_on)
        if segments.sequence <= origin.sequence:
            self._on_redelivery(origin, segments)
            return 0
        origin.sequence, origin.orphaned = segments.sequence, segments.orphaned
        origin.received = max(origin.received, segments.handed_on)
        source.produced = max(source.produced, segments.received)
        source.ghosts = max(source.ghosts, segments.ghosts)
        lost = source.lost - before
        self._note("assembly", segments.origin, lost, "open or not yet sent at the crash")
        return lost

    def source_gone(self, name: str) -> None:
        """A source died or was replaced: its permit returns; its steps are lost unless they still come."""
        self._retire(self._source(name))

    def source_closed(self, name: str) -> int:
        """All that a dead source's steps became has arrived; returns the steps newly found lost."""
        source = self._source(name)
        before = source.lost
        self._retire(source)
        source.closed = True
        lost = source.lost - before
        self._note("stepping", name, lost, "not yet acknowledged by assembly")
        return lost

    def serve(self, start: str) -> None:
        """From now on this start of the learner takes segments; those before it took what they have acknowledged."""
        if start != self._serving:
            self._serving = start
            for origin in self._origins():
                origin.taken_before = origin.taken

    def on_delivered(self, segments: Segments) -> None:
        """The learner has acknowledged segments."""
        origin = self._source(segments.source).origin(segments.origin, segments.began)
        origin.taken = max(origin.taken, segments.handed_on)

    def on_all_delivered(self) -> None:
        """What came was taken by a learner of a former run, or is gone with it."""
        for origin in self._origins():
            origin.taken = origin.taken_before = origin.received

    def on_learner_state(self, state: LearnerState) -> None:
        """The learner says how far it has taken what came; our books may be older than what it says.

        What its weights hold was taken by those before it, whether they could still acknowledge it or not.
        """
        for name, sources in state.latest.items():
            for source_name, mark in sources.items():
                source = self.sources.setdefault(source_name, SteppingSource(alive=False))
                before = source.lost
                origin = source.origin(name, mark.began)
                origin.received = max(origin.received, mark.steps)
                source.produced = max(source.produced, mark.began + origin.received)
                self._note("assembly", name, source.lost - before, "by what the learner knows of what came")
        for name, sources in state.restored.items():
            for source_name, mark in sources.items():
                origin = self.sources[source_name].origins[name]
                origin.taken = max(origin.taken, mark.steps)
                origin.taken_before = max(origin.taken_before, mark.steps)
        self.mark_lost(state.latest)

    def mark_lost(self, latest: Marks, *, over: bool = False) -> None:
        """Gives up what an earlier start of ours held, and an earlier start of assembly cannot send again.

        A learner takes in order, and first what arrived from that start of ours: once it has taken something of a later
        start of assembly, it will take no more of the earlier one.

        Args:
            latest: how far the learner has taken what came.
            over: it will take nothing more at all.
        """
        known = {start for source in self.sources.values() for start in source.origins} if over else latest.keys()
        for name, source in self.sources.items():
            before = source.lost
            for start, origin in source.origins.items():
                if any(_follows(later, start) for later in known):
                    mark = latest.get(start, {}).get(name)
                    there = max(origin.taken, self._seen.get((name, start), 0), 0 if mark is None else mark.steps)
                    origin.received = min(origin.received, there)
            self._note("coordination", name, source.lost - before, "held by what died, and by an assembly that died")

    @property
    def known_incarnations(self) -> tuple[str, str]:
        """The starts of assembly and of the learner that are counted with, "" for none.

        Of assembly the one before, as long as the next has not told of all of whose steps some are under way.
        """
        sources = [source for source in self.sources.values() if source.alive and source.missing and source.origins]
        last = [next(reversed(source.origins)) for source in sources]
        first = next((one for one in last if not any(comes_before(other, one) for other in last)), "")
        return first, self._learner

    @property
    def taken_earlier(self) -> int:
        """Steps that learners before the present start of one had taken."""
        return sum(origin.taken_before for origin in self._origins())

    def learner(self, state: LearnerState, taken_earlier: int) -> int:
        """The learner says where it stands.

        Args:
            state: of this start of it.
            taken_earlier: steps that its earlier starts had taken, in all.

        Returns:
            Steps newly found lost: what earlier starts had taken and the restored weights do not hold.
        """
        lost = 0
        if state.start != self._learner:
            held = self.unrecorded + taken_earlier - self.stale - self.ghost - self.lost_learning
            # It may have trained before we heard of it: that was not restored.
            own = state.taken - state.training - state.buffered - state.stale - state.ghost
            kept = state.trained - own
            lost = max(0, held - kept)
            self.lost_learning += lost
            # A checkpoint that does not say what it holds, as one that was put there by hand, may hold more than the
            # books. That was produced; without it the budget would allow as much more in flight.
            beyond = max(0, kept - held)
            # What was played or too old, and not acknowledged, is sent again, and then played or too old once more.
            self.unrecorded += beyond - self._take_back(beyond)
            self._note("learning", state.start, lost, "taken and not in the checkpoint")
            self._settle(state)
            self._learner, self._learner_stale, self._learner_ghost = state.start, 0, 0
        self.stale += state.stale - self._learner_stale
        self.ghost += state.ghost - self._learner_ghost
        self._learner_stale, self._learner_ghost = state.stale, state.ghost
        self.trained, self.training = state.trained, state.training
        self.version = max(self.version, state.version)
        return lost

    def _settle(self, state: LearnerState) -> None:
        """All that earlier starts of the learner had taken is accounted for."""
        for origin in self._origins():
            origin.settled, origin.kept = origin.taken_before, 0
        for name, sources in state.restored.items():
            for source_name, mark in sources.items():
                self.sources[source_name].origins[name].kept = mark.steps

    def _on_redelivery(self, origin: Origin, segments: Segments) -> None:
        """Segments that were counted come again, and all after them: we have died, and assembly kept them.

        A learner that has taken them and lives will say so once more. Where it has died its next start takes them,
        unless its weights hold them: they were not lost with it, though that may have been told.
        """
        before = segments.handed_on - len(segments.log_probs)
        origin.taken, origin.taken_before = min(origin.taken, before), min(origin.taken_before, before)
        settled = min(origin.settled, max(before, origin.kept))
        again, origin.settled = origin.settled - settled, settled
        found = min(again, self.lost_learning)
        self.lost_learning -= found
        self._note("learning", self._learner, -found, "told as lost with it, and came again")
        self._take_back(again - found)

    def _take_back(self, steps: int) -> int:
        """Steps that were played or too old will be so once more; returns how many of them there were."""
        again = min(self.ghost, steps)
        too_old = min(self.stale, steps - again)
        self.ghost, self.stale = self.ghost - again, self.stale - too_old
        return again + too_old

    # ---------------------------------------------------------------- what we say

    def allowances(self) -> dict[str, StepAllowance]:
        """Shares out what the budget has left, and says how far each living source may go."""
        living = {name: source for name, source in self.sources.items() if source.alive}
        for source in sorted(living.values(), key=_unused):
            room = self.budget - self.in_flight
            wanted = self._slice - _unused(source)
            if (source.agents or not self.overlap) and room > 0 and 2 * wanted >= self._slice:
                source.allowance = max(source.allowance, source.produced) + min(room, wanted)
                source.serial += 1
        # New room comes from an update; used before its weights have arrived, the data would be older than need be.
        return {
            name: StepAllowance(serial=source.serial, steps=source.allowance, version=self.version)
            for name, source in living.items()
        }

    def next_flush(self) -> bool:
        """Makes a new cut, in `flush`, when a whole buffer waits and was not cut for yet.

        Once more for the same buffer where the learner stays idle though half a buffer was produced since:
        among what waits are then steps that a crash took and that nobody has missed so far.
        """
        basis = self.done + self.training
        marks = self._marks()
        since = sum(steps - self.flush.marks.get(name, 0) for name, steps in marks.items())
        again = not self.training and 2 * since >= self.buffer_size
        if self.waiting < self.buffer_size or (basis == self._flushed_at and not again):
            return False
        self._flushed_at = basis
        self.flush = FlushRequest(serial=self.flush.serial + 1, marks=marks)
        return True

    def take_new_incidents(self) -> list[Incident]:
        """Incidents since this was last called."""
        new, self._reported = self.incidents[self._reported :], len(self.incidents)
        return new

    # ---------------------------------------------------------------- on disk

    def to_plain(self) -> dict[str, Any]:
        """Everything a restart needs, as plain JSON values."""
        own = {name: getattr(self, name) for name in _SAVED}
        sources = {name: asdict(source) for name, source in self.sources.items()}
        flush = {"serial": self.flush.serial, "marks": self.flush.marks}
        return {
            **own,
            "sources": sources,
            "flush": flush,
            "incidents": [asdict(incident) for incident in self.incidents],
        }

    def restore(self, plain: dict[str, Any]) -> None:
        """Goes on from what `to_plain` gave."""
        for name in _SAVED:
            setattr(self, name, plain[name])
        for name, saved in plain["sources"].items():
            origins = {origin: Origin(**counts) for origin, counts in saved["origins"].items()}
            self.sources[name] = SteppingSource(**{**saved, "origins": origins})
        self.flush = FlushRequest(**plain["flush"])
        self.incidents = [Incident(**incident) for incident in plain["incidents"]]
        self._reported = len(self.incidents)

    # ---------------------------------------------------------------- inside

    def _origins(self) -> Iterator[Origin]:
        return (origin for source in self.sources.values() for origin in source.origins.values())

    def _source(self, name: str) -> SteppingSource:
        if name not in self.sources:
            self.sources[name] = SteppingSource()
            self._flushed_at = -1
        return self.sources[name]

    def _retire(self, source: SteppingSource) -> None:
        if source.alive:
            source.alive = False
            self._flushed_at = -1  # a cut that waits for it may never be completed

    def _marks(self) -> dict[str, int]:
        """What a cut waits for: all that living sources have produced, and of a dead one what has arrived."""
        marks = {name: source.produced for name, source in self.sources.items() if source.alive}
        return marks | {name: 0 for name, source in self.sources.items() if not source.alive and source.missing}

    def _note(self, stage: str, start: str, steps: int, cause: str) -> None:
        if steps:
            self.incidents.append(Incident(stage=stage, start=start, steps=steps, cause=cause))


_COUNTS = ("ghost", "stale", "lost_learning", "unrecorded", "trained", "training", "version")
_SAVED = (*_COUNTS, "_learner", "_learner_stale", "_learner_ghost", "_flushed_at", "_serving")


def _follows(start: str, former: str) -> bool:
    """Whether a start of assembly came after another one in the same session; what former sessions held is gone."""
    return comes_before(former, start) and not comes_before(start, former)


def _unused(source: SteppingSource) -> int:
    return max(0, source.allowance - source.produced)
