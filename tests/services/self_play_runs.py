"""Self-play in the whole graph under a virtual clock, with a recorder of the records between services."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio._core._run as scheduler
import yaml
from anyio.abc import TaskGroup

from sparring.pipeline.games.soccer import Soccer
from sparring.pipeline.messages.matches import Matchup, MatchupAssignment
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.messages.state import RunState
from sparring.pipeline.queues.memory import MemoryHub, MemoryTransport
from sparring.pipeline.settings import parse_settings
from sparring.pipeline.simulation.game import Game, ScriptedGame
from sparring.pipeline.specs import BehaviorSpec
from sparring.services.commands.players import write_opponents
from sparring.services.process.runtime import Context, Run
from sparring.services.supervision.topology import build
from tests.games.duel import Duel
from tests.services import services_graph
from tests.services.services_graph import Graph

BUFFER = 64
STEPS = 640
SELF_PLAY: dict[str, Any] = {
    "save_steps": 64,
    "team_change": 160,
    "swap_steps": 96,
    "window": 3,
    "play_against_latest_model_ratio": 0.25,
}
BEHAVIOR_NAMES = ("Goal", "GoalRival")
IN_FLIGHT = 2 * BUFFER
"""The step budget."""


@dataclass(frozen=True)
class Kind:
    """A kind of self-play.

    Attributes:
        names: names of the behaviors.
        trainer: `trainer_type` of all behaviors.
        game: makes a simulator.
    """

    names: tuple[str, ...]
    trainer: str
    game: Callable[[], Game]


KINDS = {
    "symmetric": Kind(("Goal",), "ppo", Duel),
    "asymmetric": Kind(BEHAVIOR_NAMES, "ppo", lambda: Duel(asymmetric=True)),
    "soccer": Kind(("Soccer",), "ppo", lambda: Soccer(areas=2, every=50)),
    "poca": Kind(("Soccer",), "poca", lambda: Soccer(areas=2, every=50)),
}


def plain_settings(
    kind: Kind, *, mode: str = "overlap", self_play: Mapping[str, Any] = SELF_PLAY, **values: Any
) -> Any:
    """Returns a small configuration as plain values; `values` are settings of each behavior."""
    behavior = {
        "trainer_type": kind.trainer,
        "hyperparameters": {"batch_size": 16, "buffer_size": BUFFER, "num_epoch": 1},
        "network_settings": {"hidden_units": 8, "num_layers": 1},
        "max_steps": STEPS,
        "time_horizon": 8,
        "self_play": dict(self_play),
        **values,
    }
    pipeline = {"mode": mode, "recovery_interval": 1, "address": "unix:///nowhere"}
    return {"behaviors": dict.fromkeys(kind.names, behavior), "pipeline": pipeline}


class RecordingGame:
    """A game that records its resets and episodes.

    Attributes:
        resets: number of resets in each connection.
        returns: return of each episode of the first agent, by behavior id.
        episodes: start and end of each episode in virtual seconds, by behavior id; for games of one area.
    """

    def __init__(self, game: Game) -> None:
        self.game = game
        self.name = game.name
        self.resets: list[int] = []
        self.returns: dict[str, list[float]] = {}
        self.episodes: dict[str, list[tuple[float, float]]] = {}
        self._sums: dict[str, float] = {}
        self._began: dict[str, float] = {}

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        self.resets.append(0)  # asked for once per connection
        return self.game.behaviors()

    def scripts(self) -> Mapping[str, Sequence[str]]:
        return self.game.scripts() if isinstance(self.game, ScriptedGame) else {}

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        self.resets[-1] += 1
        self._sums.clear()
        self._began.clear()
        return self._recorded(self.game.reset(parameters, seed))

    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        return self._recorded(self.game.step(actions))

    def close(self) -> None:
        """Holds nothing."""

    def _recorded(self, reports: Sequence[BehaviorReport]) -> Sequence[BehaviorReport]:
        for report in reports:
            if report.ends is not None:
                total = self._sums.pop(report.behavior, 0.0) + float(report.ends.rewards[0])
                self.returns.setdefault(report.behavior, []).append(total)
                times = self._began.pop(report.behavior), anyio.current_time()
                self.episodes.setdefault(report.behavior, []).append(times)
            if report.decisions is not None:
                earned = float(report.decisions.rewards[0])
                self._sums[report.behavior] = self._sums.get(report.behavior, 0.0) + earned
                self._began.setdefault(report.behavior, anyio.current_time())
        return reports


Condition = Callable[[str, str, Any], bool]


class Recorder:
    """Records every publication, and the segments that learners receive.

    Args:
        session: part of the names of incarnations, different in each run of a folder.

    Attributes:
        published: topic, key and record of each publication, in order.
        received: segments that learners received, by queue.
    """

    def __init__(self, session: str = "a") -> None:
        self.session = session
        self.published: list[tuple[str, str, Any]] = []
        self.received: dict[str, list[Segments]] = {}
        self._events: list[tuple[Condition, anyio.Event]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Records the graphs that begin from now on."""

        def transport(hub: MemoryHub, *, start: str) -> MemoryTransport:
            return _RecordingTransport(hub, start=self._start(start), recorder=self)

        def context(*, start: str, **values: Any) -> Context:
            return Context(start=self._start(start), **values)

        monkeypatch.setattr(services_graph, "MemoryTransport", transport)
        monkeypatch.setattr(services_graph, "Context", context)

    def event_at(self, condition: Condition) -> anyio.Event:
        """Returns an event that is set at the first publication for which `condition(topic, key, record)` is true."""
        event = anyio.Event()
        self._events.append((condition, event))
        return event

    def add(self, topic: str, key: str, record: Any) -> None:
        """Records a publication."""
        self.published.append((topic, key, record))
        for condition, event in self._events:
            if not event.is_set() and condition(topic, key, record):
                event.set()

    def records(self, topic: str, key: str) -> list[Any]:
        """Returns what was published under a key of a topic, in order."""
        return [record for *source, record in self.published if source == [topic, key]]

    @property
    def assignments(self) -> list[MatchupAssignment]:
        """All published assignments, in order."""
        return self.records("coordination", "assignment")

    @property
    def matchups(self) -> dict[int, Matchup]:
        """All matchups by number; a number never names two of them."""
        found: dict[int, Matchup] = {}
        for assignment in self.assignments:
            for matchup in assignment.matchups:
                assert asdict(found.setdefault(matchup.number, matchup)) == asdict(matchup)
        return found

    @property
    def teams(self) -> list[int]:
        """The learning teams in the order of their turns."""
        found: list[int] = []
        for assignment in self.assignments:
            (team,) = {matchup.team for matchup in assignment.matchups}
            found += [team] if found[-1:] != [team] else []
        return found

    def _start(self, start: str) -> str:
        return start.replace(".t-", f".{self.session}-")


class _RecordingTransport(MemoryTransport):
    def __init__(self, hub: MemoryHub, *, start: str, recorder: Recorder) -> None:
        super().__init__(hub, start=start)
        self._recorder = recorder

    async def publisher(self, service: str) -> Any:
        return _RecordingTopic(await super().publisher(service), service, self._recorder)

    async def receiver(self, queue: Any, capacity: Any) -> Any:
        receiver, name = await super().receiver(queue, capacity), queue.name
        return _RecordingReceiver(receiver, name, self._recorder) if name.startswith("segments:") else receiver


class _RecordingTopic:
    def __init__(self, topic: Any, name: str, recorder: Recorder) -> None:
        self._topic, self._name, self._recorder = topic, name, recorder

    def publish(self, topic: Any, record: Any) -> None:
        self._topic.publish(topic, record)
        self._recorder.add(self._name, topic.key, record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._topic, name)


class _RecordingReceiver:
    def __init__(self, receiver: Any, name: str, recorder: Recorder) -> None:
        self._receiver, self._name, self._recorder = receiver, name, recorder

    async def get(self) -> Any:
        record = await self._receiver.get()
        self._recorder.received.setdefault(self._name, []).append(record)
        return record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)


# ---------------------------------------------------------------- runs


def fix_task_order(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Lets the seed alone decide in which order trio runs tasks that are ready together."""
    monkeypatch.setattr(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    scheduler._r.seed(seed)


@dataclass
class Play:
    """A run of self-play.

    Attributes:
        games: its simulators.
        folder: folder of the run.
        settings: configuration as plain values.
    """

    graph: Graph
    games: list[RecordingGame]
    recorder: Recorder
    folder: Path
    settings: Any = field(repr=False)

    @property
    def table(self) -> list[dict[str, Any]]:
        """The match table."""
        return match_table(self.folder)

    @property
    def saved(self) -> dict[str, Any]:
        """The rules of self-play as coordination has saved them."""
        return saved_rules(self.folder)


async def begin(
    tasks: TaskGroup,
    stack: AsyncExitStack,
    folder: Path,
    games: Sequence[Game],
    plain: Any,
    *,
    recorder: Recorder | None = None,
    seed: int = 1,
    frame_s: float = 0.001,
    resumed: bool = False,
) -> Play:
    """Starts a graph with one simulator for each game, and a recorder if none is given."""
    if recorder is None:
        recorder = Recorder()
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        recorder.install(patch)
    settings = parse_settings(yaml.safe_dump(plain), "test").settings
    write_opponents(folder, settings, settings.behaviors)
    run = build(settings, run_id="test", directory=folder, seed=seed, resumed=resumed).run
    run = Run(**{**run.__dict__, "simulators": {"stepping-0": len(games)}})
    graph = Graph(run=run, tasks=tasks, frame_s=frame_s)
    watcher = await stack.enter_async_context(MemoryTransport(graph.hub, start=f"test.{recorder.session}"))
    watched = [RecordingGame(game) for game in games]
    for name in graph.services:
        graph.seen[name] = await watcher.subscribe(name)
        graph.start(name)
    await anyio.sleep(0.01)
    for number, game in enumerate(watched):
        tasks.start_soon(graph.simulate, number, game)
    return Play(graph, watched, recorder, folder, plain)


async def run_to_end(
    folder: Path, games: Sequence[Game], plain: Any, *, until: Callable[[Play], bool] | None = None, **values: Any
) -> Play:
    """Runs a graph from its beginning to its end, or until `until` is true after a publication of coordination."""
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        play = await begin(tasks, stack, folder, games, plain, **values)
        await play.graph.finish(None if until is None else partial(until, play))
        tasks.cancel_scope.cancel()
    return play


def match_table(folder: Path) -> list[dict[str, Any]]:
    """Returns the match table of a run."""
    path = folder / "matches.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def saved_rules(folder: Path) -> dict[str, Any]:
    """Returns the rules of self-play as coordination has saved them."""
    found: dict[str, Any] = json.loads((folder / "coordination.json").read_text())["self_play"]["rules"]
    return found


def run_states(recorder: Recorder) -> list[RunState]:
    """Returns the published states of the run, in order."""
    return recorder.records("coordination", "run")
