"""Trains a population, generation by generation: each member's interval is a run that is resumed in a copied folder.

A generation's folders are made from those of the one before and never change them, so that a killed sweep repeats the
intervals that were running, and nothing else.
"""

import contextlib
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import anyio

from sparring.pipeline.errors import ServiceError, SettingsError, SparringError
from sparring.pipeline.files import Json, copy_folder
from sparring.pipeline.monitoring import logs
from sparring.services.api.runs import RunFailed
from sparring.services.commands.train import locked
from sparring.services.sweeps.following import FollowedRun, Progress, Starter, follow
from sparring.services.sweeps.population import Interval, Population, PopulationFile
from sparring.services.sweeps.results import Outcome
from sparring.services.sweeps.space import Sweep

POPULATION_FILE: Final = "population.jsonl"
_FORMER_S: Final = 60.0
"""Seconds for the run of a killed sweep to end."""
_POLL_S: Final = 0.1

Rate = Callable[[Sequence[Path], int], Mapping[str, float]]
"""Returns a rating for each of some runs by the name of its folder, from a tournament with a seed."""


class Stopped(Exception):
    """The sweep has been stopped."""


class Generations:
    """Trains the members of a population.

    Args:
        sweep: to be run.
        folder: of the sweep.
        population: its members, as far as its file tells.
        file: of the population.
        start: starts the run of a member.
        rate: rates members whose rewards cannot be compared, because they play against themselves.
    """

    def __init__(
        self, sweep: Sweep, folder: Path, population: Population, file: PopulationFile, start: Starter, rate: Rate
    ) -> None:
        self._sweep, self._folder, self._population, self._file = sweep, folder, population, file
        self._start, self._rate = start, rate
        self._running: list[FollowedRun] = []
        self._failure: SparringError | None = None
        self._is_stopping = False
        self._log = logs.get()

    @property
    def count(self) -> int:
        """Returns the number of generations."""
        return math.ceil(self._sweep.steps / self._sweep.settings.population.interval_steps)

    async def run(self) -> bool:
        """Trains the remaining generations; returns False if it was stopped.

        Raises:
            ServiceError: most members have failed, or the tournament has.
            SettingsError: no member can be run.
        """
        with contextlib.suppress(Stopped):
            while self._population.generation < self.count:
                await self._train_all()
                await self._decide()
        return not self._is_stopping

    def stop(self) -> None:
        """Stops the running members in order, and begins nothing else."""
        self._is_stopping = True
        for run in self._running:
            run.stop()

    def folder_of(self, generation: int, member: int) -> Path:
        """Returns the folder of a member's run."""
        return self._folder / f"generation-{generation:03d}" / f"member-{member:02d}"

    async def _train_all(self) -> None:
        waiting = self._population.waiting

        async def work() -> None:
            while waiting and not self._is_stopping:
                try:
                    await self._train(waiting.pop(0))
                except SettingsError as refused:
                    self._failure = self._failure or refused
                    self.stop()

        async with anyio.create_task_group() as tasks:
            for _ in range(self._sweep.settings.parallel):
                tasks.start_soon(work)
        if self._failure is not None:
            raise self._failure
        if self._is_stopping:
            raise Stopped

    async def _train(self, member: int) -> None:
        sweep, population, generation = self._sweep, self._population, self._population.generation
        values, parent, folder = (
            population.values[member],
            population.parents[member],
            self.folder_of(generation, member),
        )
        await self._prepare(folder, None if parent is None else self.folder_of(generation - 1, parent))
        former = None if parent is None else population.intervals[generation - 1, parent]
        target = (generation + 1) * sweep.settings.population.interval_steps
        progress = Progress("reward", sweep.settings.window, sweep.steps)

        def on_interval(line: Mapping[str, Json]) -> bool:
            for _ in progress.add(line):
                pass
            return target < sweep.steps and progress.step >= target

        seed = sweep.settings.seed + generation * sweep.settings.population.size + member
        began = time.monotonic()
        run = self._start(folder, values, seed, resume=parent is not None)
        self._running.append(run)
        error, steps = "", 0
        try:
            result = await follow(run, sweep.behavior, on_interval)
            steps = result.behaviors.get(sweep.behavior, {}).get("steps") or progress.step
        except RunFailed as failure:
            error = failure.result.error or failure.result.status
        finally:
            self._running.remove(run)
            run.stop()
        if not error and steps < min(target, sweep.steps):
            if self._is_stopping:
                return
            error = "something else has stopped the run"
        reward = former.reward if progress.value is None and former is not None else progress.value
        interval = Interval(
            generation=generation,
            member=member,
            parent=parent,
            values=values,
            steps=steps,
            seconds=round(time.monotonic() - began, 3),
            reward=reward,
            error=error,
        )
        self._file.add(interval)
        what = {"generation": generation, "member": member, "steps": steps, "reward": reward}
        if error:
            self._log.warning("member_failed", **what, error=error, logs=str(folder / "logs"))
        else:
            self._log.info("member_trained", **what, notice=True)

    async def _prepare(self, folder: Path, parent: Path | None) -> None:
        """Makes the folder of a run that goes on from a parent's; a former one was of a sweep that was killed."""
        deadline = time.monotonic() + _FORMER_S
        while True:
            try:
                return _copy(folder, parent)
            except SettingsError:  # it still stops
                if time.monotonic() > deadline:
                    raise
            await anyio.sleep(_POLL_S)

    async def _decide(self) -> None:
        population, generation = self._population, self._population.generation
        present = population.present
        failed = [one for one in present if one.error]
        if 2 * len(failed) > len(present):
            where = self.folder_of(generation, failed[-1].member) / "logs"
            raise ServiceError(
                f"got {len(failed)} failed members of {len(present)}, the last with: {failed[-1].error}\n"
                f"expected most to train; read {where}"
            )
        rewards = {one.member: None if one.error else one.reward for one in present}
        scores = rewards if self._sweep.objective == "reward" else await self._ratings(present)
        decision = population.decide([scores.get(one) for one in range(len(present))])
        last = generation + 1 == self.count
        self._file.add(
            decision if not last else type(decision)(generation=generation, scores=decision.scores, copies=[])
        )
        for one in () if last else decision.copies:
            copied = {"generation": generation, "member": one.member, "donor": one.donor}
            self._log.info("member_copied", **copied, before=dict(one.before), after=dict(one.after), notice=True)
        if generation:
            shutil.rmtree(self.folder_of(generation - 1, 0).parent, ignore_errors=True)

    async def _ratings(self, present: Sequence[Interval]) -> dict[int, float | None]:
        """Returns the ratings of members that have not failed, from a tournament between their newest checkpoints."""
        playing = {one.member: self.folder_of(one.generation, one.member) for one in present if not one.error}
        if len(playing) < 2:
            return dict.fromkeys(playing, 0.0)
        seed = self._sweep.settings.seed + self._population.generation
        found = await self._in_thread(lambda: self._rate(list(playing.values()), seed))
        return {member: found.get(folder.name) for member, folder in playing.items()}

    async def _in_thread(self, call: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        """Returns what a call returns that waits for a command, which ends with this process."""
        future: Future[Mapping[str, float]] = Future()

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="tournament", daemon=True).start()
        while not future.done():
            if self._is_stopping:
                raise Stopped
            await anyio.sleep(_POLL_S)
        return future.result()


def _copy(folder: Path, parent: Path | None) -> None:
    """Replaces a folder by a copy of another, or by nothing.

    Raises:
        SettingsError: a run is writing the folder.
    """
    folder.parent.mkdir(exist_ok=True)
    if folder.exists():
        with locked(folder):
            shutil.rmtree(folder)
    if parent is not None:
        partial = folder.with_name(f".{folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        copy_folder(parent, partial, "lock", "tournament-*", "logs")
        partial.rename(folder)


def outcomes(population: Population) -> list[Outcome]:
    """Returns the members after the last decision, each with the score of its last interval."""
    if not population.decisions:
        return []
    last = population.decisions[-1]
    found = []
    for member, score in enumerate(last.scores):
        path = population.lineage(member)
        found.append(
            Outcome(
                name=f"member-{member:02d}",
                state="member" if score is not None else "failed",
                value=score,
                steps=path[-1].steps,
                seconds=sum(one.seconds for one in path),
                values=path[-1].values,
                curve=[(one.steps, one.reward) for one in path if one.reward is not None],
                error=path[-1].error,
            )
        )
    return found


def lineages(population: Population) -> list[list[Mapping[str, Json]]]:
    """Returns for each member of the last decision what `plots.lineages` draws."""

    def point(one: Interval) -> Mapping[str, Json]:
        score = population.decisions[one.generation].scores[one.member]
        return {"steps": one.steps, "score": score, "values": one.values}

    return [[point(one) for one in population.lineage(member)] for member in range(population.settings.size)]
