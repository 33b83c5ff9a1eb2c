"""What always holds, checked whenever something happens.

capacity    what a receiver holds and what is on its way to it never exceeds the capacity, and the shares agree
books       every step is in one term of the books, at each publication; at the end in one place of one stage
losses      steps are lost with a start that died, and by that only: no more than were under way
versions    a name's version never goes back, at no subscriber, and one version has one content
once        no decision is trained on twice within the lineage of any weights, whatever was restored
matches     a life, and a match, meets one draw of opponents; what ghosts did is not learned from
deaths      nothing ends but by the plan; no simulator is told of a mistake it did not make
deadlines   each wait has a deadline, or is known to somebody who notices where it does not end; see `world_waits`
progress    once all is calm the run goes on, and ends
"""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import trio

from sparring.pipeline.learning.checkpoints import Checkpoint
from sparring.pipeline.messages.matches import Matchup, MatchupAssignment
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import AssemblyState, PolicyWeights, RunState
from sparring.pipeline.queues.receiving_end import ReceivingEnd
from sparring.pipeline.queues.sending_end import SendingEnd
from sparring.services.supervision.outcome import closed, held
from tests.world.world_learner import TallyLearner

LINES: Final = 60


class Watch:
    """Checks, and remembers what it needs for that.

    Attributes:
        violations: what did not hold, in words.
        events: so far.
        lines: the last of them that a reader of a failure wants to see.
        said: latest record of each board and key.
        progress_at: when a step was last taken or trained on.
        finished: coordination has said that the run is over.
        damage: links damage messages, so that simulators make mistakes.
    """

    def __init__(self, *, real: bool, damage: bool) -> None:
        self.real = real
        self.damage = damage
        self.violations: list[str] = []
        self.events = 0
        self.trace: list[str] | None = None
        self.lines: deque[str] = deque(maxlen=LINES)
        self.said: dict[tuple[str, str], Any] = {}
        self.progress_at = 0.0
        self.on_violation: Any = lambda: None
        self.finished = trio.Event()
        self._digest = hashlib.blake2b(digest_size=16)
        self._versions: dict[tuple[str, str], int] = {}
        self._published: dict[str, int] = {}
        self._contents: dict[tuple[str, int], int] = {}
        self._matchups: dict[int, Matchup] = {}
        self._agent_episodes: dict[tuple[str, str, int], int] = {}
        self._matches: dict[int, int] = {}
        self._lineages: dict[tuple[str, int, int], frozenset[int]] = {}

    @property
    def digest(self) -> str:
        """Of all events in their order: equal for equal histories only."""
        return self._digest.hexdigest()

    def event(self, kind: str, *about: Any) -> None:
        """Something happened."""
        self.events += 1
        text = f"{trio.current_time():.9f} {kind} {about}"
        self._digest.update(text.encode())
        if self.trace is not None:
            self.trace.append(text)

    def line(self, text: str) -> None:
        """Something worth showing happened."""
        self.event(text)
        self.lines.append(f"{trio.current_time():8.3f} {text}")

    def require(self, holds: bool, rule: str, about: Any = "") -> None:
        """Notes a violation."""
        if not holds:
            self.violations.append(f"{trio.current_time():.3f} {rule}: {about}")
            self.on_violation()

    # ---------------------------------------------------------------- queues

    def sent(self, source: str, target: str, frames: Sequence[Any]) -> None:
        """A message goes out."""
        self.event("sent", source, target, [zlib.crc32(frame) for frame in frames])

    def queue(self, name: str, receiver: ReceivingEnd | None, senders: Sequence[SendingEnd]) -> None:
        """Something was put on a queue, or arrived, or was taken."""
        if receiver is None:
            return
        state = receiver._state
        messages = steps = 0
        for peer in state._peers.values():
            messages += len(peer.pending)
            steps += sum(entry.steps for entry in peer.pending)
        shares = state.shares
        agree = (shares.messages, shares.steps) == (messages, steps)
        self.require(agree, "capacity", f"shares of {name} count {shares.messages} of {messages} messages")
        for sender in senders:
            peer = state._peers.get(sender._state.sender)
            if peer is None or not peer.present or sender._state.receiver != state.receiver:
                continue
            way = [one for one in sender._state._kept if peer.expected <= one.sequence < sender._state._sent]
            messages += len(way)
            steps += sum(one.steps for one in way)
        most = state.capacity
        fits = messages <= most.messages and steps <= most.steps
        self.require(fits, "capacity", f"{name} holds {messages} messages, {steps} steps of {most}")

    # ---------------------------------------------------------------- boards

    def published(self, topic: str, key: str, record: Any) -> None:
        """A service says something."""
        self.said[topic, key] = record
        self.event("published", topic, key)
        if isinstance(record, PolicyWeights):
            self._weights(topic, record)
        elif isinstance(record, RunState):
            self._step_counts(record)
        elif isinstance(record, MatchupAssignment):
            for matchup in record.matchups:
                known = self._matchups.setdefault(matchup.number, matchup)
                self.require(asdict(known) == asdict(matchup), "matches", f"draw {matchup.number} has two meanings")

    def _weights(self, topic: str, record: PolicyWeights) -> None:
        name, version = record.behavior, record.version
        content = 0
        for key in sorted(record.arrays):
            content = zlib.crc32(record.arrays[key].tobytes(), content)
        known = self._contents.setdefault((name, version), content)
        self.require(known == content, "versions", f"{name}@{version} on {topic} has two contents")
        if topic != "ghosts":
            self.require(version > self._published.get(name, 0), "versions", f"{name}@{version} given out again")
            self._published[name] = version

    def _step_counts(self, state: RunState) -> None:
        if state.finished:
            self.finished.set()
        for name, step_counts in state.step_counts.items():
            terms = asdict(step_counts)
            total = terms.pop("produced")
            good = total == sum(terms.values()) and min(terms.values()) >= 0
            self.require(good, "step_counts", f"{name}: {step_counts}")

    def heard(self, part: str, topic: str, latest: dict[str, Any]) -> None:
        """A part has heard something of a board."""
        record = latest.get("weights")
        if isinstance(record, PolicyWeights):
            known = self._versions.get((part, record.behavior), 0)
            self.require(record.version >= known, "versions", f"{part} hears {record.version} after {known}")
            self._versions[part, record.behavior] = record.version

    # ---------------------------------------------------------------- learners

    def taken(self, learner: TallyLearner, record: Segments, numbers: Any, matches: Any) -> None:
        """A learner has segments."""
        rows = [number for number in numbers.tolist() if number >= 0]
        self.event("taken", record.behavior, len(rows))
        fresh = vars(learner).setdefault("fresh", set())
        again = [number for number in rows if number in fresh or number in learner.lineage]
        self.require(not again and len(set(rows)) == len(rows), "once", f"{record.behavior} got {again[:5]} again")
        fresh.update(rows)
        if record.matchups is not None:
            self._met(record, matches)

    def _met(self, record: Segments, matches: Any) -> None:
        assert record.matchups is not None
        at = 0
        sizes = record.lengths.tolist()
        for agent, number, team, size in zip(
            record.agents.tolist(), record.matchups.tolist(), record.teams.tolist(), sizes, strict=True
        ):
            matchup = self._matchups.get(number)
            self.require(matchup is not None and matchup.team == team, "matches", f"team {team} learns in {matchup}")
            known = self._agent_episodes.setdefault((record.behavior, record.source, agent), number)
            self.require(known == number, "matches", f"life {agent} meets draws {known} and {number}")
            for match in {*matches[at : at + size].tolist()} - {-1}:
                known = self._matches.setdefault(match, number)
                self.require(known == number, "matches", f"match {match} meets draws {known} and {number}")
            at += size

    def trained(self, learner: TallyLearner, numbers: Any) -> None:
        """A learner has made an update."""
        self.progress_at = trio.current_time()
        rows = [number for number in numbers.tolist() if number >= 0]
        self.event("trained", learner.behavior, learner.version, len(rows))
        again = learner.lineage.intersection(rows)
        self.require(not again, "once", f"{learner.behavior} trains on {sorted(again)[:5]} again")
        learner.lineage.update(rows)
        vars(learner).setdefault("fresh", set()).difference_update(rows)
        if not self.damage:
            self.require(len(learner.lineage) == learner.trained, "once", f"{learner.trained} steps are not as many")

    def kept(self, learner: TallyLearner, checkpoint: Checkpoint) -> None:
        """A checkpoint was made."""
        self._lineages[checkpoint.behavior, checkpoint.version, checkpoint.trained] = frozenset(learner.lineage)

    def restored(self, learner: TallyLearner, checkpoint: Checkpoint) -> None:
        """A checkpoint was loaded."""
        learner.lineage = {*self._lineages[checkpoint.behavior, checkpoint.version, checkpoint.trained]}

    # ---------------------------------------------------------------- the end

    def lost(self, name: str, steps: int, incidents: Sequence[Mapping[str, Any]], fallen: set[str], most: int) -> None:
        """What the books of a behavior say of lost steps.

        Args:
            name: of the behavior.
            steps: lost in all.
            incidents: what coordination has written of each loss.
            fallen: stages of which a start died.
            most: steps of a behavior that can be under way.
        """
        told = sum(one["steps"] for one in incidents)
        self.require(told == steps, "losses", f"{name}: {steps} lost, of which incidents tell {told}")
        for one in incidents:
            self.require(one["stage"] in fallen, "losses", f"{name}: nothing of {one['stage']} has died: {one}")
            if one["stage"] != "learning":  # which loses updates too, since its checkpoint
                self.require(0 < abs(one["steps"]) <= most, "losses", f"{name}: at most {most} were under way: {one}")

    def ended(
        self,
        names: Sequence[str],
        counted: dict[str, int],
        died: Mapping[str, bool] | None = None,
        *,
        exact: bool,
        most: int = 0,
    ) -> dict[str, dict[str, int]]:
        """The run has stopped in order: every step is in one place of one stage.

        Args:
            names: of the behaviors.
            counted: steps that the simulators counted.
            died: services that died while it stopped, and whether they were not started again since.
            exact: nothing has happened to them or to stepping.
            most: steps of a behavior that can be under way.
        """
        run: RunState = self.said["coordination", "run"]
        assembly: AssemblyState = self.said["assembly", "state"]
        found = {}
        for name in names:
            places = held(name, run, self.said[f"learning-{name}", "state"], assembly)
            step_counts = found[name] = closed(run.step_counts[name], places, died or {})
            for term in ("lost", "produced"):  # of what is in no place it is not known who had it: it cannot be much
                more = step_counts[term] - getattr(run.step_counts[name], term)
                self.require(more <= most, "losses", f"{name}: {more} more {term} at the end, at most {most} under way")
            total = sum(value for term, value in step_counts.items() if term != "produced")
            self.require(step_counts["produced"] == total, "step_counts", f"{name} at the end: {step_counts}")
            steps = counted.get(name, 0)
            fits = step_counts["produced"] == steps if exact else step_counts["produced"] <= steps or self.damage
            self.require(fits, "step_counts", f"{name}: simulators counted {steps}, the books {step_counts}")
        return found
