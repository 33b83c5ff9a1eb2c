"""Simulators and stepper around lines to Unity players, and what leaves them, life by life."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import anyio
import numpy as np
import structlog
from numpy.typing import NDArray

from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.messages.matches import MatchupAssignment, Results
from sparring.pipeline.messages.simulator import VERSION, Adopted, Bye, Fault, Hello, Player, Progress
from sparring.pipeline.messages.state import LessonsState, StepAllowance
from sparring.pipeline.messages.steps import BehaviorSteps
from sparring.pipeline.monitoring.metrics import LATENCY_BOUNDS, Registry
from sparring.pipeline.settings import parse_settings
from sparring.pipeline.specs import ActionSpec
from sparring.pipeline.stepping.parameters import RunParameters
from sparring.pipeline.stepping.settings import SteppingSettings
from sparring.pipeline.stepping.stepper import Stepper
from sparring.pipeline.stepping.steps import SampledActions
from sparring.services.endpoint.simulators import ServerContext, Simulators
from tests.security.security_house import End
from tests.simulation.unity_bridge import LONG_S
from tests.simulation.unity_player_peer import Background, Played
from tests.stepping.stepping_fakes import ticks_of

MUCH: Final = 10**9
NUMBER: Final = 3
"""Of the simulator."""
GHOST: Final = 7
"""Number of the policy that always does the same first."""
CONFIGURATION: Final = """
behaviors:
  Goal:
  SoccerTwos:
  Match3: {network_settings: {vis_encode_type: match3}}
  Basic:
  Zoo: {network_settings: {vis_encode_type: match3}}
"""
LATE: Final = "  Late:\n"
NEW_EPISODES: Final = LessonsState(serial=1, numbers={"size": 1}, since={"size": 1}, resets=1)


class Launched(Protocol):
    """A player that lives; `played` once it was joined."""

    played: Played

    def join(self, timeout: float) -> None:
        """Returns when it has ended."""


Launch = Callable[[int], Launched]


class Chooser:
    """Chooses anything that is allowed; or always the same first branch."""

    script = ""
    version = 1
    carried = 0

    def __init__(self, actions: ActionSpec, first: int | None = None) -> None:
        self._actions = actions
        self._first = first
        self._random = np.random.default_rng(1)

    def act(self, observations: tuple[Any, ...], masks: NDArray[np.bool_] | None, carried: Any) -> SampledActions:
        assert carried is None
        n, branches = len(observations[0]), self._actions.discrete
        continuous = self._random.uniform(-1, 1, (n, self._actions.continuous)).astype(np.float32)
        drawn = [self._random.random((n, size)) for size in branches]
        if masks is not None:
            for column, forbidden in zip(drawn, np.split(masks, np.cumsum(branches)[:-1], axis=1), strict=True):
                column[forbidden] = -1
        discrete = np.stack([column.argmax(1) for column in drawn], 1) if branches else np.zeros((n, 0))
        if self._first is not None and branches:
            discrete[:, 0] = self._first
        log_probs = np.zeros(n, np.float32)
        return SampledActions(
            continuous=continuous, executed=continuous, discrete=discrete.astype(np.int32), log_probs=log_probs
        )


@dataclass
class Decision:
    """What one agent saw, what it might not do and did, and what came of it.

    Attributes:
        reward: None while that is not known.
    """

    seen: tuple[NDArray[Any], ...]
    mask: NDArray[np.bool_] | None = None
    continuous: list[float] = field(default_factory=list)
    discrete: list[int] = field(default_factory=list)
    acted: bool = False
    reward: float | None = None
    group_reward: float = 0.0


@dataclass
class AgentEpisode:
    """One agent from its first decision to its end.

    Attributes:
        ended: number of the tick; None while it lives, and where it was lost.
        last: what it saw then.
    """

    behavior: str
    team: int
    group: int
    decisions: list[Decision] = field(default_factory=list)
    ended: int | None = None
    last: tuple[NDArray[Any], ...] = ()
    interrupted: bool = False
    lost: bool = False

    @property
    def steps(self) -> list[Decision]:
        """Those of which it is known what came of them."""
        return [one for one in self.decisions if one.reward is not None]


class Witness:
    """Reads what leaves a stepper, slot by slot."""

    def __init__(self) -> None:
        self.agent_episodes: list[AgentEpisode] = []
        self.results: list[Results] = []
        self._slots: dict[tuple[str, int], AgentEpisode] = {}

    def of(self, behavior: str) -> list[AgentEpisode]:
        """The lives of a behavior name."""
        return [life for life in self.agent_episodes if life.behavior == behavior]

    def read(self, steps: BehaviorSteps) -> None:
        for number, tick in zip(steps.ticks.tolist(), ticks_of(steps), strict=True):
            for slot in tick["lost"].tolist():
                self._slots.pop((steps.behavior, slot)).lost = True
            self._end(steps.behavior, tick["ended"], number)
            self._join(steps.behavior, tick["joined"])
            self._decide(steps.behavior, tick["reported"], tick["acted"])
        if steps.results is not None:
            self.results.append(steps.results)

    def _end(self, name: str, ended: Any, number: int) -> None:
        for row, slot in enumerate([] if ended is None else ended.slots.tolist()):
            life = self._slots.pop((name, slot))
            _complete(life, ended, row)
            life.ended, life.interrupted = number, bool(ended.interrupted[row])
            life.last = tuple(column[row] for column in ended.observations)

    def _join(self, name: str, joined: Any) -> None:
        for row, slot in enumerate([] if joined is None else joined.slots.tolist()):
            assert joined.fresh[row]
            assert joined.simulators[row] == NUMBER
            assert (name, slot) not in self._slots
            life = AgentEpisode(name, int(joined.teams[row]), int(joined.groups[row]))
            self._slots[name, slot] = life
            self.agent_episodes.append(life)

    def _decide(self, name: str, reported: Any, acted: Any) -> None:
        slots = [] if reported is None else reported.slots.tolist()
        for row, slot in enumerate(slots):
            life = self._slots[name, slot]
            _complete(life, reported, row)
            life.decisions.append(Decision(tuple(column[row] for column in reported.observations)))
        if acted is None:
            return
        for row, slot in enumerate(slots if acted.slots is None else acted.slots.tolist()):
            decision = self._slots[name, slot].decisions[-1]
            assert not decision.acted
            decision.acted = True
            decision.mask = None if acted.masks is None else acted.masks[row]
            decision.continuous = [] if acted.continuous is None else acted.continuous[row].tolist()
            decision.discrete = [] if acted.discrete is None else acted.discrete[row].tolist()


def _complete(life: AgentEpisode, record: Any, row: int) -> None:
    if life.decisions and life.decisions[-1].acted:
        life.decisions[-1].reward = float(record.rewards[row])
        life.decisions[-1].group_reward = 0.0 if record.group_rewards is None else float(record.group_rewards[row])


@dataclass
class Told:
    """What came of a game.

    Attributes:
        player: its own account; None where nobody started it.
        phases: as the one who launched it heard of them.
        fault: likewise; None where it heard of none.
        goodbye: likewise.
        logged: by stepping.
    """

    witness: Witness
    stepper: Stepper
    player: Played | None = None
    phases: list[str] = field(default_factory=list)
    fault: Fault | None = None
    goodbye: Bye | None = None
    logged: list[Any] = field(default_factory=list)

    def check(self) -> None:
        """The player had nothing to object to; no step was told twice or left out."""
        assert self.fault is None, self.fault
        assert self.player is not None
        assert (self.player.code, self.player.told("forbidden action")) == (0, []), self.player.log
        assert self.phases == ["connected", "initialised", "first reset", "stepping"]
        for name, behavior in self.stepper.behaviors.items():
            assert behavior.produced == sum(len(life.steps) for life in self.witness.of(name))
        completed = {name: one.produced + one.ghosts for name, one in self.stepper.behaviors.items()}
        assert self.goodbye is not None
        assert {name: self.goodbye.steps.get(name, 0) for name in completed} == completed


class Table:
    """A stepping process with one simulator, whose player it speaks with.

    Args:
        messages: of the player with agents, that are answered.
        behaviors: the configuration.
        self_play: behavior names.
        assignment: who plays against whom there.
        first: what those that learn always do first; None for anything. Ghosts do 0.
        lockstep: act in rounds.
        anew_after: messages after which all begin anew, by a curriculum; None for never.
        port: on which the player is to call; 0 for any.
        host: the address on which it is to call.
    """

    def __init__(
        self,
        messages: int,
        *,
        behaviors: str = CONFIGURATION + LATE,
        self_play: Iterable[str] = (),
        assignment: MatchupAssignment | None = None,
        first: int | None = None,
        lockstep: bool = False,
        anew_after: int | None = None,
        port: int = 0,
        host: str = "127.0.0.1",
    ) -> None:
        self._port = port
        self._messages = messages
        self._anew_after = anew_after
        self._first = first
        self._policies: dict[str, Any] = {}
        self._ghosts: dict[tuple[str, int], Any] = {}
        self.stepper = Stepper(
            self._policies,
            lockstep=lockstep,
            self_play=self_play,
            ghosts=self._ghosts,
            parameters=RunParameters({} if anew_after is None else {"size": (1.0, 2.0)}),
        )
        if anew_after is not None:
            self.stepper.parameters.adopt(LessonsState(serial=0, numbers={"size": 0}, since={"size": 0}))
        self.stepper.matches.assignment = assignment
        self.told = Told(Witness(), self.stepper)
        registry = Registry("stepping-0", "test")
        for name in ("action_latency_s", "backpressured_s"):
            registry.histogram(name, LATENCY_BOUNDS)
        context = ServerContext(
            settings=SteppingSettings.model_validate({"address": "unix:///nowhere", "player_host": host}),
            behaviors=parse_settings(behaviors, "test").settings.behaviors,
            scripts={},
            seed=1,
            clock=anyio.current_time,
            registry=registry,
            log=structlog.get_logger(),
            arrived=lambda: self._arrived.set(),
            known=self._enable,
        )
        self.simulators = Simulators(self.stepper, context)

    def play(self, folder: Path, *words: str) -> Told:
        """One stand-in, over real gRPC, from its launch to its end."""
        return self.meet(lambda port: Background(folder, port, *words))

    def meet(self, launch: Launch) -> Told:
        """One player, which is launched with its port."""
        with structlog.testing.capture_logs() as self.told.logged:
            anyio.run(self._run, launch)
        return self.told

    async def _run(self, launch: Launch) -> None:
        self._arrived = anyio.Event()
        there, here = anyio.create_memory_object_stream[bytes](100), anyio.create_memory_object_stream[bytes](100)
        with anyio.fail_after(2 * LONG_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.simulators.serve, End(here[0], there[1]))
                tasks.start_soon(self._look_after, End(there[0], here[1]), launch, tasks.cancel_scope)
                await self._step()
                await self.simulators.part()
                tasks.cancel_scope.cancel()

    async def _look_after(self, stream: Any, launch: Launch, scope: anyio.CancelScope) -> None:
        """The part of the simulator that launched the player."""
        player = Player(protocol="unity", port=self._port, settings="", areas=1, connect_s=LONG_S, timeout_s=LONG_S)
        await stream.send(to_bytes(Hello(version=VERSION, name="unity", behaviors={}, number=NUMBER, player=player)))
        reader, launched = FrameReader(), None
        try:
            while not isinstance(message := reader.next(), Bye | Fault):
                if isinstance(message, Adopted):
                    launched = launch(message.port)
                elif isinstance(message, Progress):
                    self.told.phases.append(message.phase)
                elif message is None:
                    reader.feed(await stream.receive())
            if isinstance(message, Fault):
                self.told.fault = message
            else:
                self.told.goodbye = message
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()
                if launched is not None:
                    await anyio.to_thread.run_sync(launched.join, LONG_S)
                    self.told.player = launched.played
        if self.told.fault is not None:
            scope.cancel()

    async def _step(self) -> None:
        answered = 0
        while answered < self._messages:
            await self._arrived.wait()
            self._arrived = anyio.Event()
            if answered == self._anew_after:
                self.stepper.parameters.adopt(NEW_EPISODES)
            wake = self.stepper.wake(anyio.current_time())
            for key, answer, received_at, backpressured_s in wake.acts:
                self.simulators.answer(key, answer, received_at, backpressured_s)
                answered += 1
            for steps in self.stepper.take_steps():
                self.told.witness.read(steps)

    def _enable(self) -> None:
        """Behaviors became known: there are weights for them, and permits."""
        for name, behavior in self.stepper.behaviors.items():
            if name not in self._policies:
                self._policies[name] = Chooser(behavior.spec.actions, self._first)
                self.stepper.grant(name, StepAllowance(serial=1, steps=MUCH))
                self._ghosts[name, GHOST] = Chooser(behavior.spec.actions, 0)
        self._arrived.set()
