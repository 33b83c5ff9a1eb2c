"""The stages of the tiny pipeline around a coordinator: every step is an integer in some stage.

Topics hold the latest value until a stage reads it; queues deliver one message at a time; a seeded random source
chooses the next stage to act. Each lost step is noted with the stage that lost it.
"""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from sparring.pipeline.coordination.coordinator import Coordinator
from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.learning.intake import Intake
from sparring.pipeline.messages.state import (
    BehaviorSpecs,
    FlushRequest,
    LearnerState,
    ProducedSteps,
    SimulatorSteps,
    StepAllowance,
    SteppingState,
)
from tests.coordination.coordination_parts import Assembler, Part, Segments, Stepping


class Stages:
    """All stages around a coordinator.

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
        self.lost_by: dict[int, str] = {}  # each lost step, and the stage that lost it
        self.unreported = 0
        self.totals: Counter[str] = Counter()
        self.steppings = [Stepping(f"stepping-{i}", 1, sizes, self.totals) for i, sizes in enumerate(simulators)]
        self.incarnations = 1
        # assembly
        self.assemblers: dict[str, Assembler] = {}
        self.sources: dict[str, str] = {}
        self.executed: dict[str, int] = {}
        self.flush_received = FlushRequest(serial=0, required_steps={})
        self.segments: deque[Segments] = deque()  # on their way to the learner
        # coordination
        self.coordinator = self._new_coordinator()
        self.known_processes: set[str] = set()
        self.basis = -1  # steps that an update had used or used at the latest flush
        self.saved = self.coordinator.saved(), self.basis
        self.flush_topic = FlushRequest(serial=0, required_steps={})
        self.allowance_topic: dict[str, StepAllowance] = {}
        self.stepping_topic: dict[str, SteppingState] = {}
        # learning
        self.learner_incarnation = 1
        self.version = 1
        self.intake = Intake(restarted=False)
        self.buffer: list[int] = []
        self.trained: list[int] = []
        self.training: list[int] = []
        self.stale: list[int] = []
        self.flush_taken = 0
        self.stale_share = 0.03
        self.closing = False
        self.checkpoint: tuple[list[int], list[int], dict[str, Any]] = ([], [], {})
        self.updates: list[int] = []
        self.learner_topic = self._learner_state()

    @property
    def ledger(self) -> StepLedger:
        return self.coordinator.ledgers["B"]

    def lose(self, steps: Iterable[int], stage: str) -> None:
        self.lost_by.update(dict.fromkeys(steps, stage))

    # ---------------------------------------------------------------- simulators and stepping

    def tick(self, stepping: Stepping) -> None:
        """Receives some frames; the allowance lets some simulators continue."""
        completed: list[tuple[int, int]] = []
        for simulator, computing in enumerate(stepping.computing):
            if computing and (not self.overlap or self.rng.random() < 0.7):  # in lockstep a round is complete
                stepping.computing[simulator] = False
                stepping.totals[stepping.process(simulator)] += stepping.sizes[simulator]
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
        if completed or acted:
            stepping.outbox.append(Part(before, completed, acted))

    def publish(self, stepping: Stepping) -> None:
        stepping.return_unused()
        report = ProducedSteps(
            steps=stepping.produced,
            serial=stepping.allowance.serial,
            allowance=stepping.allowance.steps,
            agents=sum(stepping.sizes),
            waiting=0,
        )
        processes = {
            process: SimulatorSteps(before={"B": before}, completed={"B": stepping.totals[process] - before})
            for process, before in stepping.before.items()
        }
        self.stepping_topic[stepping.service] = SteppingState(
            source=stepping.source, behaviors={"B": report}, simulators=len(stepping.sizes), processes=processes
        )

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
        new = stepping.source not in self.assemblers
        if new and not part.introduces:
            self.lose((step for _, step in part.completed), "assembly")
            return
        assembler = self.assemblers.setdefault(stepping.source, Assembler(part.before, part.before))
        for agent, step in part.completed:
            assembler.received += 1
            if agent not in assembler.acting:
                assembler.reached += 1
                self.lose([step], "assembly")
                continue
            steps = assembler.open.setdefault(agent, [])
            steps.append(step)
            if len(steps) >= self.horizon or self.rng.random() < 0.02:
                assembler.closed += assembler.open.pop(agent)
        assembler.acting = (assembler.acting - {agent for agent, _ in part.completed}) | set(part.acted)
        if new or assembler.reached > assembler.announced or len(assembler.closed) >= max(1, self.buffer_size // 8):
            self._send(stepping.source, assembler, 0)
        self._flush_if_due(stepping.source)

    def _replace(self, stepping: Stepping) -> None:
        former = self.sources.get(stepping.service)
        self.sources[stepping.service] = stepping.source
        if former is None or former == stepping.source or former not in self.assemblers:
            return
        old = self.assemblers.pop(former)
        old.closed, old.open = old.held(), {}
        self._send(former, old, 0)

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
        assembler.reached += len(steps)
        assembler.announced = assembler.reached
        self.segments.append(Segments(source, assembler.reached, flush, steps))

    # ---------------------------------------------------------------- coordination

    def receive_produced(self, stepping: Stepping) -> None:
        state = self.stepping_topic.get(stepping.service)
        if state is not None:
            self.coordinator.on_stepping_state(BehaviorSpecs(behaviors={}), state)
            if not state.processes.keys() <= self.known_processes:
                # a process that no file knows is one of an earlier run: what it reported before cannot be recovered
                self.known_processes |= state.processes.keys()
                self.save()

    def receive_learner_state(self) -> None:
        self.coordinator.on_learner_state(self.learner_topic, None)

    def decide(self) -> None:
        """Lets coordination publish allowances and flushes; a buffer that waits is flushed by now."""
        ledger = self.ledger
        waiting, basis = ledger.open - ledger.learner.training, ledger.done + ledger.learner.training
        if self.coordinator.next_flushes():
            self.flush_topic, self.basis = ledger.flush, basis
            self.save()
        else:
            assert waiting < self.buffer_size or basis == self.basis, "a whole buffer waits and was not flushed"
        for source, allowances in self.coordinator.allowances().items():
            if "B" in allowances:
                self.allowance_topic[source] = allowances["B"]

    def save(self) -> None:
        self.saved = self.coordinator.saved(), self.basis

    def _new_coordinator(self) -> Coordinator:
        ledger = StepLedger(least_update_steps=self.buffer_size, overlap=self.overlap, processes=self.processes)
        coordinator = Coordinator("coordination.5f3a-1")
        coordinator.ledgers["B"] = ledger
        return coordinator

    # ---------------------------------------------------------------- learning

    @property
    def ready(self) -> bool:
        if self.overlap:
            return len(self.buffer) >= self.buffer_size
        return self.closing and bool(self.buffer)

    def take(self) -> None:
        if self.training or self.ready or not self.segments:
            return
        message = self.segments.popleft()
        before = len(self.intake.reached), sum(self.intake.lost.values())
        self.intake.add(message)  # type: ignore[arg-type]
        self.receive_steps(message.steps)
        self.closing |= message.flush > self.flush_taken
        self.flush_taken = max(self.flush_taken, message.flush)
        if before != (len(self.intake.reached), sum(self.intake.lost.values())):
            self.learner_topic = self._learner_state()

    def receive_steps(self, steps: list[int]) -> None:
        """Buffers steps; a few messages are too old."""
        (self.stale if self.rng.random() < self.stale_share else self.buffer).extend(steps)

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

    def publish_learner(self) -> None:
        self.learner_topic = self._learner_state()

    def save_weights(self) -> None:
        self.checkpoint = ([*self.trained], [*self.stale], json.loads(json.dumps(self.intake.to_plain())))

    def _learner_state(self) -> LearnerState:
        return LearnerState(
            behavior="B",
            start=f"learning-B.5f3a-{self.learner_incarnation}",
            version=self.version,
            updates=len(self.updates),
            trained=len(self.trained),
            training=len(self.training),
            buffered=len(self.buffer),
            stale=len(self.stale),
            lost=dict(self.intake.lost),
            reached=dict(self.intake.reached),
        )
