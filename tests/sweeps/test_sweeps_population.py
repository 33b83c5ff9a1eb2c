"""Population-based training: who copies whom, and how it goes on after it was killed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from sparring.pipeline.errors import ServiceError, SettingsError
from sparring.services.commands.train import locked
from sparring.services.sweeps.generations import POPULATION_FILE, Generations, lineages, outcomes
from sparring.services.sweeps.population import Interval, Population, PopulationFile
from sparring.services.sweeps.space import Dimension, PopulationSettings, Sweep
from tests.sweeps.sweep_fakes import BATCH, CONFIG, RATE, SPACE, FakeRun, FakeRuns, read

DIMENSIONS = {RATE: Dimension(low=1e-5, high=1e-1, log=True), BATCH: Dimension(choices=(16, 32, 64))}


def population(size: int, own: Mapping[str, Any] | None = None, **settings: Any) -> Population:
    return Population(DIMENSIONS, PopulationSettings(size=size, **settings), own or {}, seed=1)


@pytest.mark.parametrize(
    ("size", "quantile", "scores", "copying", "donors"),
    [
        (4, 0.25, [3.0, 1.0, 2.0, 4.0], {1}, {3}),
        (2, 0.25, [1.0, 2.0], {0}, {1}),
        (3, 0.5, [1.0, 2.0, 3.0], {0}, {2}),
        (8, 0.25, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], {0, 1}, {6, 7}),
        (4, 0.25, [5.0, 5.0, 5.0, 5.0], set(), set()),
        (4, 0.25, [3.0, None, 2.0, 4.0], {1}, {3}),
        (4, 0.25, [None, None, 2.0, 4.0], {0, 1}, {3}),
        (2, 0.25, [None, None], set(), set()),
    ],
)
def test_lowest_quantile_copies_the_highest(
    size: int, quantile: float, scores: list[float | None], copying: set[int], donors: set[int]
) -> None:
    decision = population(size, quantile=quantile).decide(scores)
    assert {one.member for one in decision.copies} == copying
    assert {one.donor for one in decision.copies} <= donors


def test_copied_values_are_the_donor_s_changed() -> None:
    members = population(2, resample=0.0, perturb=(0.5, 2.0))
    members.values = [{RATE: 1e-2, BATCH: 16}, {RATE: 1e-3, BATCH: 32}]
    (copy,) = members.decide([1.0, 2.0]).copies
    assert (copy.before, copy.after[BATCH] in (16, 64)) == ({RATE: 1e-2, BATCH: 16}, True)
    assert copy.after[RATE] in (pytest.approx(5e-4), pytest.approx(2e-3))
    assert members.decide([1.0, 2.0]) == members.decide([1.0, 2.0])


def test_resampled_values_come_from_the_whole_space() -> None:
    members = population(2, resample=1.0)
    found = [members.explore({RATE: 1e-3, BATCH: 32}, np.random.default_rng(seed))[RATE] for seed in range(50)]
    assert min(found) < 1e-4
    assert max(found) > 1e-2


def test_first_member_has_the_file_s_own_values_and_impossible_values_are_none() -> None:
    settings, own = PopulationSettings(size=8), {RATE: 5e-3, BATCH: 16}
    members = Population(DIMENSIONS, settings, own, 1, lambda values: values[BATCH] < 64)
    assert members.values[0] == own
    assert {one[BATCH] for one in members.values} <= {16, 32}
    assert all(members.explore(own | {BATCH: 32}, np.random.default_rng(seed))[BATCH] < 64 for seed in range(20))


# ---------------------------------------------------------------- its loop, with runs that are no processes

pytestmark = pytest.mark.anyio


class Members:
    """Runs whose reward is their learning rate, and whose checkpoint is the list of learning rates so far."""

    def __init__(self) -> None:
        self.runs = FakeRuns(self.make)
        self.waits: set[str] = set()
        self.fails: set[str] = set()

    def make(self, folder: Path, values: Mapping[str, Any]) -> FakeRun:
        folder.mkdir(exist_ok=True)
        path, name = folder / "checkpoint", f"{folder.parent.name}/{folder.name}"
        former = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*former, values[RATE]]))
        steps = [values[RATE]] * 2
        run = FakeRun(folder, [*steps], first=1000 * len(former), error="no game" if name in self.fails else "")
        if name in self.waits:
            run.rewards, run.waits = [], True
        return run


class Session:
    """One process of a sweep."""

    def __init__(self, sweep: Sweep, folder: Path, ratings: Mapping[str, float] | None = None) -> None:
        self.members, self.rated = Members(), 0
        self.population = Population(sweep.dimensions, sweep.settings.population, sweep.own, sweep.settings.seed)
        file = PopulationFile(folder / POPULATION_FILE, self.population)

        def rate(folders: Sequence[Path], seed: int) -> Mapping[str, float]:
            self.rated += 1
            return ratings or {}

        self.loop = Generations(sweep, folder, self.population, file, self.members.runs, rate)

    def names(self) -> list[tuple[str, bool]]:
        return [(name, resume) for name, _, _, resume in self.members.runs.started]


def sweep_of(folder: Path, *, size: int = 3, config: str = CONFIG) -> Sweep:
    how = f"population: {{size: {size}, interval_steps: 1000, resample: 0, perturb: [0.5]}}"
    return read(folder, f"method: population\nsteps: 3000\nparallel: 2\n{how}\n{SPACE}", config)


async def test_members_go_on_from_their_parents_to_the_end(tmp_path: Path) -> None:
    session = Session(sweep_of(tmp_path), tmp_path)
    assert await session.loop.run()
    members = session.population
    assert session.names() == [(f"member-{one:02d}", n > 0) for n in range(3) for one in range(3)]
    assert len({seed for _, _, seed, _ in session.members.runs.started}) == 9
    copies = [(one.member, one.donor) for decision in members.decisions for one in decision.copies]
    assert len(copies) == 2, "one at each end of a generation but the last"
    for member in range(3):
        path = [one.values[RATE] for one in members.lineage(member)]
        assert json.loads((session.loop.folder_of(2, member) / "checkpoint").read_text()) == path
    found = outcomes(members)
    assert [one.value for one in found] == [one.values[RATE] for one in found]
    assert [one.steps for one in found] == [3000] * 3
    assert [[one["steps"] for one in path] for path in lineages(members)] == [[1000, 2000, 3000]] * 3
    assert not (tmp_path / "generation-000").exists()


async def test_killed_population_repeats_the_running_intervals_alone(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    session = Session(sweep, tmp_path)
    session.members.waits = {"generation-001/member-01", "generation-001/member-02"}
    with anyio.move_on_after(1000):  # as a kill: nothing is written
        await session.loop.run()
    assert session.population.generation == 1
    resumed = Session(sweep, tmp_path)
    assert resumed.population.values == session.population.values
    assert resumed.population.waiting == [1, 2]
    assert await resumed.loop.run()
    assert [name for name, _ in resumed.names()][:3] == ["member-01", "member-02", "member-00"]
    for member in range(3):
        path = [one.values[RATE] for one in resumed.population.lineage(member)]
        assert json.loads((resumed.loop.folder_of(2, member) / "checkpoint").read_text()) == path


async def test_folder_of_a_killed_sweep_is_replaced_once_its_run_has_ended(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    session = Session(sweep, tmp_path)
    former = session.loop.folder_of(0, 0)
    former.mkdir(parents=True)
    (former / "checkpoint").write_text("[7.0]")
    async with anyio.create_task_group() as tasks:
        with locked(former):
            tasks.start_soon(session.loop.run)
            await anyio.sleep(10)
            assert "member-00" not in [name for name, _ in session.names()]
    assert len(json.loads((session.loop.folder_of(2, 0) / "checkpoint").read_text())) == 3


async def test_stopped_population_stops_its_runs(tmp_path: Path) -> None:
    session = Session(sweep_of(tmp_path), tmp_path)
    session.members.waits = {"generation-001/member-01"}
    ended: list[bool] = []
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            ended.append(await session.loop.run())

        tasks.start_soon(run)
        await anyio.sleep(100)
        session.loop.stop()
    assert ended == [False]
    assert session.population.waiting == [1]


async def test_failed_member_goes_on_from_another_and_most_failed_ones_end_the_sweep(tmp_path: Path) -> None:
    session = Session(sweep_of(tmp_path), tmp_path)
    session.members.fails = {"generation-000/member-00"}
    assert await session.loop.run()
    assert [one.member for one in session.population.decisions[0].copies] == [0]
    (tmp_path / "other").mkdir()
    failing = Session(sweep_of(tmp_path / "other"), tmp_path / "other")
    failing.members.fails = {f"generation-001/member-{one:02d}" for one in (1, 2)}
    with pytest.raises(ServiceError, match=r"got 2 failed members of 3, .* no game\n.*generation-001/member-02/logs"):
        await failing.loop.run()
    resumed = Session(sweep_of(tmp_path / "other"), tmp_path / "other")
    assert resumed.population.waiting == [1, 2], "what has failed is trained again"
    assert await resumed.loop.run()


async def test_self_play_is_decided_by_a_tournament(tmp_path: Path) -> None:
    config = CONFIG.replace("    max_steps", "    self_play: {save_steps: 500}\n    max_steps")
    ratings = {"member-00": 10.0, "member-01": 30.0, "member-02": 20.0}
    session = Session(sweep_of(tmp_path, config=config), tmp_path, ratings)
    assert await session.loop.run()
    first = session.population.decisions[0]
    assert (first.scores, session.rated) == ([10.0, 30.0, 20.0], 3)
    assert [(one.member, one.donor) for one in first.copies] == [(0, 1)]


def test_interval_is_read_as_it_was_written(tmp_path: Path) -> None:
    first = population(2)
    one = Interval(
        generation=0, member=1, parent=None, values=first.values[1], steps=9, seconds=0.5, reward=None, error="x"
    )
    file = PopulationFile(tmp_path / "population.jsonl", first)
    other = replace(one, member=0, values=first.values[0], reward=1.0)
    file.add(one)
    file.add(other)
    file.add(first.decide([1.0, 2.0]))
    again = population(2)
    PopulationFile(tmp_path / "population.jsonl", again)
    assert again.intervals == {(0, 1): one, (0, 0): other}
    assert (again.decisions, again.parents, again.generation) == (first.decisions, [1, 1], 1)


ALONE = '{"type": "decision", "generation": 0, "scores": [1.0, 2.0], "copies": []}'
OTHER = (
    '{"type": "interval", "generation": 0, "member": 0, "parent": null, "values": {"a": 1}, "steps": 9, "seconds": 1, '
    '"reward": 1}'
)


@pytest.mark.parametrize(
    "line", ["{", "3", "{}", '{"type": "interval"}', '{"type": "decision", "copies": [{}]}', ALONE, OTHER]
)
def test_damaged_decisions_are_refused_with_their_file(tmp_path: Path, line: str) -> None:
    path = tmp_path / "population.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(SettingsError, match=r"got .*population.jsonl, which cannot be used \("):
        PopulationFile(path, population(2))
