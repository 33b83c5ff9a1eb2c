"""A tiny pipeline around a ledger: every step is an integer in some stage, and stages can crash.

Topics hold the latest value until a stage reads it; queues deliver one message at a time; a seeded random source
chooses the next stage to act. `settle` delivers everything while no simulator runs and no update ends.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import takewhile

from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.messages.state import FlushRequest, LearnerState, ProducedSteps, StepAllowance
from tests.coordination.coordination_parts import Assembler, Message, Part, Stepping, produced, segments


class Pipeline:
    """All stages around a ledger.

    Args:
        rng: chooses the next stage to act.
        buffer_size: steps of an update.
        overlap: 1 or 0.
        simulators: agents of each simulator, by stepping process.
        horizon: most steps of an open segment.
    """

    def __init__(
        self, rng: random.Random, *, buffer_size: int, overlap: int, simulators: list[list[int]], horizon: int
    ) -> None:
        self.rng = rng
        self.overlap, self.buffer_size, self.horizon, self.processes = overlap, buffer_size, horizon, len(simulators)
        # a frame of each process; in lockstep a round is one
        self.frames = sum(max(sizes) if overlap else sum(sizes) for sizes in simulators)
        self.numbers = 0
        self.truly_lost: set[int] = set()
        self.unreported = 0
        self.steppings = [Stepping(f"stepping-{i}", 1, sizes) for i, sizes in enumerate(simulators)]
        self.incarnations = 1
        # assembly
        self.origin = 1
        self.assemblers: dict[str, Assembler] = {}
        self.sources: dict[str, str] = {}
        self.executed: dict[str, int] = {}
        self.flush_received = FlushRequest(serial=0, required_steps={})
        self.unacknowledged: deque[Message] = deque()  # sent by assembly, kept until coordination acknowledges them
        self.arrived = 0  # of these, the count that coordination has received
        # coordination
        self.ledger = self._new_ledger()
        self.routed: deque[Message] = deque()  # forwarded, not taken by the learner yet
        self.taken_before = self.acknowledged_earlier = self.acknowledged = 0
        self.released = self.acknowledged_messages = 0
        self.known_sources: set[str] = set()
        self.saved = self._plain()
        self.flush_topic = FlushRequest(serial=0, required_steps={})
        self.allowance_topic: dict[str, StepAllowance] = {}
        self.stepping_topic: dict[str, tuple[str, ProducedSteps | None]] = {}
        # learning
        self.learner_incarnation = 1
        self.version = 1
        self.buffer: list[int] = []
        self.trained: list[int] = []
        self.training: list[int] = []
        self.taken = 0
        self.latest_sequences: dict[tuple[str, str], int] = {}
        self.flush_taken = 0
        self.closing = False
        self.checkpoint: list[int] = []
        self.updates: list[int] = []
        self.learner_topic = self._learner_state()

    # ---------------------------------------------------------------- simulators and stepping

    def tick(self, stepping: Stepping) -> None:
        """Receives some frames; the allowance lets some simulators continue."""
        completed: list[tuple[int, int]] = []
        for simulator, computing in enumerate(stepping.computing):
            if computing and (not self.overlap or self.rng.random() < 0.7):  # in lockstep a round is complete
                stepping.computing[simulator] = False
                for agent in stepping.agents(simulator):
                    completed.append((agent, self.numbers))
                    self.numbers += 1
        before = stepping.produced
        stepping.produced += len(completed)
        acted: list[int] = []
        idle = [i for i, computing in enumerate(stepping.computing) if not computing]
        self.rng.shuffle(idle)
        may_act = stepping.remaining > 0
        for simulator in idle:
            if stepping.remaining > 0 if self.overlap else may_act:
                stepping.computing[simulator] = True
                acted += stepping.agents(simulator)
        if completed or acted or (stepping.sizes and not stepping.has_reported):
            stepping.outbox.append(Part(before, completed, acted))
            stepping.has_reported = True

    def publish(self, stepping: Stepping) -> None:
        stepping.return_unused()
        report = None
        if stepping.has_reported:
            report = produced(
                stepping.produced, stepping.allowance.serial, stepping.allowance.steps, sum(stepping.sizes)
            )
        self.stepping_topic[stepping.service] = (stepping.source, report)

    def receive_allowance(self, stepping: Stepping) -> None:
        allowance = self.allowance_topic.get(stepping.source)
        if allowance is None or allowance.serial < stepping.allowance.serial:
            return
        if allowance.serial == stepping.allowance.serial:
            allowance = StepAllowance(serial=allowance.serial, steps=min(allowance.steps, stepping.allowance.steps))
        stepping.allowance = allowance

    # ---------------------------------------------------------------- assembly

    def assemble(self, stepping: Stepping) -> None:
        """Takes one part."""
        if not stepping.outbox:
            return
        self._replace(stepping)
        part = stepping.outbox.popleft()
        assembler = self.assemblers.setdefault(stepping.source, Assembler(part.before))
        for agent, step in part.completed:
            assembler.received += 1
            if agent not in assembler.acting:
                assembler.orphaned += 1
                self.truly_lost.add(step)
                continue
            steps = assembler.open.setdefault(agent, [])
            steps.append(step)
            if len(steps) >= self.horizon or self.rng.random() < 0.02:
                assembler.closed += assembler.open.pop(agent)
        assembler.acting = (assembler.acting - {agent for agent, _ in part.completed}) | set(part.acted)
        if len(assembler.closed) >= max(1, self.buffer_size // 8):
            self._send(stepping.source, assembler, 0)
        self._flush_if_due(stepping.source)

    def _replace(self, stepping: Stepping) -> None:
        former = self.sources.get(stepping.service)
        self.sources[stepping.service] = stepping.source
        if former is None or former == stepping.source or former not in self.assemblers:
            return
        old = self.assemblers.pop(former)
        old.closed, old.open = old.held(), {}
        if old.closed:
            self._send(former, old, 0)
        new = self.assemblers[stepping.source] = Assembler(0)
        self._send(stepping.source, new, 0)

    def receive_flush(self) -> None:
        self.flush_received = self.flush_topic
        for source in list(self.assemblers):
            self._flush_if_due(source)

    def _flush_if_due(self, source: str) -> None:
        flush, assembler = self.flush_received, self.assemblers[source]
        if source not in flush.required_steps or self.executed.get(source, 0) >= flush.serial:
            return
        if assembler.received >= flush.required_steps[source]:
            self.executed[source] = flush.serial
            assembler.closed, assembler.open = assembler.held(), {}
            self._send(source, assembler, flush.serial)

    def _send(self, source: str, assembler: Assembler, flush: int) -> None:
        steps, assembler.closed = assembler.closed, []
        assembler.sequence += 1
        record = segments(
            source,
            f"assembly.{self.origin}",
            assembler.sequence,
            steps=len(steps),
            began=assembler.began,
            received=assembler.received,
            orphaned=assembler.orphaned,
            flush=flush,
            before=assembler.handed_on,
        )
        assembler.handed_on += len(steps)
        self.unacknowledged.append(Message(record, steps))

    # ---------------------------------------------------------------- coordination

    def route(self) -> None:
        """Lets coordination take the next message and forward it."""
        if self.arrived == len(self.unacknowledged):
            return
        message = self.unacknowledged[self.arrived]
        self.arrived += 1
        service = message.record.source.rpartition(".")[0]
        for earlier in takewhile(lambda known: known != message.record.source, list(self.ledger.sources)):
            if earlier.rpartition(".")[0] == service:
                self.ledger.source_closed(earlier)
        self.ledger.routed(message.record)
        self.routed.append(message)

    def receive_produced(self, stepping: Stepping) -> None:
        source, report = self.stepping_topic.get(stepping.service, ("", None))
        if not source:
            return
        for known in list(self.ledger.sources):
            if known.rpartition(".")[0] == stepping.service and known != source:
                self.ledger.source_gone(known)
        self.known_sources.add(source)
        if report is not None:
            self.ledger.stepped(source, report)

    def receive_learner_state(self) -> None:
        self.ledger.learner(self.learner_topic, self.taken_before + self.acknowledged_earlier)

    def decide(self) -> None:
        """Lets coordination publish allowances and flushes."""
        if self.ledger.next_flush():
            self.flush_topic = self.ledger.flush
        for source, allowance in self.ledger.allowances().items():
            if source in self.known_sources:
                self.allowance_topic[source] = allowance

    def save(self) -> None:
        """Saves the step counts, and acknowledges what the learner has taken."""
        self.saved = self._plain()
        for _ in range(self.acknowledged_messages - self.released):
            self.unacknowledged.popleft()
            self.arrived -= 1
        self.released = self.acknowledged_messages

    def _plain(self) -> str:
        return json.dumps({"ledger": self.ledger.to_plain(), "taken": self.taken_before + self.acknowledged})

    def _new_ledger(self) -> StepLedger:
        return StepLedger(buffer_size=self.buffer_size, overlap=self.overlap, processes=self.processes)

    # ---------------------------------------------------------------- learning

    @property
    def ready(self) -> bool:
        if self.overlap:
            return len(self.buffer) >= self.buffer_size
        return self.closing and bool(self.buffer)

    def take(self) -> None:
        if self.training or self.ready or not self.routed:
            return
        message = self.routed.popleft()
        self.acknowledged += len(message.steps)
        self.acknowledged_messages += 1
        record = message.record
        key = (record.origin, record.source)
        if record.sequence <= self.latest_sequences.get(key, 0):
            return
        self.latest_sequences[key] = record.sequence
        self.taken += len(message.steps)
        self.buffer += message.steps
        self.closing |= record.flush > self.flush_taken
        self.flush_taken = max(self.flush_taken, record.flush)

    def begin_update(self) -> None:
        if self.training or not self.ready:
            return
        size = self.buffer_size if self.overlap else len(self.buffer)
        self.training, self.buffer = self.buffer[:size], self.buffer[size:]
        self.closing = False
        self.learner_topic = self._learner_state()

    def finish_update(self) -> None:
        if self.training:
            self.trained += self.training
            self.updates.append(len(self.training))
            self.training = []
            self.version += 1
            self.learner_topic = self._learner_state()

    def _learner_state(self) -> LearnerState:
        return LearnerState(
            behavior="B",
            start=f"learning-B.{self.learner_incarnation}",
            version=self.version,
            updates=len(self.updates),
            trained=len(self.trained),
            taken=self.taken,
            training=len(self.training),
            buffered=len(self.buffer),
        )

    # ---------------------------------------------------------------- crashes

    def kill_stepping(self, index: int, *, simulators: bool = True) -> None:
        """Crashes a stepping process with the parts that assembly lacks; simulators reconnect at once or never.

        `unreported` counts produced steps that coordination did not know: the budget cannot hold them.
        """
        old = self.steppings[index]
        known = self.ledger.sources.get(old.source)
        self.unreported += old.produced - (known.produced if known else 0)
        self.incarnations += 1
        kept = self.rng.randrange(len(old.outbox) + 1)
        for part in list(old.outbox)[kept:]:
            self.truly_lost.update(step for _, step in part.completed)
        arrived = list(old.outbox)[:kept]
        while arrived:  # assembly applies what has arrived before the new incarnation reports
            old.outbox = deque([arrived.pop(0)])
            self.assemble(old)
        self.steppings[index] = Stepping(old.service, self.incarnations, old.sizes if simulators else [])
        self.publish(self.steppings[index])

    def connect_simulators(self, index: int, sizes: list[int]) -> None:
        stepping = self.steppings[index]
        stepping.sizes, stepping.computing = sizes, [False] * len(sizes)

    def kill_assembly(self) -> None:
        for assembler in self.assemblers.values():
            self.truly_lost.update(assembler.held())
        self.origin += 1
        self.assemblers, self.sources, self.executed = {}, {}, {}
        # sent messages stay queued, as a message is never partly there
        for stepping in self.steppings:
            if stepping.has_reported:  # reports all live agents to its new reader
                stepping.outbox.append(Part(stepping.produced, [], []))

    def kill_coordination(self) -> None:
        state = json.loads(self.saved)
        self.ledger = self._new_ledger()
        self.ledger.restore(state["ledger"])
        self.taken_before, self.acknowledged, self.acknowledged_earlier = state["taken"], 0, 0
        self.known_sources = set()
        self.routed.clear()
        self.arrived = self.released = self.acknowledged_messages = 0

    def kill_learner(self) -> None:
        held = set(self.checkpoint)
        gone = [*self.trained, *self.training, *self.buffer]
        self.truly_lost.update(step for step in gone if step not in held)
        self.trained, self.training, self.buffer = list(self.checkpoint), [], []
        self.learner_incarnation += 1
        self.version += 1
        self.taken, self.latest_sequences, self.closing, self.flush_taken = 0, {}, False, 0
        self.acknowledged_earlier = self.acknowledged
        self.learner_topic = self._learner_state()

    # ---------------------------------------------------------------- the schedule

    def moves(self) -> list[Callable[[], None]]:
        """Returns what may happen next."""
        moves: list[Callable[[], None]] = [
            self.receive_flush,
            self.route,
            self.receive_learner_state,
            self.decide,
            self.save,
            self.take,
            self.begin_update,
        ]
        for stepping in self.steppings:
            exchanges = (self.publish, self.receive_produced, self.receive_allowance, self.assemble)
            moves += [partial(move, stepping) for move in exchanges]
        return moves

    def step(self) -> None:
        ticks: list[Callable[[], None]] = [partial(self.tick, s) for s in self.steppings for _ in range(2)]
        self.rng.choice([*self.moves(), *ticks, self.finish_update])()

    def settle(self) -> None:
        """Delivers all published values and messages, while no simulator produces and no update ends."""
        before = None
        for _ in range(200):
            if before == (before := self._position()):
                return
            for move in self.moves():
                move()
        raise AssertionError("the pipeline never settles")

    def _position(self) -> tuple[object, ...]:
        return (
            self._plain(),
            self.flush_topic.serial,
            sorted((s.source, s.allowance.serial, s.allowance.steps, len(s.outbox)) for s in self.steppings),
            self.arrived,
            len(self.unacknowledged),
            len(self.routed),
            len(self.buffer),
            len(self.training),
            sorted(self.executed.items()),
        )

    # ---------------------------------------------------------------- true counts

    def open(self) -> list[int]:
        """Returns the steps that are in some stage."""
        steps = [step for s in self.steppings for part in s.outbox for _, step in part.completed]
        for assembler in self.assemblers.values():
            steps += assembler.held()
        for message in list(self.unacknowledged)[self.arrived :]:
            steps += message.steps
        for message in self.routed:
            steps += message.steps
        return steps + self.buffer + self.training
