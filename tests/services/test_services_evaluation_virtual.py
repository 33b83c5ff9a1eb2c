"""An evaluation in the whole graph under a virtual clock: which episodes count, recordings, how it ends."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.abc import TaskGroup

from sparring.pipeline.demonstrations.episodes import read
from sparring.pipeline.errors import ServiceError, first_failure
from sparring.pipeline.games.goal import Goal
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.messages.state import LearnerState, StepCounts
from sparring.pipeline.settings import parse_settings
from sparring.pipeline.simulation.game import Game, decisions, ends
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from sparring.services.process.runtime import Playback
from sparring.services.supervision.topology import build
from tests.services import services_graph
from tests.services.services_graph import Graph, begin, settings_text

MEMORY = ", memory: {sequence_length: 4, memory_size: 6}, previous_action: true"
CLOCK = BehaviorSpec(observations=(ObservationSpec(name="age", shape=(1,)),), actions=ActionSpec(continuous=1))


class FixedLengths:
    """A game whose areas have episodes of given lengths, with a reward of 1 for each step."""

    name = "lengths"

    def __init__(self, *lengths: int) -> None:
        self._lengths = np.array(lengths)
        self._ages = np.zeros(len(lengths), np.int64)

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        return {"Goal?team=0": CLOCK}

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> list[BehaviorReport]:
        del parameters, seed
        self._ages[:] = 0
        return [BehaviorReport(behavior="Goal?team=0", decisions=self._decisions(0.0))]

    def step(self, actions: Mapping[str, BehaviorActions]) -> list[BehaviorReport]:
        assert len(actions["Goal?team=0"].agents) == len(self._lengths)
        self._ages += 1
        over = self._ages >= self._lengths
        ended = None
        if over.any():
            at = np.flatnonzero(over)
            ended = ends(at, [self._ages[at, None].astype(np.float32)], rewards=np.ones(len(at)))
            self._ages[at] = 0
        return [BehaviorReport(behavior="Goal?team=0", decisions=self._decisions(np.where(over, 0, 1)), ends=ended)]

    def close(self) -> None:
        """Holds nothing."""

    def _decisions(self, rewards: Any) -> Any:
        agents = np.arange(len(self._lengths))
        return decisions(agents, self._ages[:, None].astype(np.float32), rewards=np.broadcast_to(rewards, agents.shape))


def checkpoint(folder: Path, spec: BehaviorSpec, **values: Any) -> Path:
    """Saves untrained weights of a behavior; returns the folder of the checkpoint."""
    settings = parse_settings(settings_text(**values), "test").settings.behaviors["Goal"]
    return CheckpointFolder(folder / "trained", "Goal").save(Learner("Goal", spec, settings, seed=3).checkpoint(), 1)


async def start(
    tasks: TaskGroup,
    stack: AsyncExitStack,
    folder: Path,
    games: list[Game],
    episodes: int,
    *,
    record: bool = True,
    timeout_s: float = 3600.0,
    **values: Any,
) -> Graph:
    """Starts an evaluation of untrained weights."""
    (spec,) = games[0].behaviors().values()
    path = str(checkpoint(folder, spec, **values))
    settings = Playback(checkpoints={"Goal": path}, episodes=episodes, record=record, timeout_s=timeout_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services_graph, "build", partial(build, playing=settings))
        return await begin(tasks, stack, folder, games, **values)


async def evaluated(folder: Path, games: list[Game], episodes: int, **values: Any) -> dict[str, int]:
    """Runs an evaluation to its end; returns its step counts."""
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await start(tasks, stack, folder, games, episodes, **values)
        step_counts = await graph.finish()
        assert not graph.faults
        tasks.cancel_scope.cancel()
    assert step_counts["produced"] == step_counts["ghost"] + step_counts["open"]
    assert step_counts["trained"] == step_counts["stale"] == step_counts["lost"] == 0
    assert step_counts["produced"] == sum(graph.counts.values())
    return step_counts


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "Goal" / "episodes.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def recorded(folder: Path) -> dict[int, tuple[int, float]]:
    """Returns length and return of each recorded episode, by number."""
    found = {}
    for path in sorted((folder / "Goal").glob("*.episodes.safetensors")):
        columns = read(path).columns
        returns = np.add.reduceat(columns["rewards"], np.cumsum(columns["lengths"]) - columns["lengths"])
        episodes = zip(columns["agents"].tolist(), columns["lengths"].tolist(), returns.tolist(), strict=True)
        found |= {episode: (length, value) for episode, length, value in episodes}
    return found


def listed(folder: Path) -> dict[int, tuple[int, float]]:
    return {int(row["agents"]): (int(row["lengths"]), float(row["returns"])) for row in table(folder)}


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["overlap", "lockstep"])
@pytest.mark.parametrize(
    "games", [[FixedLengths(2, 150)], [FixedLengths(2), FixedLengths(150)]], ids=["areas", "simulators"]
)
async def test_evaluation_waits_for_a_long_episode_that_began_first(
    tmp_path: Path, mode: str, games: list[Game]
) -> None:
    """One area has episodes of 2 steps, the other of 150; the first ten to begin include a long one."""
    await evaluated(tmp_path, games, 10, mode=mode)
    assert sorted(length for length, _ in listed(tmp_path).values()) == [2] * 9 + [150]
    assert list(listed(tmp_path)) == list(range(1, 11))
    assert recorded(tmp_path) == listed(tmp_path)


@pytest.mark.anyio
async def test_episodes_longer_than_segments_and_budget_are_complete(tmp_path: Path) -> None:
    """With segments of 8 steps and buffers of 32, allowances and flushes occur within an episode."""
    await evaluated(tmp_path, [FixedLengths(300, 70)], 2, buffer_size=32, horizon=8)
    assert listed(tmp_path) == {1: (300, 300.0), 2: (70, 70.0)}
    assert recorded(tmp_path) == listed(tmp_path)


@pytest.mark.slow
@pytest.mark.anyio
async def test_endless_episode_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    """The run ends; episodes that began later do not count, because that would favor short ones."""
    await evaluated(tmp_path, [FixedLengths(2, 10**9)], 10, timeout_s=1)
    assert list(listed(tmp_path)) == [1]


@pytest.mark.anyio
async def test_evaluation_of_a_behavior_without_a_simulator_fails(tmp_path: Path) -> None:
    simulators = "\nsimulators: [{{name: goal}}]\n"
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 (a graph is started to fail)
        async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            path = str(checkpoint(tmp_path, CLOCK))
            settings = Playback(checkpoints={"Goal": path}, episodes=3)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(services_graph, "build", partial(build, playing=settings))
                patch.setattr(services_graph, "CONFIG", services_graph.CONFIG + simulators)
                await begin(tasks, stack, tmp_path, [])
            await anyio.sleep(1000)
    error = first_failure(caught.value)
    assert isinstance(error, ServiceError)
    assert "no simulator with 'Goal' in 60 s" in str(error)


@pytest.mark.anyio
async def test_a_single_episode_is_enough(tmp_path: Path) -> None:
    await evaluated(tmp_path, [FixedLengths(3)], 1, record=False)
    assert listed(tmp_path) == {1: (3, 3.0)}
    assert recorded(tmp_path) == {}


@pytest.mark.anyio
@pytest.mark.parametrize("actions", [{"discrete": True, "actions": 2}, {"hybrid": True}])
async def test_agents_with_memory_are_evaluated_and_recorded(tmp_path: Path, actions: dict[str, Any]) -> None:
    """The recorded returns are those of the table."""
    games = [Goal(areas=3, memory=True, **actions) for _ in range(2)]
    await evaluated(tmp_path, list(games), 12, network=MEMORY, mode="lockstep")
    assert list(listed(tmp_path)) == list(range(1, 13))
    found = recorded(tmp_path)
    assert found.keys() == listed(tmp_path).keys()
    for episode, (length, value) in listed(tmp_path).items():
        assert found[episode] == (length, pytest.approx(value, abs=1e-5))


@pytest.mark.anyio
async def test_in_lockstep_the_same_seed_plays_the_same_episodes(tmp_path: Path) -> None:
    """The tables are equal byte for byte, whatever the pace of simulators."""
    tables = set()
    for attempt, frame_s in enumerate((0.001, 0.03)):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            games: list[Game] = [Goal(areas=2) for _ in range(2)]
            graph = await start(
                tasks, stack, folder, games, 10, record=False, mode="lockstep", network=", deterministic: true"
            )
            graph.frame_s = frame_s
            await graph.finish()
            tasks.cancel_scope.cancel()
        tables.add((folder / "Goal" / "episodes.csv").read_bytes())
    assert len(tables) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("part", ["learning-Goal", "assembly", "stepping-0"])
async def test_restarted_service_ends_the_evaluation(tmp_path: Path, part: str) -> None:
    """The restarted service may have held episodes, and the failure says that some are missing."""

    async def killed() -> None:
        async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            graph = await start(tasks, stack, tmp_path, [Goal(areas=3)], 100_000, record=False)
            await anyio.sleep(0.3)
            await graph.kill(part)
            await anyio.sleep(60)

    with pytest.raises(BaseExceptionGroup) as caught:
        await killed()
    failure = first_failure(caught.value)
    assert isinstance(failure, ServiceError)
    assert "restarted" in str(failure)
    assert "missing" in str(failure)
    assert "evaluate again" in str(failure)


@pytest.mark.anyio
async def test_killed_coordination_restarts_and_the_evaluation_completes(tmp_path: Path) -> None:
    """Coordination holds no episode that assembly does not keep until it is acknowledged."""
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await start(tasks, stack, tmp_path, [Goal(areas=3)], 40)
        await anyio.sleep(0.1)
        await graph.kill("coordination")
        step_counts = await graph.finish()
        tasks.cancel_scope.cancel()
    assert step_counts["produced"] == step_counts["ghost"] + step_counts["open"]
    assert list(listed(tmp_path)) == list(range(1, 41))
    assert recorded(tmp_path).keys() == listed(tmp_path).keys()


async def stopped(graph: Graph) -> tuple[LearnerState, StepCounts, int]:
    """Stops services in order; returns the player's last state, the step counts and the steps of simulators."""
    for name in services_graph.SERVICES:
        graph.stops[name].set()
        await graph.ended[name].wait()
        await anyio.sleep(0.1)
    run = graph.latest("coordination", "run")
    return graph.latest("learning-Goal", "state"), run.step_counts["Goal"], sum(graph.counts.values())


@pytest.mark.anyio
async def test_player_without_a_number_of_episodes_plays_until_it_is_stopped(tmp_path: Path) -> None:
    """All steps count as ghost, and no episode is written."""
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await start(tasks, stack, tmp_path, [Goal(areas=3)], 0, record=False)
        await anyio.sleep(0.5)
        state, step_counts, produced = await stopped(graph)
        tasks.cancel_scope.cancel()
    assert not state.done
    assert step_counts.produced == produced > 300
    assert step_counts.ghost == state.ghost == produced - step_counts.open
    assert (step_counts.lost, step_counts.trained) == (0, 0)
    assert not (tmp_path / "Goal").exists()


@pytest.mark.anyio
async def test_player_without_a_number_of_episodes_continues_after_a_restart(tmp_path: Path) -> None:
    """Its count continues after the restart, and segments that are delivered again count once."""
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await start(tasks, stack, tmp_path, [Goal(areas=3)], 0, record=False)
        await anyio.sleep(0.5)
        await graph.kill("learning-Goal")
        await anyio.sleep(0.5)
        state, step_counts, _ = await stopped(graph)
        tasks.cancel_scope.cancel()
    assert state.start == "learning-Goal.t-2"
    assert state.ghost > 300
    assert step_counts.produced == step_counts.ghost + step_counts.lost + step_counts.open
    assert step_counts.produced == sum(graph.counts.values())
