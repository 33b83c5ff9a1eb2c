"""Simulators and a stepper around connections of Unity players, and the agent episodes that they report."""

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
from sparring.services.endpoint.peers import ServerContext, SimulatorPeer
from sparring.services.endpoint.simulators import Simulators
from tests.security.security_endpoint import End
from tests.simulation.unity_bridge import LONG_S
from tests.simulation.unity_player_peer import Background, Played
from tests.stepping.stepping_fakes import ticks_of

MUCH: Final = 10**9
NUMBER: Final = 3
"""The number of the simulator."""
GHOST: Final = 7
"""The number of the policy whose first branch is always 0."""
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
    """A running player; `played` is valid after `join`."""

    played: Played

    def join(self, timeout: float) -> None:
        """Waits for its end."""


Launch = Callable[[int], Launched]


class RandomPolicy:
    """Samples any allowed action; with `first` that choice of the first branch."""

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
        sampled = [self._random.random((n, size)) for size in branches]
        if masks is not None:
            for column, forbidden in zip(sampled, np.split(masks, np.cumsum(branches)[:-1], axis=1), strict=True):
                column[forbidden] = -1
        discrete = np.stack([column.argmax(1) for column in sampled], 1) if branches else np.zeros((n, 0))
        if self._first is not None and branches:
            discrete[:, 0] = self._first
        log_probs = np.zeros(n, np.float32)
        return SampledActions(
            continuous=continuous, executed=continuous, discrete=discrete.astype(np.int32), log_probs=log_probs
        )


@dataclass
class Decision:
    """Observation, mask, action and outcome of one decision.

    Attributes:
        reward: None until the outcome is known.
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
        ended: number of the tick; None for an open or lost episode.
        last: the last observation.
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
        """Returns the decisions with a known outcome."""
        return [one for one in self.decisions if one.reward is not None]


class EpisodeRecorder:
    """Collects agent episodes from the steps that leave a stepper."""

    def __init__(self) -> None:
        self.episodes: list[AgentEpisode] = []
        self.results: list[Results] = []
        self._slots: dict[tuple[str, int], AgentEpisode] = {}

    def of(self, behavior: str) -> list[AgentEpisode]:
        """Returns the episodes of a behavior name."""
        return [episode for episode in self.episodes if episode.behavior == behavior]

    def read(self, steps: BehaviorSteps) -> None:
        for number, tick in zip(steps.ticks.tolist(), ticks_of(steps), strict=True):
            for slot in tick["lost"].tolist():
                self._slots.pop((steps.behavior, slot)).lost = True
            self._end(steps.behavior, tick["ended"], number)
            self._join(steps.behavior, tick["joined"])
            self._decide(steps.behavior, tick["reported"], tick["acted"])

    def _end(self, name: str, ended: Any, number: int) -> None:
        for row, slot in enumerate([] if ended is None else ended.slots.tolist()):
            episode = self._slots.pop((name, slot))
            _complete(episode, ended, row)
            episode.ended, episode.interrupted = number, bool(ended.interrupted[row])
            episode.last = tuple(column[row] for column in ended.observations)

    def _join(self, name: str, joined: Any) -> None:
        for row, slot in enumerate([] if joined is None else joined.slots.tolist()):
            assert joined.fresh[row]
            assert joined.simulators[row] == NUMBER
            assert (name, slot) not in self._slots
            episode = AgentEpisode(name, int(joined.teams[row]), int(joined.groups[row]))
            self._slots[name, slot] = episode
            self.episodes.append(episode)

    def _decide(self, name: str, reported: Any, acted: Any) -> None:
        slots = [] if reported is None else reported.slots.tolist()
        for row, slot in enumerate(slots):
            episode = self._slots[name, slot]
            _complete(episode, reported, row)
            decision = Decision(tuple(column[row] for column in reported.observations))
            decision.mask = None if reported.masks is None else reported.masks[row]
            episode.decisions.append(decision)
        if acted is None:
            return
        for row, slot in enumerate(slots if acted.slots is None else acted.slots.tolist()):
            decision = self._slots[name, slot].decisions[-1]
            assert not decision.acted
            decision.acted = True
            decision.continuous = [] if acted.continuous is None else acted.continuous[row].tolist()
            decision.discrete = [] if acted.discrete is None else acted.discrete[row].tolist()


def _complete(episode: AgentEpisode, record: Any, row: int) -> None:
    if episode.decisions and episode.decisions[-1].acted:
        episode.decisions[-1].reward = float(record.rewards[row])
        episode.decisions[-1].group_reward = 0.0 if record.group_rewards is None else float(record.group_rewards[row])


@dataclass
class GameRecord:
    """What a game leaves: its episodes, and what player and launching simulator received.

    Attributes:
        player: what the player reports; None if none was launched.
        phases: received by the simulator that launched the player.
        fault: received by it; None if there was none.
        bye: received by it.
        logged: events that stepping logged.
    """

    recorder: EpisodeRecorder
    stepper: Stepper
    player: Played | None = None
    phases: list[str] = field(default_factory=list)
    fault: Fault | None = None
    bye: Bye | None = None
    logged: list[Any] = field(default_factory=list)

    def check(self) -> None:
        """Checks that the player objects to nothing, and that each step is reported exactly once."""
        assert self.fault is None, self.fault
        assert self.player is not None
        assert (self.player.code, self.player.received("forbidden action")) == (0, []), self.player.log
        assert self.phases == ["connected", "initialized", "first reset", "stepping"]
        for name, behavior in self.stepper.behaviors.items():
            assert behavior.produced == sum(len(episode.steps) for episode in self.recorder.of(name))
        completed = {name: one.produced + one.ghosts for name, one in self.stepper.behaviors.items()}
        assert self.bye is not None
        assert {name: self.bye.steps.get(name, 0) for name in completed} == completed


class PlayedGame:
    """A stepping service with one simulator, and the connection of that simulator's player.

    Args:
        messages: messages with agents that are answered before the end.
        behaviors: the configuration.
        self_play: behavior names under self-play.
        assignment: the matchups of self-play.
        first: choice of learning agents in their first branch; None samples it. Ghosts choose 0.
        lockstep: act in rounds.
        reset_after: messages after which a lesson resets all agents; None for never.
        port: port for the player; 0 for any.
        host: address for the player.
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
        reset_after: int | None = None,
        port: int = 0,
        host: str = "127.0.0.1",
    ) -> None:
        self._port = port
        self._messages = messages
        self._anew_after = reset_after
        self._first = first
        self._policies: dict[str, Any] = {}
        self._ghosts: dict[tuple[str, int], Any] = {}
        self.stepper = Stepper(
            self._policies,
            lockstep=lockstep,
            self_play=self_play,
            ghosts=self._ghosts,
            parameters=RunParameters({} if reset_after is None else {"size": (1.0, 2.0)}),
        )
        if reset_after is not None:
            self.stepper.parameters.adopt(LessonsState(serial=0, numbers={"size": 0}, since={"size": 0}))
        self.stepper.matches.assignment = assignment
        self.record = GameRecord(EpisodeRecorder(), self.stepper)
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
            frame_arrived=lambda: self._arrived.set(),
            known=self._enable,
        )
        self.simulators = Simulators(self.stepper, context)

    def play(self, folder: Path, *words: str) -> GameRecord:
        """Plays one game with a stand-in over real gRPC, from its launch to its end."""
        return self.play_with(lambda port: Background(folder, port, *words))

    def play_with(self, launch: Launch) -> GameRecord:
        """Plays one game with a player that is launched with its port."""
        with structlog.testing.capture_logs() as self.record.logged:
            anyio.run(self._run, launch)
        return self.record

    async def _run(self, launch: Launch) -> None:
        self._arrived = anyio.Event()
        there, here = anyio.create_memory_object_stream[bytes](100), anyio.create_memory_object_stream[bytes](100)
        with anyio.fail_after(2 * LONG_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.simulators.serve, SimulatorPeer(End(here[0], there[1])))
                tasks.start_soon(self._launch, End(there[0], here[1]), launch, tasks.cancel_scope)
                await self._step()
                await self.simulators.disconnect_all()
                tasks.cancel_scope.cancel()

    async def _launch(self, stream: Any, launch: Launch, scope: anyio.CancelScope) -> None:
        """Acts as the simulator that launches the player."""
        player = Player(protocol="unity", port=self._port, settings="", areas=1, connect_s=LONG_S, timeout_s=LONG_S)
        await stream.send(to_bytes(Hello(version=VERSION, name="unity", behaviors={}, number=NUMBER, player=player)))
        reader, launched = FrameReader(), None
        try:
            while not isinstance(message := reader.next(), Bye | Fault):
                if isinstance(message, Adopted):
                    launched = launch(message.port)
                elif isinstance(message, Progress):
                    self.record.phases.append(message.phase)
                elif message is None:
                    reader.feed(await stream.receive())
            if isinstance(message, Fault):
                self.record.fault = message
            else:
                self.record.bye = message
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()
                if launched is not None:
                    await anyio.to_thread.run_sync(launched.join, LONG_S)
                    self.record.player = launched.played
        if self.record.fault is not None:
            scope.cancel()

    async def _step(self) -> None:
        answered = 0
        while answered < self._messages:
            await self._arrived.wait()
            self._arrived = anyio.Event()
            if answered == self._anew_after:
                self.stepper.parameters.adopt(NEW_EPISODES)
            result = self.stepper.tick(anyio.current_time())
            for key, answer, received_at, backpressured_s in result.acts:
                self.simulators.answer(key, answer, received_at, backpressured_s)
                answered += 1
            for steps in self.stepper.take_steps():
                self.record.recorder.read(steps)
            self.record.recorder.results += self.stepper.matches.take("stepping-0.1")

    def _enable(self) -> None:
        """Gives registered behaviors their policies and allowances."""
        for name, behavior in self.stepper.behaviors.items():
            if name not in self._policies:
                self._policies[name] = RandomPolicy(behavior.spec.actions, self._first)
                self.stepper.grant(name, StepAllowance(serial=1, steps=MUCH))
                self._ghosts[name, GHOST] = RandomPolicy(behavior.spec.actions, 0)
        self._arrived.set()
