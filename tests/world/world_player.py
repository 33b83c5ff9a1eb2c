"""A simulator of the world: plays over a faulty socket, pings while it waits, connects anew, dies of a Fault."""

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
from tests.world.world_game import Tally
from tests.world.world_streams import Doors, Stream

LOST: Final = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


class Told(Exception):
    """The trainer says that this simulator made a mistake.

    Attributes:
        fault: what it said.
    """

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(f"{fault.code}: {fault.got}")


class Player:
    """One life of a simulator.

    Args:
        number: of it.
        doors: where trainers listen.
        address: of its trainer.
        game: what it plays.
        frame_s: time for a frame.
        stepped: called when a Step has been sent.
    """

    def __init__(
        self, number: int, doors: Doors, address: str, game: Tally, frame_s: float, stepped: Callable[[], None]
    ) -> None:
        self.counter = StepCounter()
        self._number = number
        self._part = f"simulator-{number}"
        self._doors = doors
        self._address = address
        self._game = game
        self._frame_s = frame_s
        self._stepped = stepped

    async def live(self) -> None:
        """Plays until either side says Bye.

        Raises:
            Told: the trainer refused what this simulator said.
            CodecError: the trainer said what does not read.
        RemoteProtocolError: it said what cannot be.
        """
        while True:
            try:
                async with self._doors.connect(self._part, self._address) as stream:
                    await self._play(stream)
                    return
            except LOST:
                self.counter.forget()
                await anyio.sleep(0.1)

    async def _play(self, stream: Stream) -> None:
        hello = Hello(version=VERSION, name="tally", behaviors=dict(self._game.behaviors()), number=self._number)
        await stream.send(to_bytes(hello))
        reader, sequence = FrameReader(), 0
        heartbeat_s, timeout_s = 1.0, 4.0
        heard = anyio.current_time()
        due = heard + heartbeat_s
        while True:
            with anyio.move_on_at(due) as beat:
                reader.feed(await stream.receive())
            if beat.cancelled_caught:
                if anyio.current_time() - heard > timeout_s:
                    raise anyio.BrokenResourceError
                await stream.send(to_bytes(Ping()))
                due = anyio.current_time() + heartbeat_s
            while (message := reader.next()) is not None:
                heard = anyio.current_time()  # a message that has begun has to come whole in time
                if isinstance(message, Fault):
                    raise Told(message)
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
                self.counter.sent(step.reports)
                self._stepped()
                sequence += 1

    async def _answer(self, message: Reset | Act) -> Sequence[BehaviorReport]:
        if isinstance(message, Reset):
            self.counter.forget()
            return self._game.reset({}, message.seed)
        for entry in message.actions:
            self.counter.acted(entry.behavior, entry.agents)
        await anyio.sleep(self._frame_s)
        return self._game.step({entry.behavior: entry for entry in message.actions})
