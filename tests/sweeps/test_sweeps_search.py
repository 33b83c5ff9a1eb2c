"""Trials of a search, with runs that are no processes and a clock that jumps."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import optuna
import pytest
from optuna.trial import TrialState

from sparring.pipeline.errors import ServiceError, SettingsError
from sparring.services.sweeps import search
from sparring.services.sweeps.command import _begin
from sparring.services.sweeps.following import POINTS, Progress
from sparring.services.sweeps.results import lines, ranked
from sparring.services.sweeps.search import STUDY_FILE, Search, importance, open_study, outcomes
from sparring.services.sweeps.space import Sweep
from tests.sweeps.sweep_fakes import BATCH, CONFIG, RATE, SPACE, FakeRun, FakeRuns, interval, read

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Connections of SQLite are closed by the collector, which tells of them."""
    yield
    gc.collect()


def good(folder: Path, values: Mapping[str, Any]) -> FakeRun:
    """A run is the better the nearer its learning rate is to 1e-3; 2000 steps."""
    final = 1.0 - abs(math.log10(values.get(RATE, 5e-3)) + 3)
    return FakeRun(folder, [0.0, final / 2, final, final])


def states(study: optuna.Study) -> list[TrialState]:
    return [one.state for one in study.trials]


class Session:
    """One process of a sweep."""

    def __init__(self, sweep: Sweep, folder: Path, runs: FakeRuns, refusal: Any = lambda _: "") -> None:
        self.study = open_study(folder / STUDY_FILE, sweep)
        self.search = Search(sweep, folder, self.study, runs, refusal)


async def test_search_runs_the_file_s_own_values_first_and_as_many_trials_as_asked_for(tmp_path: Path) -> None:
    sweep = read(tmp_path, f"trials: 6\nparallel: 2\npruner: none\nseed: 3\n{SPACE}")
    runs = FakeRuns(good)
    session = Session(sweep, tmp_path, runs)
    assert await session.search.run()
    assert states(session.study) == [TrialState.COMPLETE] * 6
    assert [(name, seed) for name, _, seed, _ in runs.started] == [(f"trial-{n:04d}", 3 + n) for n in range(6)]
    assert runs.started[0][1] == {RATE: 5e-3}
    found = outcomes(session.study, sweep)
    assert [one.own for one in found] == [True] + [False] * 5
    best = ranked(found)[0]
    assert best.value == max(one.value or 0.0 for one in found) == session.study.best_value
    table = list(lines(found, list(sweep.dimensions), {}))
    assert best.name in table[1]
    assert "(the file's own)" in "".join(table)
    assert importance(session.study, list(sweep.dimensions)) == {}


async def test_own_values_outside_the_space_are_tried_all_the_same(tmp_path: Path) -> None:
    sweep = read(tmp_path, f"trials: 2\nspace: {{{RATE}: {{choices: [1e-3, 1e-4]}}, {BATCH}: {{choices: [16, 32]}}}}")
    runs = FakeRuns(good)
    session = Session(sweep, tmp_path, runs)
    await session.search.run()
    assert runs.started[0][1] == {}
    assert set(runs.started[1][1]) == {RATE, BATCH}
    assert outcomes(session.study, sweep)[0].own


async def test_trial_that_promises_little_is_stopped_but_never_the_file_s_own(tmp_path: Path) -> None:
    sweep = read(tmp_path, f"trials: 5\nstartup_trials: 1\nsteps: 2000\n{SPACE}")

    def worse_and_worse(folder: Path, values: Mapping[str, Any]) -> FakeRun:
        return FakeRun(folder, [-float(len(runs.started))] * 4)

    runs = FakeRuns(worse_and_worse)
    session = Session(sweep, tmp_path, runs)
    await session.search.run()
    assert states(session.study) == [TrialState.COMPLETE] + [TrialState.PRUNED] * 4
    assert [one.steps for one in outcomes(session.study, sweep)] == [2000, 500, 500, 500, 500]
    assert not ranked(outcomes(session.study, sweep))[1].is_whole


async def test_killed_search_repeats_running_trials_alone(tmp_path: Path) -> None:
    sweep = read(tmp_path, f"trials: 5\nparallel: 2\npruner: none\n{SPACE}")

    def first_two(folder: Path, values: Mapping[str, Any]) -> FakeRun:
        run = good(folder, values)
        run.waits = folder.name > "trial-0001"
        return run

    runs = FakeRuns(first_two)
    session = Session(sweep, tmp_path, runs)
    with anyio.move_on_after(100):  # as a kill: nothing is told to the study
        await session.search.run()
    assert sorted(states(session.study)) == [TrialState.RUNNING] * 2 + [TrialState.COMPLETE] * 2
    again = FakeRuns(good)
    resumed = Session(sweep, tmp_path, again)
    assert await resumed.search.run()
    assert again.started[0][1:2] == runs.started[2][1:2]
    assert again.started[1][1:2] == runs.started[3][1:2]
    found = outcomes(resumed.study, sweep)
    assert [one.state for one in found] == ["complete"] * 2 + ["interrupted"] * 2 + ["complete"] * 3
    assert not await _more(Session(sweep, tmp_path, FakeRuns(good)))


async def _more(session: Session) -> bool:
    """Returns whether a session starts any trial."""
    before = len(session.study.trials)
    await session.search.run()
    return len(session.study.trials) > before


async def test_stopped_search_stops_its_runs_and_goes_on_with_their_values(tmp_path: Path) -> None:
    sweep = read(tmp_path, f"trials: 3\n{SPACE}")

    def endless(folder: Path, values: Mapping[str, Any]) -> FakeRun:
        run = good(folder, values)
        run.waits = True
        return run

    runs = FakeRuns(endless)
    session = Session(sweep, tmp_path, runs)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.search.run)
        await anyio.sleep(50)
        session.search.stop()
    assert states(session.study) == [TrialState.FAIL, TrialState.WAITING]
    again = FakeRuns(good)
    resumed = Session(sweep, tmp_path, again)
    assert await resumed.search.run()
    assert again.started[0][1] == runs.started[0][1] == {RATE: 5e-3}
    assert [one.own for one in outcomes(resumed.study, sweep)] == [True, True, False, False]


async def test_search_whose_trials_fail_ends_with_the_last_one_s_log(tmp_path: Path) -> None:
    sweep = read(tmp_path, f"trials: 9\nparallel: 2\n{SPACE}")
    runs = FakeRuns(lambda folder, _: FakeRun(folder, [], error="no game"))
    session = Session(sweep, tmp_path, runs)
    with pytest.raises(ServiceError, match=r"got 3 failed .*no game\n.*trial-0002/logs"):
        await session.search.run()
    assert {one.error for one in outcomes(session.study, sweep)} == {"no game"}


async def test_search_whose_study_another_program_locks_ends_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = read(tmp_path, f"trials: 2\n{SPACE}")
    session = Session(sweep, tmp_path, FakeRuns(good))

    def ask(_: object) -> optuna.Trial:
        raise optuna.exceptions.StorageInternalError("of the commit") from OSError("database is locked\n[SQL: ...]")

    monkeypatch.setattr(optuna.Study, "ask", ask)
    with pytest.raises(ServiceError, match=r"^got the study that cannot be written: database is locked; .* --resume$"):
        await session.search.run()


async def test_few_failed_trials_end_no_search_and_are_none_of_its_best(tmp_path: Path) -> None:
    sweep = read(tmp_path, f"trials: 6\npruner: none\n{SPACE}")

    def sometimes(folder: Path, values: Mapping[str, Any]) -> FakeRun:
        return (
            FakeRun(folder, [None], error="") if folder.name in ("trial-0001", "trial-0004") else good(folder, values)
        )

    session = Session(sweep, tmp_path, FakeRuns(sometimes))
    assert await session.search.run()
    found = outcomes(session.study, sweep)
    assert [one.state for one in ranked(found)] == ["complete"] * 4 + ["failed"] * 2
    assert {one.error for one in found} == {"", "no interval of Goal with a reward"}


async def test_values_that_cannot_be_run_together_are_no_trial(tmp_path: Path) -> None:
    sweep = read(tmp_path, f"trials: 4\nspace: {{{BATCH}: {{choices: [16, 32, 64]}}}}")
    runs = FakeRuns(good)
    session = Session(sweep, tmp_path, runs, lambda values: "too large" if values[BATCH] == 64 else "")
    assert await session.search.run()
    assert len(runs.started) == 4
    assert {values[BATCH] for _, values, *_ in runs.started} <= {16, 32}


async def test_search_without_possible_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_MOST_REFUSED", 5)
    sweep = read(tmp_path, f"trials: 4\nspace: {{{BATCH}: {{choices: [16, 32, 64]}}}}")
    session = Session(sweep, tmp_path, FakeRuns(good), lambda _: "too large")
    with pytest.raises(SettingsError, match=r"got 5 combinations .*\ntoo large"):
        await session.search.run()


async def test_grid_runs_every_combination_once(tmp_path: Path) -> None:
    space = f"space: {{{RATE}: {{choices: [1e-3, 5e-3]}}, {BATCH}: {{low: 16, high: 48, step: 16}}}}"
    sweep = read(tmp_path, f"sampler: grid\npruner: none\n{space}")
    runs = FakeRuns(good)
    session = Session(sweep, tmp_path, runs)
    assert await session.search.run()
    tried = [(values[RATE], values[BATCH]) for _, values, *_ in runs.started]
    assert sorted(tried) == [(rate, batch) for rate in (1e-3, 5e-3) for batch in (16, 32, 48)]
    assert tried[0] == (5e-3, 16)


@pytest.mark.parametrize(("sampler", "pruner"), [("tpe", "halving"), ("random", "hyperband")])
async def test_every_sampler_runs_with_every_pruner(tmp_path: Path, sampler: str, pruner: str) -> None:
    sweep = read(tmp_path, f"trials: 8\nparallel: 3\nsampler: {sampler}\npruner: {pruner}\nstartup_trials: 2\n{SPACE}")
    session = Session(sweep, tmp_path, FakeRuns(good))
    assert await session.search.run()
    assert set(states(session.study)) <= {TrialState.COMPLETE, TrialState.PRUNED}


def test_sweep_goes_on_as_it_was_but_for_its_size_and_pruner(tmp_path: Path) -> None:
    def begin(space: str, config: str = CONFIG, *, resume: bool = True) -> None:
        _begin(read(tmp_path, space + SPACE, config), tmp_path, resume=resume, force=False)

    with pytest.raises(SettingsError, match=r"sweep.json, which cannot be used \(.*expected the file of a sweep"):
        begin("")
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"sweep.json, which cannot be used \(.*expected the file of a sweep"):
        begin("")
    (tmp_path / "trial-0000").mkdir()
    with pytest.raises(SettingsError, match=f"got trials in .*, and no {STUDY_FILE}; expected both; restore it"):
        open_study(tmp_path / STUDY_FILE, read(tmp_path, SPACE))
    (tmp_path / STUDY_FILE).write_text("not a database, whatever its name says")
    with pytest.raises(SettingsError, match=f"got .*{STUDY_FILE}, which cannot be used"):
        open_study(tmp_path / STUDY_FILE, read(tmp_path, SPACE))
    (tmp_path / STUDY_FILE).write_text("")
    with pytest.raises(SettingsError, match=f"got .*{STUDY_FILE}, which cannot be used .it is empty"):
        open_study(tmp_path / STUDY_FILE, read(tmp_path, SPACE))
    begin("trials: 3\n", resume=False)
    begin("trials: 5\nparallel: 2\npruner: none\n")
    with pytest.raises(SettingsError, match="got --resume with another steps, seed, the configuration; expected"):
        begin("seed: 5\nsteps: 900\n")
    with pytest.raises(SettingsError, match="got --resume with another the configuration; expected"):
        begin("trials: 3\n", CONFIG.replace("num_layers: 1", "num_layers: 2"))


def test_objective_is_the_mean_of_the_last_episodes_and_points_are_passed_once() -> None:
    progress = Progress("reward", 2, 2000)
    assert list(progress.add(interval(150, None))) == []
    assert list(progress.add(interval(430, 1.0, episodes=30))) == [1, 2, 3, 4]
    assert list(progress.add(interval(460, 2.0, episodes=10))) == []
    assert progress.value == pytest.approx(1.25)
    assert list(progress.add(interval(2100, 4.0, episodes=10))) == list(range(5, POINTS + 1))
    assert progress.value == pytest.approx(3.0)


def test_rating_is_that_of_self_play() -> None:
    progress = Progress("rating", 1, 1000)
    assert [*progress.add(interval(100, 5.0))] == []
    assert [*progress.add(interval(200, 5.0, elo=1250.0))] == [1, 2, 3, 4]
    assert progress.value == 1250.0
