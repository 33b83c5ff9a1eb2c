"""The step budget and the step accounting of one behavior: arithmetic without I/O.

One rule bounds how old the data can be (`docs/decisions/0003-freshness.md`):

    in flight = produced + allowed and not yet produced - done <= (1 + overlap) x buffer_size
    done = trained + ghost + stale + lost

and one rule keeps the learner from starving: once `buffer_size` steps have been produced that no
update has used or is using, everything open is flushed. While an update runs, the budget is used
up at that time: no further step can arrive before the update ends, so an early flush changes no
segment and delivers the data before the learner is idle. Step accounting uses the same counts:

    produced = trained + ghost + stale + lost + open

Counts of a source (an incarnation of stepping), an origin (an incarnation of assembly) and a
learner are cumulative since its start. A new name reveals a restart; former counts stay counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from sparring.pipeline.coordination.sources import Incident, Origin, SteppingSource
from sparring.pipeline.messages.incarnations import follows, precedes
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import (
    FlushRequest,
    LearnerState,
    ProducedSteps,
    StepAllowance,
    StepCounts,
    StreamPositions,
)


class StepLedger:
    """Counts the steps of one behavior and shares out its budget.

    Attributes:
        ghost: steps that arrived at a learner that only plays, over all its incarnations.
        stale: steps dropped as too old, over all incarnations of the learner.
        lost_learning: steps that learners took and that the weights restored afterwards do not hold.
        unrecorded: steps in restored weights that were not counted before; they count as produced.
        trained: steps in the lineage of the current weights.
        training: steps in the update under way.
        flush: the latest request.
        version: highest that a learner has published.

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
        self.flush = FlushRequest(serial=0, required_steps={})
        self.version = 0
        self._slice = self.budget if processes == 1 else max(1, buffer_size // (2 * processes))
        self._learner = ""
        self._learner_stale = 0
        self._learner_ghost = 0
        self._flushed_at = -1
        self._reported = 0
        self._serving = ""
        self._seen: dict[tuple[str, str], int] = {}  # by source and origin, steps that arrived in this incarnation

    @property
    def produced(self) -> int:
        """Steps produced so far."""
        return self.unrecorded + sum(source.produced for source in self.sources.values())

    @property
    def ghosts(self) -> int:
        """Steps of ghosts so far, under self-play."""
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
        """Steps produced or allowed that no finished update has used."""
        return self.unrecorded + sum(source.committed for source in self.sources.values()) - self.done

    @property
    def waiting(self) -> int:
        """Steps produced that no update has used or is using."""
        return self.produced - self.done - self.training

    def step_counts(self) -> StepCounts:
        """Returns where every produced step is; `open` is what the other terms leave.

        A ghost's step counts as produced and as ghost at once: it needs no budget and no segment carries it.
        """
        return StepCounts(
            produced=self.produced + self.ghosts,
            trained=self.trained,
            ghost=self.ghost + self.ghosts,
            stale=self.stale,
            lost=self.lost,
            open=self.produced - self.done,
        )

    # ---------------------------------------------------------------- what the stages report

    def stepped(self, name: str, produced: ProducedSteps) -> None:
        """Takes over how far a source is, and what it keeps of its allowance."""
        source = self._source(name)
        source.produced = max(source.produced, produced.steps)
        source.ghosts = max(source.ghosts, produced.ghosts)
        source.agents = produced.agents
        source.alive = not source.closed  # a learner may have closed it before its first report arrived
        if produced.serial >= source.serial:
            source.serial, source.allowance = produced.serial, produced.allowance

    def is_new(self, segments: Segments) -> bool:
        """Returns whether `routed` has not counted these: after a restart of coordination they are sent again."""
        source = self.sources.get(segments.source)
        origin = None if source is None else source.origins.get(segments.origin)
        return origin is None or segments.sequence > origin.sequence

    def routed(self, segments: Segments) -> int:
        """Counts segments that arrived, and what their incarnation of assembly could not have recorded.

        Returns:
            Steps newly found lost. Segments sent again after a restart of coordination are not counted twice.
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
        """Takes back the allowance of a source that died or was replaced; its steps may still arrive."""
        self._retire(self._source(name))

    def source_closed(self, name: str) -> int:
        """Closes a dead source whose segments have all arrived, and returns the steps newly found lost."""
        source = self._source(name)
        before = source.lost
        self._retire(source)
        source.closed = True
        lost = source.lost - before
        self._note("stepping", name, lost, "not yet acknowledged by assembly")
        return lost

    def serve(self, start: str) -> None:
        """Notes that this incarnation of the learner takes segments now, and what earlier ones acknowledged."""
        if start != self._serving:
            self._serving = start
            for origin in self._origins():
                origin.taken_before = origin.taken

    def on_delivered(self, segments: Segments) -> None:
        """Counts segments that the learner has acknowledged."""
        origin = self._source(segments.source).origin(segments.origin, segments.began)
        origin.taken = max(origin.taken, segments.handed_on)

    def on_all_delivered(self) -> None:
        """Counts all that arrived as acknowledged: a learner of the former run took it or lost it."""
        for origin in self._origins():
            origin.taken = origin.taken_before = origin.received

    def on_learner_state(self, state: LearnerState) -> None:
        """Takes over how far the learner has taken the segments, which may be further than was counted here.

        Its earlier incarnations took what its weights hold, whether they could acknowledge it or not.
        """
        for name, sources in state.latest.items():
            for source_name, mark in sources.items():
                source = self.sources.setdefault(source_name, SteppingSource(alive=False))
                before = source.lost
                origin = source.origin(name, mark.began)
                origin.received = max(origin.received, mark.steps)
                source.produced = max(source.produced, mark.began + origin.received)
                self._note("assembly", name, source.lost - before, "by the learner's own counts")
        for name, sources in state.restored.items():
            for source_name, mark in sources.items():
                origin = self.sources[source_name].origins[name]
                origin.taken = max(origin.taken, mark.steps)
                origin.taken_before = max(origin.taken_before, mark.steps)
        self.mark_lost(state.latest)

    def mark_lost(self, latest: StreamPositions, *, over: bool = False) -> None:
        """Writes off what an earlier coordination held and an earlier assembly cannot send again.

        A learner takes segments in order, and first those of the earlier coordination: once it has taken any of a
        later incarnation of assembly, it takes no more of an earlier one.

        Args:
            latest: how far the learner has taken the segments.
            over: the learner takes nothing more.
        """
        known = {start for source in self.sources.values() for start in source.origins} if over else latest.keys()
        for name, source in self.sources.items():
            before = source.lost
            for start, origin in source.origins.items():
                if any(follows(later, start) for later in known):
                    mark = latest.get(start, {}).get(name)
                    there = max(origin.taken, self._seen.get((name, start), 0), 0 if mark is None else mark.steps)
                    origin.received = min(origin.received, there)
            self._note("coordination", name, source.lost - before, "held by coordination and an assembly that died")

    @property
    def known_incarnations(self) -> tuple[str, str]:
        """The incarnations of assembly and of the learner whose counts are included; "" for none.

        Of assembly it is the earlier one, until the later one has reported every source that has steps in flight.
        """
        sources = [source for source in self.sources.values() if source.alive and source.missing and source.origins]
        last = [next(reversed(source.origins)) for source in sources]
        first = next((one for one in last if not any(precedes(other, one) for other in last)), "")
        return first, self._learner

    @property
    def taken_earlier(self) -> int:
        """Steps that earlier incarnations of the learner had taken."""
        return sum(origin.taken_before for origin in self._origins())

    def learner(self, state: LearnerState, taken_earlier: int) -> int:
        """Takes over the counts of the learner.

        Args:
            state: of this incarnation.
            taken_earlier: steps that its earlier incarnations had taken in total.

        Returns:
            Steps newly found lost: what earlier incarnations had taken and the restored weights do not hold.
        """
        lost = 0
        if state.start != self._learner:
            held = self.unrecorded + taken_earlier - self.stale - self.ghost - self.lost_learning
            # It may have trained before its first report arrived: these steps were not restored.
            own = state.taken - state.training - state.buffered - state.stale - state.ghost
            kept = state.trained - own
            lost = max(0, held - kept)
            self.lost_learning += lost
            # A checkpoint without marks, such as one that a user copied here, may hold more than was counted. That
            # was produced; without it the budget would allow as much more in flight.
            beyond = max(0, kept - held)
            # Ghost and stale steps that were not acknowledged are sent again, and counted once more.
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
        """Notes that all steps of earlier incarnations of the learner are accounted for."""
        for origin in self._origins():
            origin.settled, origin.kept = origin.taken_before, 0
        for name, sources in state.restored.items():
            for source_name, mark in sources.items():
                self.sources[source_name].origins[name].kept = mark.steps

    def _on_redelivery(self, origin: Origin, segments: Segments) -> None:
        """Uncounts segments that assembly kept and sends again after coordination died, and all after them.

        A learner that has taken them and lives acknowledges them again. Where it has died, its next incarnation takes
        them unless its weights hold them: they were not lost with it, though an incident may have counted them.
        """
        before = segments.handed_on - len(segments.log_probs)
        origin.taken, origin.taken_before = min(origin.taken, before), min(origin.taken_before, before)
        settled = min(origin.settled, max(before, origin.kept))
        again, origin.settled = origin.settled - settled, settled
        found = min(again, self.lost_learning)
        self.lost_learning -= found
        self._note("learning", self._learner, -found, "counted as lost with it, and sent again")
        self._take_back(again - found)

    def _take_back(self, steps: int) -> int:
        """Uncounts ghost and stale steps that will be counted again; returns how many there were."""
        again = min(self.ghost, steps)
        too_old = min(self.stale, steps - again)
        self.ghost, self.stale = self.ghost - again, self.stale - too_old
        return again + too_old

    def allowances(self) -> dict[str, StepAllowance]:
        """Shares out what the budget has left, and returns the allowance of each living source."""
        living = {name: source for name, source in self.sources.items() if source.alive}
        for source in sorted(living.values(), key=lambda one: one.unused):
            room = self.budget - self.in_flight
            wanted = self._slice - source.unused
            if (source.agents or not self.overlap) and room > 0 and 2 * wanted >= self._slice:
                source.allowance = max(source.allowance, source.produced) + min(room, wanted)
                source.serial += 1
        # An update makes new room; steps produced before its weights arrive would be older than necessary.
        return {
            name: StepAllowance(serial=source.serial, steps=source.allowance, version=self.version)
            for name, source in living.items()
        }

    def next_flush(self) -> bool:
        """Makes a new flush when a whole buffer waits and has not been flushed; returns whether it did.

        It flushes the same buffer once more where the learner stays idle though half a buffer was produced since: a
        crash then took some of the steps that wait, and no stage has noticed so far.
        """
        basis = self.done + self.training
        marks = self._marks()
        since = sum(steps - self.flush.required_steps.get(name, 0) for name, steps in marks.items())
        again = not self.training and 2 * since >= self.buffer_size
        if self.waiting < self.buffer_size or (basis == self._flushed_at and not again):
            return False
        self._flushed_at = basis
        self.flush = FlushRequest(serial=self.flush.serial + 1, required_steps=marks)
        return True

    def take_new_incidents(self) -> list[Incident]:
        """Returns the incidents since the last call."""
        new, self._reported = self.incidents[self._reported :], len(self.incidents)
        return new

    def to_plain(self) -> dict[str, Any]:
        """Returns all that a restart needs, as plain JSON values."""
        own = {name: getattr(self, name) for name in _SAVED}
        sources = {name: asdict(source) for name, source in self.sources.items()}
        flush = {"serial": self.flush.serial, "required_steps": self.flush.required_steps}
        return {
            **own,
            "sources": sources,
            "flush": flush,
            "incidents": [asdict(incident) for incident in self.incidents],
        }

    def restore(self, plain: dict[str, Any]) -> None:
        """Continues from what `to_plain` returned."""
        for name in _SAVED:
            setattr(self, name, plain[name])
        for name, saved in plain["sources"].items():
            origins = {origin: Origin(**counts) for origin, counts in saved["origins"].items()}
            self.sources[name] = SteppingSource(**{**saved, "origins": origins})
        self.flush = FlushRequest(**plain["flush"])
        self.incidents = [Incident(**incident) for incident in plain["incidents"]]
        self._reported = len(self.incidents)

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
            self._flushed_at = -1  # a flush that waits for it may never be completed

    def _marks(self) -> dict[str, int]:
        """Returns what a flush waits for: all that living sources have produced, and what has arrived of dead ones."""
        marks = {name: source.produced for name, source in self.sources.items() if source.alive}
        return marks | {name: 0 for name, source in self.sources.items() if not source.alive and source.missing}

    def _note(self, stage: str, start: str, steps: int, cause: str) -> None:
        if steps:
            self.incidents.append(Incident(stage=stage, start=start, steps=steps, cause=cause))


_COUNTS = ("ghost", "stale", "lost_learning", "unrecorded", "trained", "training", "version")
_SAVED = (*_COUNTS, "_learner", "_learner_stale", "_learner_ghost", "_flushed_at", "_serving")
