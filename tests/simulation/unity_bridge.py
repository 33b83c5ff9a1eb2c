"""Helpers for tests of the Unity bridge: bridges that close, players in threads, and manual players."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from sparring.pipeline.bridges.unity.game import Unity, make_unity
from sparring.pipeline.compliance.steps import StepWatch
from sparring.pipeline.compliance.trial import random_actions
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Step
from tests.simulation.unity_player_peer import Background, Message
from tests.simulation.unity_player_schema import METHOD

LONG_S: Final = 20.0
"""Time that a test waits for a message before it fails."""

SOON: Final = [(f"grpc.{which}_reconnect_backoff_ms", 20) for which in ("initial", "min", "max")]
"""Options of a client that may call before the bridge listens, which it does at its first reset."""

Frame = Sequence[BehaviorReport]


def zeros(unity: Unity, report: BehaviorReport) -> BehaviorActions:
    """Returns zero actions."""
    assert report.decisions is not None
    kinds, agents = unity.behaviors()[report.behavior].actions, report.decisions.agents
    return BehaviorActions(
        behavior=report.behavior,
        agents=agents,
        continuous=np.zeros((agents.size, kinds.continuous), np.float32),
        discrete=np.zeros((agents.size, len(kinds.discrete)), np.int32),
    )


def random_allowed(seed: int = 0) -> Callable[[Unity, BehaviorReport], BehaviorActions]:
    """Returns a function that chooses random allowed actions."""
    random = np.random.default_rng(seed)

    def act(unity: Unity, report: BehaviorReport) -> BehaviorActions:
        assert report.decisions is not None
        actions = unity.behaviors()[report.behavior].actions
        return random_actions(report.behavior, report.decisions, actions, random)

    return act


def step(unity: Unity, frame: Frame, act: Callable[[Unity, BehaviorReport], BehaviorActions] = zeros) -> Frame:
    """Returns the next frame."""
    return unity.step({report.behavior: act(unity, report) for report in frame if report.decisions is not None})


def play(unity: Unity, steps: int, act: Callable[[Unity, BehaviorReport], BehaviorActions] = zeros) -> list[Frame]:
    """Returns the frames of a reset and of `steps` steps."""
    frames = [unity.reset({}, 7)]
    for _ in range(steps):
        frames.append(step(unity, frames[-1], act))
    return frames


class FrameChecker:
    """Reads frames as the trainer does and checks them against the rules of our own protocol."""

    def __init__(self, unity: Unity) -> None:
        self._unity = unity
        self._sequence = 0
        self.watch = StepWatch()

    def read(self, frames: Sequence[Frame]) -> None:
        """Checks the frames of one reset."""
        self.watch.reset()
        for frame in frames:
            self.watch.specs = dict(self._unity.behaviors())
            assert self.watch.read(Step(sequence=self._sequence, reports=tuple(frame))), self.watch.findings
            self._sequence += 1


def player_events(path: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the events of one kind that a player logged, without the kind."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in event.items() if k != "event"} for event in events if event["event"] == kind]


WORKER: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
FIRST_PORTS: Final = itertools.cycle(range(20_000 + 1_500 * WORKER, 21_500 + 1_500 * WORKER, 10))
"""First port of this worker; below the ephemeral ports and apart for each worker, so that free ports stay free."""


def free_ports(count: int) -> int:
    """Returns the first of `count` consecutive free ports, at most 10."""
    for first in itertools.islice(FIRST_PORTS, 100):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        return first
    raise AssertionError(f"no {count} free ports in a row")


class Bridges:
    """Makes bridges and closes them at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()

    def __call__(self, path: Path | None, **options: Any) -> Unity:
        unity = make_unity(**({"areas": 1, "port": 0, "path": None if path is None else str(path)} | options))
        self._stack.callback(unity.close)
        return unity

    def played(self, *options: str, **engine: Any) -> tuple[Unity, Background]:
        """Returns a bridge that waits as for the editor, and a player in a thread that calls it."""
        unity = make_unity(**({"areas": 1, "port": free_ports(1)} | engine))
        player = Background(self._folder, unity.player().port, *options)
        self._stack.callback(player.join, LONG_S)
        self._stack.callback(unity.close)
        return unity, player

    def manual(self, **options: Any) -> tuple[Unity, ManualPlayer]:
        """Returns a bridge that waits as for the editor, and a manual player."""
        unity = make_unity(**({"areas": 1, "port": free_ports(1)} | options))
        doll = self._stack.enter_context(manual_player(unity.player().port))
        self._stack.callback(unity.close)
        return unity, doll

    def close(self) -> None:
        self._stack.close()


class ManualPlayer:
    """A player that a test controls; its behavior `Doll?team=0` observes a number and has one continuous action."""

    def __init__(self, channel: Any, pool: ThreadPoolExecutor) -> None:
        self.channel = channel
        self._exchange: Any = channel.unary_unary(METHOD)
        self._pool = pool

    def call(self, message: Any) -> Any:
        """Starts a call; `result(timeout)` returns the bytes of the answer."""
        return self._exchange.future(message.SerializeToString(), wait_for_ready=True)

    def ask(self, message: Any) -> Any:
        """Makes a call and returns the trainer's answer."""
        return Message.FromString(self.call(message).result(LONG_S))

    def meanwhile(self, work: Callable[[], Any]) -> Future[Any]:
        """Runs `work`, which waits for this player, on another thread."""
        return self._pool.submit(work)

    def begin(self, unity: Unity, parameters: Mapping[str, float] | None = None) -> Frame:
        """Plays from the introduction to the first decision, whose call stays open."""
        waiting = self.meanwhile(lambda: unity.reset(parameters or {}, 7))
        self.ask(introduction())
        assert self.ask(message()).unity_input.rl_input.command == 1
        self.open = self.call(agents(known=True))
        frame: Frame = waiting.result(LONG_S)
        return frame


@contextmanager
def manual_player(port: int) -> Iterator[ManualPlayer]:
    """Yields a manual player with its own connection."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0), *SOON]
    with ThreadPoolExecutor(1) as pool, grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield ManualPlayer(channel, pool)


def message(status: int = 200, text: str = "") -> Any:
    """Returns a message with nothing but its header."""
    made = Message()
    made.header.status, made.header.message = status, text
    return made


def introduction(version: str = "1.5.0") -> Any:
    """Returns the first message."""
    made = message()
    output = made.unity_output.rl_initialization_output
    output.name, output.communication_version, output.package_version = "Doll", version, "4.0.0"
    return made


def with_goal_camera(made: Any) -> Any:
    """Adds an image of the goal to the observations of a message's agents."""
    for one in made.unity_output.rl_output.agentInfos["Doll?team=0"].value:
        image = one.observations.add(shape=[3, 20, 20], dimension_properties=[1, 2, 2], name="GoalCamera")
        image.observation_type = 1
        image.float_data.data.extend([0.5] * 1200)
    return made


def agents(*, known: bool = False, count: int = 1, observed: float = 0.5) -> Any:
    """Returns a message with agents that request a decision, and with their behavior if `known`."""
    made = message()
    if known:
        brain = made.unity_output.rl_initialization_output.brain_parameters.add(brain_name="Doll?team=0")
        brain.action_spec.num_continuous_actions = 1
    infos = made.unity_output.rl_output.agentInfos["Doll?team=0"]
    for number in range(count):
        one = infos.value.add(id=number).observations.add(shape=[1], dimension_properties=[1], name="seen")
        one.float_data.data.append(observed)
    return made
