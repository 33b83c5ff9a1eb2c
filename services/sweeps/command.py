"""`sparring sweep CONFIG SPACE`: searches settings by many runs, and shows the best."""

import argparse
import json
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import anyio
import yaml

from sparring.pipeline.errors import SettingsError, install_command
from sparring.pipeline.files import Json, reading, regular, write_atomically
from sparring.pipeline.monitoring import logs
from sparring.pipeline.settings import read
from sparring.services.api.measuring import tournament
from sparring.services.api.runs import options_of, start
from sparring.services.commands.runs import RESULTS, add_config, add_in_process, add_insecure, add_ray
from sparring.services.commands.train import empty, locked, run_folder
from sparring.services.process.hosting import SAME_SIGNAL_S, endings
from sparring.services.sweeps import generations, plots
from sparring.services.sweeps.following import FollowedRun
from sparring.services.sweeps.generations import POPULATION_FILE, Generations
from sparring.services.sweeps.population import Population, PopulationFile
from sparring.services.sweeps.results import Outcome, lines, ranked, write_best, write_table
from sparring.services.sweeps.space import Sweep, Values, read_sweep, words_of

_BASE_FILE: Final = "configuration.yaml"
_SWEEP_FILE: Final = "sweep.json"
_MAY_CHANGE: Final = {"trials", "parallel", "pruner", "startup_trials", "warmup_steps", "reduction_factor"}
"""What a resumed sweep may have anew; all else makes its trials another sweep's."""


class _Loop(Protocol):
    async def run(self) -> bool: ...

    def stop(self) -> None: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_config(parser)
    parser.add_argument("space", type=Path, metavar="SPACE", help="what to try (YAML; docs/sweeps.md)")
    parser.add_argument("--run-id", help="name of the sweep's folder (default: the configuration's name and the time)")
    parser.add_argument("--results-dir", type=Path, default=RESULTS, help="where it is kept (default: %(default)s)")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with the sweep in its folder")
    again.add_argument("--force", action="store_true", help="replace the sweep in its folder")
    add_in_process(parser)
    add_insecure(parser)
    add_ray(parser)


def run(args: argparse.Namespace) -> int:
    """Runs a sweep and prints its table; returns 0 if it is complete or was stopped.

    Raises:
        SettingsError: the configuration, the space or an argument cannot be run.
        ServiceError: too many trials have failed.
    """
    sweep = read_sweep(args.config, args.space, args.assigned)
    read(args.config, {"checkpoint_settings.run_id": args.run_id})  # it is the name of a folder
    run_id = args.run_id or f"{args.config.stem}-sweep-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    folder = run_folder(args.results_dir, run_id, resume=args.resume, force=args.force)
    with locked(folder):
        _begin(sweep, folder, resume=args.resume, force=args.force)
        logs.configure(folder, run_id, "sweep", console=True)
        try:
            command = (
                _Population(args, sweep, folder)
                if sweep.settings.method == "population"
                else _Search(args, sweep, folder)
            )
            try:
                is_complete = anyio.run(_until_stopped, command.loop)
            finally:
                command.show()
            if not is_complete:
                logs.get().info("go_on_with", command=_going_on(args, run_id), notice=True)
        finally:
            logs.close()
    return 0


def _going_on(args: argparse.Namespace, run_id: str) -> str:
    words = ["sparring", "sweep", str(args.config), str(args.space), "--run-id", run_id, "--resume"]
    words += [word for one in args.assigned for word in ("--set", one)]
    options = {key: getattr(args, key) for key in ("results_dir", "in_process", "insecure", "ray")}
    return shlex.join([*words, *options_of(options)])


async def _until_stopped(loop: _Loop) -> bool:
    """Runs a loop, which SIGINT, SIGTERM and SIGHUP stop in order; a second one abandons its runs."""
    is_complete = False
    with anyio.open_signal_receiver(*endings()) as signals:

        async def listen() -> None:
            number, first_at = await anext(signals), anyio.current_time()
            logs.get().info("sweep_stopping", signal=signal.Signals(number).name, notice=True)
            loop.stop()
            while anyio.current_time() - first_at < SAME_SIGNAL_S:
                await anext(signals)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            is_complete = await loop.run()
            tasks.cancel_scope.cancel()
    return is_complete


def _begin(sweep: Sweep, folder: Path, *, resume: bool, force: bool) -> None:
    """Prepares the folder of a sweep, or checks that the sweep there is the same.

    Raises:
        SettingsError: there is another.
    """
    content = {"base": sweep.base.written, "sweep": sweep.settings.model_dump(mode="json")}
    if not resume:
        if force:
            empty(folder)
        write_atomically(folder / _BASE_FILE, yaml.safe_dump(sweep.base.written, sort_keys=False).encode())
        write_atomically(folder / _SWEEP_FILE, json.dumps(content, indent=2).encode())
        return
    with reading(folder / _SWEEP_FILE, "the file of a sweep to --resume", "name its folder with --run-id"):
        former = json.loads(regular(folder / _SWEEP_FILE).read_bytes())
        former_sweep, former_base = dict(former["sweep"]), former["base"]
    own = json.loads(json.dumps(content))
    different = [key for key in own["sweep"] if key not in _MAY_CHANGE and own["sweep"][key] != former_sweep.get(key)]
    if own["base"] != former_base:
        different.append("the configuration")
    if different:
        raise SettingsError(
            f"got --resume with another {', '.join(different)}; expected what {folder / _SWEEP_FILE} says, because the "
            "trials could not be compared; write that, or begin a new sweep"
        )


class _Command:
    """Holds what both methods need: the runs they start, and the files with their results."""

    loop: _Loop

    def __init__(self, args: argparse.Namespace, sweep: Sweep, folder: Path) -> None:
        self._args, self._sweep, self._folder = args, sweep, folder

    def _start(self, folder: Path, values: Mapping[str, Json], seed: int, *, resume: bool = False) -> FollowedRun:
        args = self._args
        return start(
            self._folder / _BASE_FILE,
            values,
            in_order=False,  # a sweep that goes on begins its running trials again
            run_id=folder.name,
            results_dir=folder.parent,
            seed=seed,
            resume=resume,
            in_process=args.in_process,
            insecure=args.insecure,
            ray=args.ray,
        )

    def _refusal(self, values: Values) -> str:
        """Returns why values, each of which can be run, cannot be run together."""
        try:
            read(self._folder / _BASE_FILE, {}, words_of(values))
        except SettingsError as error:
            return str(error)
        return ""

    def show(self) -> None:
        """Writes and prints the results so far."""

    def _show(
        self, outcomes: Sequence[Outcome], importance: Mapping[str, float], pictures: Mapping[str, Callable[[], bytes]]
    ) -> None:
        keys = list(self._sweep.dimensions)
        write_table(self._folder / "trials.csv", outcomes, keys)
        if not outcomes:
            return
        sys.stdout.writelines(f"{line}\n" for line in lines(outcomes, keys, importance))
        for name, picture in pictures.items():
            write_atomically(self._folder / f"{name}.png", picture(), durable=False)
        best = ranked(outcomes)[0]
        if best.is_whole:
            values = {} if best.own else best.values
            write_best(self._folder / "best.yaml", self._args.config, self._args.assigned, values)
            sys.stdout.write(f"{self._folder / 'best.yaml'}\n")


class _Search(_Command):
    """Runs independent trials."""

    def __init__(self, args: argparse.Namespace, sweep: Sweep, folder: Path) -> None:
        try:
            from sparring.services.sweeps import search
        except ModuleNotFoundError as error:
            if error.name != "optuna":
                raise
            raise SettingsError(
                f"got a sweep without Optuna; expected its package; install it with `{install_command('sweep')}`"
            ) from None
        super().__init__(args, sweep, folder)
        self._study = search.open_study(folder / search.STUDY_FILE, sweep)
        self._outcomes, self._importance = search.outcomes, search.importance
        self.loop = search.Search(sweep, folder, self._study, self._start, self._refusal, self._write)

    def _write(self) -> None:
        write_table(self._folder / "trials.csv", self._outcomes(self._study, self._sweep), list(self._sweep.dimensions))

    def show(self) -> None:
        """Writes and prints the trials so far."""
        keys, objective = list(self._sweep.dimensions), self._sweep.objective
        logarithmic = [key for key, one in self._sweep.dimensions.items() if one.log]
        found = self._outcomes(self._study, self._sweep)
        pictures = {
            "history": lambda: plots.history(found, objective),
            "parameters": lambda: plots.parameters(found, keys, logarithmic, objective),
            "curves": lambda: plots.curves(found, objective),
        }
        self._show(found, self._importance(self._study, keys), pictures)


class _Population(_Command):
    """Trains a population."""

    def __init__(self, args: argparse.Namespace, sweep: Sweep, folder: Path) -> None:
        super().__init__(args, sweep, folder)
        settings = sweep.settings
        self._population = Population(
            sweep.dimensions, settings.population, sweep.own, settings.seed, lambda values: not self._refusal(values)
        )
        file = PopulationFile(folder / POPULATION_FILE, self._population)
        self.loop = Generations(sweep, folder, self._population, file, self._start, self._rate)

    def _rate(self, folders: Sequence[Path], seed: int) -> dict[str, float]:
        found = tournament(folders, matches=self._sweep.settings.population.matches, seed=seed)
        return {one["player"].rpartition("@")[0]: one["rating"] for one in found["players"]}

    def show(self) -> None:
        """Writes and prints the members after the last decision."""
        found, keys = generations.outcomes(self._population), list(self._sweep.dimensions)
        if not found:
            return
        best = int(ranked(found)[0].name.rpartition("-")[2])
        paths = generations.lineages(self._population)
        self._show(found, {}, {"lineages": lambda: plots.lineages(paths, keys, best)})
        for member in range(len(paths)):
            descent = " <- ".join(f"{one.member}" for one in reversed(self._population.lineage(member)))
            sys.stdout.write(f"member {member} descends from {descent}\n")
        newest = self._population.decisions[-1].generation
        assert isinstance(self.loop, Generations)
        sys.stdout.write(f"{self.loop.folder_of(newest, best)}\n")
