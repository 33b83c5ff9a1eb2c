"""A simulated simulator, which plays over a faulty socket, pings while it waits, reconnects, and ends on a Fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import anyio

from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.messages.simulator import (
    VERSION,
    Act,
    BehaviorReport,
    Bye,
    Fault,
    Hello,
    Ping,
    Reset,
    Step,
    Welcome,
)
from sparring.pipeline.simulation.answers import check_welcome
from sparring.pipeline.simulation.counting import StepCounter
from tests.world.world_game import NumberedGame
from tests.world.world_streams import Listeners, Stream

LOST: Final = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


class FaultReceived(Exception):
    """The trainer has sent a Fault to this simulator."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(f"{fault.code}: {fault.got}")


class Player:
    """One process of a simulator.

    Args:
        number: number of the simulator.
        attempt: number of the process.
        listeners: listeners of trainers.
        address: address of its trainer.
        game: the game that it plays.
        frame_s: time of a frame.
        stepped: called after each Step that was sent.
    """

    def __init__(
        self,
        number: int,
        attempt: int,
        listeners: Listeners,
        address: str,
        game: NumberedGame,
        frame_s: float,
        stepped: Callable[[], None],
    ) -> None:
        self.counter = StepCounter()
        self._number = number
        self._process = f"{number}-{attempt}"
        self._part = f"simulator-{number}"
        self._listeners = listeners
        self._address = address
        self._game = game
        self._frame_s = frame_s
        self._stepped = stepped

    async def run(self) -> None:
        """Plays until either side sends Bye.

        Raises:
            FaultReceived: the trainer refused a message.
            CodecError: a message of the trainer cannot be decoded.
            RemoteProtocolError: a message of the trainer is invalid.
        """
        while True:
            try:
                async with self._listeners.connect(self._part, self._address) as stream:
                    await self._play(stream)
                    return
            except LOST:
                self.counter.discard_open()
                await anyio.sleep(0.1)

    async def _play(self, stream: Stream) -> None:
        hello = Hello(
            version=VERSION,
            name="tally",
            behaviors=dict(self._game.behaviors()),
            number=self._number,
            steps=dict(self.counter.steps),
            process=self._process,
        )
        await stream.send(to_bytes(hello))
        reader, sequence = FrameReader(), 0
        heartbeat_s, timeout_s = 1.0, 4.0
        received_at = anyio.current_time()
        due = received_at + heartbeat_s
        while True:
            with anyio.move_on_at(due) as beat:
                reader.feed(await stream.receive())
            if beat.cancelled_caught:
                if anyio.current_time() - received_at > timeout_s:
                    raise anyio.BrokenResourceError
                await stream.send(to_bytes(Ping()))
                due = anyio.current_time() + heartbeat_s
            while (message := reader.next()) is not None:
                received_at = anyio.current_time()  # an incomplete message does not extend the deadline
                if isinstance(message, Fault):
                    raise FaultReceived(message)
                if isinstance(message, Bye):
                    await stream.send(to_bytes(Bye(steps=self.counter.steps)))
                    return
                if isinstance(message, Welcome):
                    check_welcome(message)
                    heartbeat_s, timeout_s = message.heartbeat_s, message.timeout_s
                    continue
                if not isinstance(message, Reset | Act):
                    continue
                step = Step(sequence=sequence, reports=tuple(await self._answer(message)))
                await stream.send(to_bytes(step))
                self.counter.count_report(step.reports)
                self._stepped()
                sequence += 1

    async def _answer(self, message: Reset | Act) -> Sequence[BehaviorReport]:
        if isinstance(message, Reset):
            self.counter.discard_open()
            return self._game.reset({}, message.seed)
        for entry in message.actions:
            self.counter.add_open(entry.behavior, entry.agents)
        await anyio.sleep(self._frame_s)
        return self._game.step({entry.behavior: entry for entry in message.actions})
