"""Groups in the whole graph under a virtual clock: members start and end, and behaviors share rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from sparring.pipeline.games.crowd import Crowd
from sparring.pipeline.games.goal import Goal
from sparring.pipeline.games.goals import Goals
from sparring.pipeline.messages.state import LearnerState
from sparring.pipeline.monitoring.metrics import highest, mean
from sparring.pipeline.simulation.game import Game
from tests.services.services_graph import Graph, begin
from tests.services.services_helpers import balanced

pytestmark = pytest.mark.usefixtures("one_thread")

POCA: dict[str, Any] = {"trainer": "poca"}
CROWD = POCA | {"names": ("Crowd",)}
MIXED = POCA | {"names": ("Goals", "GoalsOdd")}
STEPS = 320
BUFFER = 64
AREAS, MEMBERS = 2, 6
AGENTS = AREAS * MEMBERS


Games = Callable[[], Sequence[Game]]
Reached = Callable[[LearnerState], bool]


def crowds() -> Sequence[Game]:
    """Returns two simulators; members of the second one decide at different steps."""
    return [Crowd(areas=AREAS, members=MEMBERS), Crowd(members=MEMBERS, every=2)]


def mixed(count: int = 2) -> Sequence[Game]:
    """Returns simulators whose groups have members of two behaviors."""
    return [Goals(areas=AREAS, members=4, mixed=True) for _ in range(count)]


def balanced_counts(graph: Graph, name: str) -> dict[str, int]:
    """Checks that the step counts of a behavior balance; returns them."""
    step_counts = graph.step_counts(name)
    assert balanced(step_counts), step_counts
    return step_counts


def counted(graph: Graph, name: str) -> int:
    """Returns the number of steps of a behavior that the simulators counted themselves."""
    return sum(counts.get(name, 0) for counts in graph.counted.values())


def lag_of(graph: Graph, name: str) -> Any:
    return graph.latest(f"learning-{name}", "metrics").histograms[f"lag/{name}"]


async def run(folder: Path, games: Sequence[Game], **values: Any) -> Graph:
    """Runs a graph from its beginning to its end."""
    frame_s = values.pop("frame_s", 0.001)
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(tasks, stack, folder, list(games), **{"max_steps": STEPS, **values})
        graph.frame_s = frame_s
        await graph.finish()
        tasks.cancel_scope.cancel()
    return graph


GAMES = [pytest.param(crowds, CROWD, id="crowd"), pytest.param(mixed, MIXED, id="mixed")]


@pytest.mark.anyio
@pytest.mark.parametrize(("games", "values"), GAMES)
async def test_every_behavior_trains_to_the_end_with_its_own_step_counts(
    tmp_path: Path, games: Games, values: dict[str, Any]
) -> None:
    """A step counts once, for its own behavior, as the simulators' own counts confirm."""
    graph = await run(tmp_path, games(), **values)
    stale = []
    for name in graph.names:
        step_counts = balanced_counts(graph, name)
        assert STEPS <= step_counts["trained"] < STEPS + 2 * BUFFER
        assert step_counts["lost"] == 0
        assert counted(graph, name) == step_counts["produced"]
        assert highest(lag_of(graph, name)) <= 2
        stale.append(step_counts["stale"])
    assert min(stale) == 0  # the first to finish keeps acting for the other; those steps are stale
    assert not graph.faults


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("games", "values"),
    [
        pytest.param(lambda: [*crowds(), Crowd(members=3)], CROWD, id="crowd", marks=pytest.mark.slow),
        pytest.param(lambda: mixed(3), MIXED, id="mixed", marks=pytest.mark.slow),
    ],
)
async def test_lockstep_repeats_itself(
    tmp_path_factory: pytest.TempPathFactory, games: Games, values: dict[str, Any]
) -> None:
    """The weights repeat even if one behavior finishes before another of the same groups."""
    digests = []
    for frame_s in (0.001, 0.03):
        folder = tmp_path_factory.mktemp("run")
        graph = await run(folder, games(), mode="lockstep", frame_s=frame_s, max_steps=3 * STEPS, **values)
        for name in graph.names:
            balanced_counts(graph, name)
        digests.append([graph.latest(f"learning-{name}", "state").weights_sha256 for name in graph.names])
    assert digests[0] == digests[1]
    assert all(digests[0])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("every", "expected"),
    [
        pytest.param(1, 0.0, id="all decide at once"),
        pytest.param(2, 1.0, id="some act for longer than the update takes"),
    ],
)
async def test_lockstep_has_no_lag_except_that_of_open_steps(tmp_path: Path, every: int, expected: float) -> None:
    """A member that decides at every other step acts once on a decision from before the update."""
    games = [Crowd(members=MEMBERS, every=every) for _ in range(2)]
    lag = lag_of(await run(tmp_path, games, mode="lockstep", max_steps=STEPS, **CROWD), "Crowd")
    assert highest(lag) == expected
    assert mean(lag) < 0.1


def begun(state: LearnerState) -> bool:
    """Returns whether at least two updates are complete."""
    return state.trained >= 2 * BUFFER


def done(state: LearnerState) -> bool:
    """Returns whether the learner has finished and only its agents act."""
    return state.done


KILLS = [
    (crowds, CROWD, "stepping-0", begun, "overlap"),
    (crowds, CROWD, "assembly", begun, "lockstep"),
    (crowds, CROWD, "coordination", begun, "overlap"),
    (crowds, CROWD, "learning-Crowd", begun, "lockstep"),
    (mixed, MIXED, "stepping-0", begun, "lockstep"),
    (mixed, MIXED, "assembly", begun, "overlap"),
    (mixed, MIXED, "coordination", begun, "lockstep"),
    (mixed, MIXED, "learning-GoalsOdd", begun, "overlap"),
    (mixed, MIXED, "assembly", done, "lockstep"),
    (mixed, MIXED, "coordination", done, "overlap"),
    (mixed, MIXED, "learning-Goals", done, "overlap"),
]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("games", "values", "part", "when", "mode"),
    [pytest.param(*kill, id=f"{kill[2]}-{kill[4]}-{number}") for number, kill in enumerate(KILLS)],
)
async def test_killed_service_restarts_and_all_step_counts_balance(
    tmp_path: Path, games: Games, values: dict[str, Any], part: str, when: Reached, mode: str
) -> None:
    """It is killed while members start and end at different steps, or after one behavior has finished."""
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(tasks, stack, tmp_path, list(games()), mode=mode, max_steps=STEPS, **values)
        trained = (await graph.until(graph.names[0], when)).trained
        await graph.kill(part)
        await graph.finish()
        tasks.cancel_scope.cancel()
    in_flight = 2 * BUFFER + len(games()) * AGENTS
    bounds = {"stepping-0": in_flight, "assembly": in_flight, "coordination": 0}
    for name in graph.names:
        step_counts = balanced_counts(graph, name)
        assert step_counts["trained"] >= STEPS
        assert step_counts["lost"] <= bounds.get(part, trained + in_flight)
        if part in ("assembly", "coordination"):
            assert counted(graph, name) == step_counts["produced"]
    assert not graph.faults


def _updated(times: int, state: LearnerState) -> bool:
    return state.updates >= times


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("games", "values", "mode"),
    [pytest.param(crowds, CROWD, "lockstep", id="crowd"), pytest.param(mixed, MIXED, "overlap", id="mixed")],
)
async def test_reconnecting_simulator_loses_no_steps(
    tmp_path: Path, games: Games, values: dict[str, Any], mode: str
) -> None:
    """Its groups are interrupted, no step is lost, and the simulator counts the same steps."""
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(tasks, stack, tmp_path, list(games()), mode=mode, max_steps=STEPS, **values)
        for updates in (1, 2, 4):
            await graph.until(graph.names[0], partial(_updated, updates))
            graph.disconnect(0)
        await graph.finish()
        tasks.cancel_scope.cancel()
    for name in graph.names:
        step_counts = balanced_counts(graph, name)
        assert step_counts["trained"] >= STEPS
        assert step_counts["lost"] == 0
        assert counted(graph, name) == step_counts["produced"]
    assert not graph.faults


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("game", "values", "event"),
    [
        pytest.param(Goal(areas=4), POCA, "no_groups", id="poca without groups"),
        pytest.param(Crowd(members=MEMBERS), {"names": ("Crowd",)}, "group_rewards_added", id="ppo with groups"),
        pytest.param(Crowd(members=MEMBERS), CROWD, None, id="poca with groups"),
        pytest.param(
            Crowd(members=MEMBERS),
            {"names": ("Crowd",), "signals": "{rnd: {}}"},
            None,
            id="ppo with groups and without the extrinsic signal",
        ),
        pytest.param(Goal(areas=4), {}, None, id="ppo without groups"),
    ],
)
async def test_mismatch_of_trainer_and_groups_is_logged_once_and_trains(
    tmp_path: Path, game: Game, values: dict[str, Any], event: str | None
) -> None:
    with structlog.testing.capture_logs() as logs:
        graph = await run(tmp_path, [game], **values)
    (name,) = graph.names
    assert balanced_counts(graph, name)["trained"] >= STEPS
    events = [entry["event"] for entry in logs if entry["event"] in ("no_groups", "group_rewards_added")]
    assert events == ([] if event is None else [event])
