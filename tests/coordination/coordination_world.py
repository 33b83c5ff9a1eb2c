"""A tiny pipeline around a coordinator whose stages can crash.

`settle` delivers everything while no simulator runs and no update ends. A queue drops what a dead receiver has not
acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from sparring.pipeline.coordination.coordinator import SAVED
from sparring.pipeline.learning.intake import Intake
from tests.coordination.coordination_parts import Part, Segments, Stepping
from tests.coordination.coordination_stages import Stages


class Pipeline(Stages):
    """The stages, their crashes and their schedule."""

    # ---------------------------------------------------------------- crashes

    def kill_stepping(self, index: int, *, simulators: bool = True) -> None:
        """Crashes a stepping process with the parts that assembly lacks; simulators reconnect at once or never.

        Frames that simulators have sent and stepping has not read are lost with it. `unreported` counts produced steps
        that coordination did not know: the budget cannot hold them.
        """
        old = self.steppings[index]
        known = self.ledger.sources.get(old.source)
        for simulator, computing in enumerate(old.computing):
            if simulators and computing and self.rng.random() < 0.5:
                sent = range(self.numbers, self.numbers + old.sizes[simulator])
                self.totals[old.process(simulator)] += len(sent)
                self.numbers += len(sent)
                self.unreported += len(sent)
                self.lose(sent, "both_ends")
        self.unreported += old.produced - (known.produced if known else 0)
        self.incarnations += 1
        kept = self.rng.randrange(len(old.outbox) + 1)
        self._lose_produced(old, [*old.outbox][kept:], known.produced if known else 0)
        arrived = [*old.outbox][:kept]
        while arrived:  # assembly applies what has arrived before the new incarnation reports
            old.outbox = deque([arrived.pop(0)])
            self.assemble(old)
        self.steppings[index] = Stepping(old.service, self.incarnations, old.sizes if simulators else [], self.totals)
        self.publish(self.steppings[index])

    def _lose_produced(self, old: Stepping, parts: list[Part], known: int) -> None:
        """Loses parts; of their steps coordination knows those that were produced before its latest report."""
        for part in parts:
            for number, (_, step) in enumerate(part.completed, part.before + 1):
                self.lose([step], "stepping" if number <= known else "both_ends")

    def kill_assembly(self) -> None:
        """Crashes assembly with all that it holds, with part of what it has sent, and with part of its own queue."""
        for assembler in self.assemblers.values():
            self.lose(assembler.held(), "assembly")
        self.assemblers, self.sources, self.executed = {}, {}, {}
        for _ in range(self.rng.randrange(len(self.segments) + 1)):
            self.lose(self.segments.pop().steps, "assembly")
        for stepping in self.steppings:
            for _ in range(self.rng.randrange(len(stepping.outbox) + 1)):
                self.lose((step for _, step in stepping.outbox.popleft().completed), "assembly")
            for part in stepping.outbox:
                part.introduces = False
            stepping.outbox.append(Part(stepping.produced, [], [], introduces=True))

    def kill_coordination(self) -> None:
        """Crashes coordination, which forgets all since its file was written."""
        allowed = {name: source.allowance for name, source in self.ledger.sources.items()}
        state, basis = self.saved
        self.coordinator, self.basis = self._new_coordinator(), basis
        self.coordinator.restore(SAVED.validate_json(state))
        restored = self.ledger.sources
        self.unreported += sum(
            steps - restored[name].allowance if name in restored else steps for name, steps in allowed.items()
        )

    def kill_learner(self) -> None:
        """Crashes the learner with all that its checkpoint lacks, and with part of its queue."""
        trained, stale, counts = self.checkpoint
        gone = {*self.trained, *self.stale, *self.training, *self.buffer} - {*trained, *stale}
        self.lose(gone, "learning")
        for _ in range(self.rng.randrange(len(self.segments) + 1)):
            self.lose(self.segments.popleft().steps, "learning")
        self.trained, self.stale, self.training, self.buffer = [*trained], [*stale], [], []
        self.intake = Intake(restarted=True)
        self.intake.restore(counts, len(trained) + len(stale))
        self.learner_incarnation += 1
        self.version += 1
        self.closing, self.flush_taken = False, 0
        self.learner_topic = self._learner_state()
        self.announce()

    def announce(self) -> None:
        """Says to a new learner how far the segments of each source have come."""
        for source, assembler in self.assemblers.items():
            assembler.announced = assembler.reached
            self.segments.append(Segments(source, assembler.reached, 0, []))

    # ---------------------------------------------------------------- the schedule

    def moves(self) -> list[Callable[[], None]]:
        """Returns what may happen next."""
        moves: list[Callable[[], None]] = [
            self.receive_flush,
            self.receive_learner_state,
            self.decide,
            self.take,
            self.begin_update,
            self.publish_learner,
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
        for _ in range(400):
            if before == (before := self._position()):
                return
            for move in self.moves():
                move()
        raise AssertionError("the pipeline never settles")

    def _position(self) -> tuple[object, ...]:
        return (
            (self.coordinator.saved(), self.basis),
            asdict(self._learner_state()),
            asdict(self.learner_topic),
            self.flush_topic.serial,
            sorted((s.source, s.allowance.serial, s.allowance.steps, len(s.outbox)) for s in self.steppings),
            len(self.segments),
            len(self.buffer),
            len(self.training),
            sorted(self.executed.items()),
        )

    # ---------------------------------------------------------------- true counts

    def on_the_way(self) -> list[int]:
        """Returns the steps between stepping and the learner."""
        steps = [step for s in self.steppings for part in s.outbox for _, step in part.completed]
        for assembler in self.assemblers.values():
            steps += assembler.held()
        return steps + [step for message in self.segments for step in message.steps]

    def open(self) -> list[int]:
        """Returns the steps that are in some stage."""
        return self.on_the_way() + self.buffer + self.training
