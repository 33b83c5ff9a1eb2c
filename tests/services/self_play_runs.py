"""Self-play in the whole graph under a virtual clock, with a witness of all that is said between the services."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio._core._run as scheduler
import yaml
from anyio.abc import TaskGroup

from sparring.pipeline.games.duel import Duel
from sparring.pipeline.games.soccer import Soccer
from sparring.pipeline.messages.matches import Matchup, MatchupAssignment
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.messages.state import PolicyWeights, RunState
from sparring.pipeline.queues.memory import MemoryHub, MemoryTransport
from sparring.pipeline.settings import parse_settings
from sparring.pipeline.simulation.game import Game, ScriptedGame
from sparring.pipeline.specs import BehaviorId, BehaviorSpec
from sparring.services.commands.players import write_opponents
from sparring.services.process.runtime import Context, Run
from sparring.services.supervision.topology import build
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
BOTH = ("Goal", "GoalRival")
MEETS = 2 * BUFFER
"""Steps that may be in flight."""


@dataclass(frozen=True)
class Kind:
    """A kind of self-play.

    Attributes:
        names: of the behaviors.
        trainer: of all.
        game: makes the simulator of each number.
    """

    names: tuple[str, ...]
    trainer: str
    game: Callable[[], Game]


KINDS = {
    "symmetric": Kind(("Goal",), "ppo", Duel),
    "asymmetric": Kind(BOTH, "ppo", lambda: Duel(asymmetric=True)),
    "soccer": Kind(("Soccer",), "ppo", lambda: Soccer(areas=2, every=50)),
    "poca": Kind(("Soccer",), "poca", lambda: Soccer(areas=2, every=50)),
}


def plain_settings(
    kind: Kind, *, mode: str = "overlap", self_play: Mapping[str, Any] = SELF_PLAY, **values: Any
) -> Any:
    """A small configuration of a kind, as plain values; `values` go to each behavior."""
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


class Watched:
    """A simulator that notes what becomes of it.

    Attributes:
        resets: how often it was reset, connection by connection.
        returns: by behavior id, of each episode of its first agent.
        episodes: by behavior id, when each of its episodes began and ended on the virtual clock; of one area only.
    """

    def __init__(self, game: Game) -> None:
        self._game = game
        self.name = game.name
        self.resets: list[int] = []
        self.returns: dict[str, list[float]] = {}
        self.episodes: dict[str, list[tuple[float, float]]] = {}
        self._sums: dict[str, float] = {}
        self._began: dict[str, float] = {}

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        self.resets.append(0)  # introduces itself
        return self._game.behaviors()

    def scripts(self) -> Mapping[str, Sequence[str]]:
        return self._game.scripts() if isinstance(self._game, ScriptedGame) else {}

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        self.resets[-1] += 1
        self._sums.clear()
        self._began.clear()
        return self._noted(self._game.reset(parameters, seed))

    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        return self._noted(self._game.step(actions))

    def close(self) -> None:
        """Holds nothing."""

    def _noted(self, reports: Sequence[BehaviorReport]) -> Sequence[BehaviorReport]:
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


Seen = Callable[[str, str, Any], bool]


class Witness:
    """Hears all that is published, and all that learners receive.

    Args:
        session: sets the starts of services of this run apart from those of others in the same folder.

    Attributes:
        said: board, key and record of each publication, in order.
        received: by queue, the segments that learners took from it.
    """

    def __init__(self, session: str = "a") -> None:
        self.session = session
        self.said: list[tuple[str, str, Any]] = []
        self.received: dict[str, list[Segments]] = {}
        self._traps: list[tuple[Seen, anyio.Event]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stands between the services of graphs that begin from now on."""

        def transport(hub: MemoryHub, *, start: str) -> MemoryTransport:
            return _Transport(hub, start=self._start(start), witness=self)

        def context(*, start: str, **values: Any) -> Context:
            return Context(start=self._start(start), **values)

        monkeypatch.setattr(services_graph, "MemoryTransport", transport)
        monkeypatch.setattr(services_graph, "Context", context)

    def trap(self, seen: Seen) -> anyio.Event:
        """An event that is set at the first publication of which `seen(topic, key, record)` holds."""
        event = anyio.Event()
        self._traps.append((seen, event))
        return event

    def hear(self, topic: str, key: str, record: Any) -> None:
        """Something is published."""
        self.said.append((topic, key, record))
        for seen, event in self._traps:
            if not event.is_set() and seen(topic, key, record):
                event.set()

    def records(self, topic: str, key: str) -> list[Any]:
        """What was published under a key, in order."""
        return [record for on, under, record in self.said if (on, under) == (topic, key)]

    @property
    def assignments(self) -> list[MatchupAssignment]:
        """All that were published, in order."""
        return self.records("coordination", "assignment")

    @property
    def matchups(self) -> dict[int, Matchup]:
        """All draws by their number, which names the same one for ever."""
        found: dict[int, Matchup] = {}
        for assignment in self.assignments:
            for matchup in assignment.matchups:
                assert asdict(found.setdefault(matchup.number, matchup)) == asdict(matchup)
        return found

    @property
    def teams(self) -> list[int]:
        """The learning teams, one after the other."""
        found: list[int] = []
        for assignment in self.assignments:
            (team,) = {matchup.team for matchup in assignment.matchups}
            found += [team] if found[-1:] != [team] else []
        return found

    def _start(self, start: str) -> str:
        return start.replace(".t-", f".{self.session}-")


class _Transport(MemoryTransport):
    def __init__(self, hub: MemoryHub, *, start: str, witness: Witness) -> None:
        super().__init__(hub, start=start)
        self._witness = witness

    async def topic(self, service: str) -> Any:
        return _Board(await super().topic(service), service, self._witness)

    async def receiver(self, name: str, *arguments: Any) -> Any:
        receiver = await super().receiver(name, *arguments)
        return _Receiver(receiver, name, self._witness) if name.startswith("updates:") else receiver


class _Board:
    def __init__(self, topic: Any, name: str, witness: Witness) -> None:
        self._board, self._name, self._witness = topic, name, witness

    def publish(self, key: str, record: Any) -> None:
        self._board.publish(key, record)
        self._witness.hear(self._name, key, record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._board, name)


class _Receiver:
    def __init__(self, receiver: Any, name: str, witness: Witness) -> None:
        self._receiver, self._name, self._witness = receiver, name, witness

    async def get(self) -> Any:
        record = await self._receiver.get()
        self._witness.received.setdefault(self._name, []).append(record)
        return record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)


# ---------------------------------------------------------------- runs


def same_order(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Lets trio run tasks that are ready together in an order that the seed alone decides."""
    monkeypatch.setattr(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    scheduler._r.seed(seed)


@dataclass
class Play:
    """A run of self-play.

    Attributes:
        graph: its services.
        games: its simulators.
        witness: of all that was said.
        folder: of the run.
    """

    graph: Graph
    games: list[Watched]
    witness: Witness
    folder: Path
    settings: Any = field(repr=False)

    @property
    def table(self) -> list[dict[str, Any]]:
        """The match table."""
        return match_table(self.folder)

    @property
    def saved(self) -> dict[str, Any]:
        """What coordination has written of the rules."""
        return saved_rules(self.folder)


async def begin(
    tasks: TaskGroup,
    stack: AsyncExitStack,
    folder: Path,
    games: Sequence[Game],
    plain: Any,
    *,
    witness: Witness | None = None,
    seed: int = 1,
    frame_s: float = 0.001,
    resumed: bool = False,
) -> Play:
    """Starts a graph with one simulator for each game, and a witness, if there is none yet."""
    if witness is None:
        witness = Witness()
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        witness.install(patch)
    settings = parse_settings(yaml.safe_dump(plain), "test").settings
    write_opponents(folder, settings)
    run = build(settings, run_id="test", directory=folder, seed=seed, resumed=resumed).run
    run = Run(**{**run.__dict__, "simulators": {"stepping-0": len(games)}})
    graph = Graph(run=run, tasks=tasks, frame_s=frame_s)
    watcher = await stack.enter_async_context(MemoryTransport(graph.hub, start=f"test.{witness.session}"))
    watched = [Watched(game) for game in games]
    for name in graph.services:
        graph.seen[name] = await watcher.subscribe(name)
        graph.start(name)
    await anyio.sleep(0.01)
    for number, game in enumerate(watched):
        tasks.start_soon(graph.simulate, number, game)
    return Play(graph, watched, witness, folder, plain)


async def whole(folder: Path, games: Sequence[Game], plain: Any, **values: Any) -> Play:
    """A run from its beginning to its end."""
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        play = await begin(tasks, stack, folder, games, plain, **values)
        await play.graph.finish()
        tasks.cancel_scope.cancel()
    return play


def match_table(folder: Path) -> list[dict[str, Any]]:
    """The match table of a run."""
    path = folder / "matches.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def saved_rules(folder: Path) -> dict[str, Any]:
    """What coordination has written of who plays whom."""
    found: dict[str, Any] = json.loads((folder / "coordination.json").read_text())["self_play"]["rules"]
    return found


# ---------------------------------------------------------------- what always holds


def check_step_counts(play: Play) -> dict[str, dict[str, int]]:
    """Every step is in one term; those of ghosts are among them."""
    found = {}
    for name in play.graph.names:
        step_counts = found[name] = play.graph.step_counts(name)
        assert step_counts["produced"] == sum(value for term, value in step_counts.items() if term != "produced"), (
            name,
            step_counts,
        )
        assert min(step_counts.values()) >= 0, (name, step_counts)
    return found


def check_ghosts_are_not_learned_from(play: Play) -> None:
    """A learner receives only what the learning team of the match did, in matches that were told of before."""
    matchups, names = play.witness.matchups, play.graph.names
    for name in names:
        received = play.witness.received[f"updates:{name}"]
        assert any(len(record.lengths) for record in received)
        for record in received:
            if not len(record.lengths):
                continue
            assert record.matchups is not None
            teams = [matchups[number].team for number in record.matchups.tolist()]
            assert record.teams.tolist() == teams
            for number, team in zip(record.matchups.tolist(), teams, strict=True):
                assert str(BehaviorId(name=name, team=team)) not in matchups[number].ghosts


def check_nothing_goes_back(play: Play) -> None:
    """Versions and assignments only rise; a team learns for as long as it was promised, then the next one."""
    for name in play.graph.names:
        versions = [weights.version for weights in play.witness.records(f"policy-{name}", "weights")]
        assert all(a < b for a, b in itertools.pairwise(versions)), versions
    serials: dict[int, MatchupAssignment] = {}
    latest = 0
    for assignment in play.witness.assignments:
        assert assignment.serial >= latest
        latest = assignment.serial
        assert asdict(serials.setdefault(latest, assignment)) == asdict(assignment)
    numbers = [max(matchup.number for matchup in one.matchups) for one in serials.values()]
    assert numbers == sorted(numbers)
    _check_turns(play)


def _check_turns(play: Play) -> None:
    """Between two changes of team, learners of the team have told of `team_change` steps, or are done."""
    behaviors = play.settings["behaviors"]
    trained, gained = Counter[str](), Counter[str]()
    team: int | None = None
    for topic, _, record in play.witness.said:
        if isinstance(record, PolicyWeights) and topic.startswith("policy-"):
            name = record.behavior
            gained[name] += max(0, record.trained - trained[name])
            trained[name] = record.trained
        if isinstance(record, MatchupAssignment):
            new = record.matchups[0].team
            if team is not None and new != team:
                assert any(
                    gained[name] >= one["self_play"]["team_change"] or trained[name] >= one["max_steps"]
                    for name, one in behaviors.items()
                ), f"team {new} after {dict(gained)} steps of team {team}"
                gained.clear()
            team = new


def check_matches_are_rated_once(play: Play) -> None:
    """Each match has one line, under a draw that was told of, and one place in the ratings."""
    table, matchups = play.table, play.witness.matchups
    keys = [(line["source"], line["match"]) for line in table]
    twice = [key for key, count in Counter(keys).items() if count > 1]
    assert not twice
    assert play.saved["matches"] == len(table) > 0
    assert play.saved["unknown"] == 0
    for line in table:
        matchup = matchups[line["matchup"]]
        assert line["team"] == matchup.team
        ghosts = {
            behavior_id: player
            for behavior_id, player in line["players"].items()
            if BehaviorId.parse(behavior_id).team != matchup.team
        }
        assert ghosts == {behavior_id: _named(play, behavior_id, matchup.ghosts[behavior_id]) for behavior_id in ghosts}


def _named(play: Play, behavior_id: str, number: int) -> str:
    """What a ghost is called: a snapshot, or one of the scripts that the settings ask for."""
    name = BehaviorId.parse(behavior_id).name
    if number > 0:
        return f"{name}@{number}"
    return f"simulator/{play.settings['behaviors'][name]['self_play']['opponents'][-number - 1]['scripted']}"


def check_no_resets(play: Play) -> None:
    """A simulator is reset when it connects, and never again; a link may break before that."""
    for game in play.games:
        assert max(game.resets) == game.resets[-1] == 1, game.resets


def check_all(play: Play) -> dict[str, dict[str, int]]:
    """All of these; returns the books."""
    step_counts = check_step_counts(play)
    assert not play.graph.faults
    check_ghosts_are_not_learned_from(play)
    check_nothing_goes_back(play)
    check_matches_are_rated_once(play)
    check_no_resets(play)
    return step_counts


def run_states(witness: Witness) -> list[RunState]:
    """States of the run, in the order in which they were published."""
    return witness.records("coordination", "run")
