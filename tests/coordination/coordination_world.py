"""A tiny pipeline around a ledger: every step is an integer that is somewhere, and parts of it can die.

Boards hold the latest value until somebody looks; queues hand over one message at a time; which part
moves next is the choice of a seeded random source. `settle` lets everything be heard and handed on
without any simulator or update going on.
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
        rng: chooses what moves next.
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
        # A frame of each process; in lockstep a round is one.
        self.frames = sum(max(sizes) if overlap else sum(sizes) for sizes in simulators)
        self.numbers = 0
        self.truly_lost: set[int] = set()
        self.unheard = 0
        self.steppings = [Stepping(f"stepping-{i}", 1, sizes) for i, sizes in enumerate(simulators)]
        self.starts = 1
        # assembly
        self.origin = 1
        self.assemblers: dict[str, Assembler] = {}
        self.sources: dict[str, str] = {}
        self.executed: dict[str, int] = {}
        self.cut_heard = FlushRequest(serial=0, marks={})
        self.unacknowledged: deque[Message] = deque()  # sent by assembly, kept until coordination lets go
        self.arrived = 0  # of these, how many coordination has got
        # coordination
        self.ledger = self._new_ledger()
        self.routed: deque[Message] = deque()  # handed on, not taken by the learner yet
        self.taken_before = self.acknowledged_earlier = self.acknowledged = 0
        self.released = self.acknowledged_messages = 0
        self.known_sources: set[str] = set()
        self.saved = self._plain()
        self.board_cut = FlushRequest(serial=0, marks={})
        self.board_permits: dict[str, StepAllowance] = {}
        self.board_stepping: dict[str, tuple[str, ProducedSteps | None]] = {}
        # learning
        self.learner_start = 1
        self.version = 1
        self.buffer: list[int] = []
        self.trained: list[int] = []
        self.training: list[int] = []
        self.taken = 0
        self.seen: dict[tuple[str, str], int] = {}
        self.cut_taken = 0
        self.closing = False
        self.checkpoint: list[int] = []
        self.updates: list[int] = []
        self.board_learner = self._learner_state()

    # ---------------------------------------------------------------- simulators and stepping

    def wake(self, stepping: Stepping) -> None:
        """Some frames arrive; the permit lets some simulators go on."""
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
        if completed or acted or (stepping.sizes and not stepping.spoke):
            stepping.outbox.append(Part(before, completed, acted))
            stepping.spoke = True

    def publish(self, stepping: Stepping) -> None:
        stepping.give_back()
        told = None
        if stepping.spoke:
            told = produced(stepping.produced, stepping.allowance.serial, stepping.allowance.steps, sum(stepping.sizes))
        self.board_stepping[stepping.service] = (stepping.source, told)

    def hear_permit(self, stepping: Stepping) -> None:
        allowance = self.board_permits.get(stepping.source)
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
        self._cut_if_due(stepping.source)

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

    def hear_cut(self) -> None:
        self.cut_heard = self.board_cut
        for source in list(self.assemblers):
            self._cut_if_due(source)

    def _cut_if_due(self, source: str) -> None:
        cut, assembler = self.cut_heard, self.assemblers[source]
        if source not in cut.marks or self.executed.get(source, 0) >= cut.serial:
            return
        if assembler.received >= cut.marks[source]:
            self.executed[source] = cut.serial
            assembler.closed, assembler.open = assembler.held(), {}
            self._send(source, assembler, cut.serial)

    def _send(self, source: str, assembler: Assembler, cut: int) -> None:
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
            flush=cut,
            before=assembler.handed_on,
        )
        assembler.handed_on += len(steps)
        self.unacknowledged.append(Message(record, steps))

    # ---------------------------------------------------------------- coordination

    def route(self) -> None:
        """Coordination takes the next message and hands it on."""
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

    def hear_stepping(self, stepping: Stepping) -> None:
        source, told = self.board_stepping.get(stepping.service, ("", None))
        if not source:
            return
        for known in list(self.ledger.sources):
            if known.rpartition(".")[0] == stepping.service and known != source:
                self.ledger.source_gone(known)
        self.known_sources.add(source)
        if told is not None:
            self.ledger.stepped(source, told)

    def hear_learner(self) -> None:
        self.ledger.learner(self.board_learner, self.taken_before + self.acknowledged_earlier)

    def decide(self) -> None:
        """Coordination publishes permits and cuts."""
        if self.ledger.next_flush():
            self.board_cut = self.ledger.flush
        for source, allowance in self.ledger.allowances().items():
            if source in self.known_sources:
                self.board_permits[source] = allowance

    def save(self) -> None:
        """The books go to disk; what the learner has acknowledged is let go."""
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
        if record.sequence <= self.seen.get(key, 0):
            return
        self.seen[key] = record.sequence
        self.taken += len(message.steps)
        self.buffer += message.steps
        self.closing |= record.flush > self.cut_taken
        self.cut_taken = max(self.cut_taken, record.flush)

    def begin_update(self) -> None:
        if self.training or not self.ready:
            return
        size = self.buffer_size if self.overlap else len(self.buffer)
        self.training, self.buffer = self.buffer[:size], self.buffer[size:]
        self.closing = False
        self.board_learner = self._learner_state()

    def finish_update(self) -> None:
        if self.training:
            self.trained += self.training
            self.updates.append(len(self.training))
            self.training = []
            self.version += 1
            self.board_learner = self._learner_state()

    def _learner_state(self) -> LearnerState:
        return LearnerState(
            behavior="B",
            start=f"learning-B.{self.learner_start}",
            version=self.version,
            updates=len(self.updates),
            trained=len(self.trained),
            taken=self.taken,
            training=len(self.training),
            buffered=len(self.buffer),
        )

    # ---------------------------------------------------------------- deaths

    def kill_stepping(self, index: int, *, simulators: bool = True) -> None:
        """Dies with what assembly has not got; simulators come back at once or not at all.

        `unheard` counts what it had produced and coordination did not know of: the budget cannot hold that.
        """
        old = self.steppings[index]
        known = self.ledger.sources.get(old.source)
        self.unheard += old.produced - (known.produced if known else 0)
        self.starts += 1
        kept = self.rng.randrange(len(old.outbox) + 1)
        for part in list(old.outbox)[kept:]:
            self.truly_lost.update(step for _, step in part.completed)
        arrived = list(old.outbox)[:kept]
        while arrived:  # what has arrived at assembly is there; it speaks before the new start does
            old.outbox = deque([arrived.pop(0)])
            self.assemble(old)
        self.steppings[index] = Stepping(old.service, self.starts, old.sizes if simulators else [])
        self.publish(self.steppings[index])

    def connect_simulators(self, index: int, sizes: list[int]) -> None:
        stepping = self.steppings[index]
        stepping.sizes, stepping.computing = sizes, [False] * len(sizes)

    def kill_assembly(self) -> None:
        for assembler in self.assemblers.values():
            self.truly_lost.update(assembler.held())
        self.origin += 1
        self.assemblers, self.sources, self.executed = {}, {}, {}
        # What was sent stays with coordination, which hands it on; a message is never half there.
        for stepping in self.steppings:
            if stepping.spoke:  # tells its new reader of all live agents
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
        self.learner_start += 1
        self.version += 1
        self.taken, self.seen, self.closing, self.cut_taken = 0, {}, False, 0
        self.acknowledged_earlier = self.acknowledged
        self.board_learner = self._learner_state()

    # ---------------------------------------------------------------- the schedule

    def moves(self) -> list[Callable[[], None]]:
        """What may happen next."""
        moves: list[Callable[[], None]] = [
            self.hear_cut,
            self.route,
            self.hear_learner,
            self.decide,
            self.save,
            self.take,
            self.begin_update,
        ]
        for stepping in self.steppings:
            told = (self.publish, self.hear_stepping, self.hear_permit, self.assemble)
            moves += [partial(move, stepping) for move in told]
        return moves

    def step(self) -> None:
        wakes: list[Callable[[], None]] = [partial(self.wake, s) for s in self.steppings for _ in range(2)]
        self.rng.choice([*self.moves(), *wakes, self.finish_update])()

    def settle(self) -> None:
        """Everything said is heard and everything sent is handed on; nobody produces and no update ends."""
        before = None
        for _ in range(200):
            if before == (before := self._position()):
                return
            for move in self.moves():
                move()
        raise AssertionError("it never comes to rest")

    def _position(self) -> tuple[object, ...]:
        return (
            self._plain(),
            self.board_cut.serial,
            sorted((s.source, s.allowance.serial, s.allowance.steps, len(s.outbox)) for s in self.steppings),
            self.arrived,
            len(self.unacknowledged),
            len(self.routed),
            len(self.buffer),
            len(self.training),
            sorted(self.executed.items()),
        )

    # ---------------------------------------------------------------- the truth

    def open(self) -> list[int]:
        """Steps that are in some stage."""
        steps = [step for s in self.steppings for part in s.outbox for _, step in part.completed]
        for assembler in self.assemblers.values():
            steps += assembler.held()
        for message in list(self.unacknowledged)[self.arrived :]:
            steps += message.steps
        for message in self.routed:
            steps += message.steps
        return steps + self.buffer + self.training
