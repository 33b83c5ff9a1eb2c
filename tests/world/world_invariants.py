"""Invariants of a run, checked at each event.

capacity    what a receiver holds and what is in transit to it never exceeds its capacity, and its counts agree
step_counts each step is in one term at each publication, of coordination and of the learners
losses      steps are lost only with an incarnation that died, and no more than were in flight
unaccounted what the simulators count is what step accounting has as produced
versions    the version of a behavior never falls at any subscriber, and each version has one content
once        no decision is trained twice within the lineage of any weights, whatever was restored
matches     an agent episode, and a match, has one matchup; steps of ghosts are not trained
failures    a part ends only by the plan; no simulator receives a Fault without a mistake
deadlines   each wait has a deadline or a watcher that notices if it never ends; see `world_waits`
progress    after the last fault the run continues and ends
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
from sparring.pipeline.messages.state import LearnerState, PolicyWeights, RunState
from sparring.pipeline.queues.interface import Receiver, Sender
from tests.world.world_learner import RecordingLearner

LINES: Final = 60


class Watch:
    """Checks the invariants and records what they need.

    Attributes:
        violations: descriptions of violated invariants.
        events: number of events.
        lines: the last events that help to explain a violation.
        latest: latest record of each topic and key.
        progress_at: time of the last step or update.
        finished: set once coordination reports the end of the run.
        assembly_heard: the last state of assembly that coordination has received.
        damage: whether links damage messages, so that simulators send invalid ones.
    """

    def __init__(self, *, real: bool, damage: bool) -> None:
        self.real = real
        self.damage = damage
        self.violations: list[str] = []
        self.events = 0
        self.trace: list[str] | None = None
        self.lines: deque[str] = deque(maxlen=LINES)
        self.latest_records: dict[tuple[str, str], Any] = {}
        self.progress_at = 0.0
        self.on_violation: Any = lambda: None
        self.finished = trio.Event()
        self._digest = hashlib.blake2b(digest_size=16)
        self._versions: dict[tuple[str, str], int] = {}
        self.assembly_heard: Any = None
        self._published: dict[str, int] = {}
        self._contents: dict[tuple[str, int], int] = {}
        self._matchups: dict[int, Matchup] = {}
        self._agent_episodes: dict[tuple[str, str, int], int] = {}
        self._matches: dict[int, int] = {}
        self._lineages: dict[tuple[str, int, int], frozenset[int]] = {}

    @property
    def digest(self) -> str:
        """Returns a digest of all events in their order, equal only for equal histories."""
        return self._digest.hexdigest()

    def event(self, kind: str, *about: Any) -> None:
        """Records an event."""
        self.events += 1
        text = f"{trio.current_time():.9f} {kind} {about}"
        self._digest.update(text.encode())
        if self.trace is not None:
            self.trace.append(text)

    def line(self, text: str) -> None:
        """Records an event that helps to explain a violation."""
        self.event(text)
        self.lines.append(f"{trio.current_time():8.3f} {text}")

    def require(self, holds: bool, rule: str, about: Any = "") -> None:
        """Records a violation of `rule` unless `holds`."""
        if not holds:
            self.violations.append(f"{trio.current_time():.3f} {rule}: {about}")
            self.on_violation()

    # ---------------------------------------------------------------- queues

    def sent(self, source: str, target: str, frames: Sequence[Any]) -> None:
        """Records a message that is sent."""
        self.event("sent", source, target, [zlib.crc32(frame) for frame in frames])

    def queue(self, name: str, receiver: Receiver[Any] | None, senders: Sequence[Sender[Any]]) -> None:
        """Checks the capacity of a queue after a put, an arrival or a get."""
        if receiver is None:
            return
        state = receiver._state
        messages = steps = 0
        for peer in dict.fromkeys([*state._peers.values(), *(one for share in state._shares for one in share)]):
            messages += len(peer.pending)
            steps += sum(entry.steps for entry in peer.pending)
        held = state.counts.held_messages, state.counts.held_steps
        self.require(held == (messages, steps), "capacity", f"{name} counts {held} of {messages} messages")
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

    # ---------------------------------------------------------------- topics

    def published(self, topic: str, key: str, record: Any) -> None:
        """Checks a record that a service publishes."""
        self.latest_records[topic, key] = record
        self.event("published", topic, key)
        if isinstance(record, PolicyWeights):
            self._weights(topic, record)
        elif isinstance(record, RunState):
            self._step_counts(record)
        elif isinstance(record, LearnerState):
            held = record.training + record.buffered + record.stale + record.ghost + sum(record.lost.values())
            same = sum(record.reached.values()) == record.trained + held
            self.require(same or self.damage, "step_counts", f"{record.behavior}: {record}")
        elif isinstance(record, MatchupAssignment):
            for matchup in record.matchups:
                known = self._matchups.setdefault(matchup.number, matchup)
                self.require(asdict(known) == asdict(matchup), "matches", f"matchup {matchup.number} has two meanings")

    def _weights(self, topic: str, record: PolicyWeights) -> None:
        name, version = record.behavior, record.version
        content = 0
        for key in sorted(record.arrays):
            content = zlib.crc32(record.arrays[key].tobytes(), content)
        known = self._contents.setdefault((name, version), content)
        self.require(known == content, "versions", f"{name}@{version} on {topic} has two contents")
        if topic != "ghosts":
            self.require(version > self._published.get(name, 0), "versions", f"{name}@{version} published again")
            self._published[name] = version

    def _step_counts(self, state: RunState) -> None:
        if state.finished:
            self.finished.set()
        for name, step_counts in state.step_counts.items():
            terms = asdict(step_counts)
            total = terms.pop("produced")
            good = total == sum(terms.values()) and min(terms.values()) >= 0
            self.require(good, "step_counts", f"{name}: {step_counts}")

    def received(self, part: str, topic: str, latest: dict[str, Any]) -> None:
        """Checks what a subscriber has received of a topic."""
        if (part, topic) == ("coordination", "topic:assembly"):
            self.assembly_heard = latest.get("state")
        record = latest.get("weights")
        if isinstance(record, PolicyWeights):
            known = self._versions.get((part, record.behavior), 0)
            self.require(record.version >= known, "versions", f"{part} received {record.version} after {known}")
            self._versions[part, record.behavior] = record.version

    # ---------------------------------------------------------------- learners

    def on_segments(self, learner: RecordingLearner, record: Segments, numbers: Any, matches: Any) -> None:
        """Checks segments that a learner receives."""
        rows = [number for number in numbers.tolist() if number >= 0]
        self.event("taken", record.behavior, len(rows))
        fresh = vars(learner).setdefault("fresh", set())
        again = [number for number in rows if number in fresh or number in learner.lineage]
        self.require(not again and len(set(rows)) == len(rows), "once", f"{record.behavior} got {again[:5]} again")
        fresh.update(rows)
        if record.matchups is not None:
            self._check_matchups(record, matches)

    def _check_matchups(self, record: Segments, matches: Any) -> None:
        assert record.matchups is not None
        at = 0
        sizes = record.lengths.tolist()
        for agent, number, team, size in zip(
            record.agents.tolist(), record.matchups.tolist(), record.teams.tolist(), sizes, strict=True
        ):
            matchup = self._matchups.get(number)
            self.require(matchup is not None and matchup.team == team, "matches", f"team {team} learns in {matchup}")
            known = self._agent_episodes.setdefault((record.behavior, record.source, agent), number)
            self.require(known == number, "matches", f"the episode of {agent} has matchups {known} and {number}")
            for match in {*matches[at : at + size].tolist()} - {-1}:
                known = self._matches.setdefault(match, number)
                self.require(known == number, "matches", f"match {match} has matchups {known} and {number}")
            at += size

    def on_update(self, learner: RecordingLearner, numbers: Any) -> None:
        """Checks an update of a learner."""
        self.progress_at = trio.current_time()
        rows = [number for number in numbers.tolist() if number >= 0]
        self.event("trained", learner.behavior, learner.version, len(rows))
        again = learner.lineage.intersection(rows)
        self.require(not again, "once", f"{learner.behavior} trains on {sorted(again)[:5]} again")
        learner.lineage.update(rows)
        vars(learner).setdefault("fresh", set()).difference_update(rows)
        if not self.damage:
            self.require(
                len(learner.lineage) == learner.trained,
                "once",
                f"{learner.trained} steps trained, {len(learner.lineage)} in the lineage",
            )

    def on_checkpoint(self, learner: RecordingLearner, checkpoint: Checkpoint) -> None:
        """Records the lineage of a checkpoint."""
        self._lineages[checkpoint.behavior, checkpoint.version, checkpoint.trained] = frozenset(learner.lineage)

    def on_restore(self, learner: RecordingLearner, checkpoint: Checkpoint) -> None:
        """Restores the lineage of a checkpoint."""
        learner.lineage = {*self._lineages[checkpoint.behavior, checkpoint.version, checkpoint.trained]}

    # ---------------------------------------------------------------- the end

    def check_losses(self, name: str, losses: Mapping[str, int], failed: Mapping[str, int], most: int) -> None:
        """Checks the lost steps of a behavior.

        Args:
            name: name of the behavior.
            losses: lost steps by cause.
            failed: by stage, how many incarnations died; "link" stands for connections to simulators.
            most: most steps of a behavior that can be in flight.
        """
        for cause, lost in losses.items():
            stages = ("stepping", "link") if cause == "both_ends" else (cause,)
            deaths = sum(failed.get(stage, 0) for stage in stages)
            self.require(deaths > 0, "losses", f"{name}: no incarnation of {stages} has died: {losses}")
            if deaths and "learning" not in failed:  # which also loses the updates since its checkpoint
                self.require(0 < lost <= most * deaths, "losses", f"{name}: at most {most} were in flight: {losses}")

    def check_end(self, names: Sequence[str], counted: dict[str, int], *, counts: str) -> dict[str, dict[str, int]]:
        """Checks the step accounting after an orderly end.

        Args:
            names: names of the behaviors.
            counted: steps that the simulators counted, by behavior.
            counts: what their counts prove: "all" steps are produced, "no more" than these are, or "nothing".
        """
        run: RunState = self.latest_records["coordination", "run"]
        found = {}
        for name in names:
            step_counts = found[name] = asdict(run.step_counts[name])
            steps = counted.get(name, 0)
            fits = {
                "all": step_counts["produced"] == steps and run.unaccounted.get(name) == 0,
                "no more": step_counts["produced"] <= steps,
                "nothing": True,
            }[counts]
            text = f"{name}: simulators counted {steps}, {step_counts}, {run.unaccounted.get(name)} unaccounted"
            self.require(fits, "unaccounted", text)
        return found
