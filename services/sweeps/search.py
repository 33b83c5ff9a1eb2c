"""Runs independent trials, with values that Optuna chooses, in a study that survives the end of this process."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event
from sqlalchemy.exc import DatabaseError

from sparring.pipeline.errors import ServiceError, SettingsError, SparringError
from sparring.pipeline.files import Json, sqlite
from sparring.pipeline.monitoring import logs
from sparring.services.api.runs import RunFailed
from sparring.services.sweeps.following import POINTS, FollowedRun, Progress, Starter, follow
from sparring.services.sweeps.results import Outcome
from sparring.services.sweeps.space import Dimension, Sweep, Values

STUDY_FILE: Final = "study.db"
_OWN: Final = "own"
_ERROR: Final = "error"
_REFUSED: Final = "refused"
_MOST_REFUSED: Final = 100
"""Combinations of values in a row that no run can have."""
_FEWEST_FAILED: Final = 3
_IMPORTANCE_TRIALS: Final = 10
"""Completed trials before the importance of a parameter means anything."""


def open_study(path: Path, sweep: Sweep) -> optuna.Study:
    """Opens the study of a sweep, or makes it, with the trials whose values are known from the start.

    Trials that a former process has left running are interrupted: they are to be run again.

    Args:
        path: of its database.
        sweep: whose study it is.
    """
    optuna.logging.disable_default_handler()
    optuna.logging.enable_propagation()
    is_new = not path.exists()
    if is_new and any(path.parent.glob("trial-*")):
        got = f"got trials in {path.parent}, and no {path.name}"
        raise SettingsError(f"{got}; expected both; restore it, or begin another sweep")
    try:
        if not is_new and not path.stat().st_size:
            raise ValueError("it is empty")
        storage = optuna.storages.RDBStorage(sqlite(path), engine_kwargs={"connect_args": {"timeout": 60}})
        with storage.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        # A commit survives the end of the process without waiting for the disk, which takes most of the time otherwise.
        event.listen(storage.engine, "connect", lambda made, _: made.execute("PRAGMA synchronous=NORMAL"))
        storage.engine.dispose()
        study = optuna.create_study(
            study_name="sweep", storage=storage, direction="maximize", pruner=_pruner(sweep), load_if_exists=True
        )
        known = study.get_trials(deepcopy=False)
    except (DatabaseError, LookupError, TypeError, ValueError) as error:
        raise SettingsError(
            f"got {path}, which cannot be used ({getattr(error, 'orig', error)}); expected the trials of a sweep; "
            "restore it, or begin another sweep"
        ) from error
    study.sampler = _sampler(sweep, len(known))
    for trial in known:
        if trial.state is TrialState.RUNNING:
            interrupt(study, trial)
    if is_new:
        for values in planned(sweep):
            study.enqueue_trial(dict(values), user_attrs={_OWN: values is sweep.own})
    return study


def planned(sweep: Sweep) -> list[Values]:
    """Returns the values of trials that are known from the start: the configuration's own, and those of a grid.

    The trial with the configuration's own values gets no values where not all of these are in the space.
    """
    first = [sweep.own]
    if sweep.settings.sampler != "grid":
        return first
    grid = itertools.product(*(one.grid for one in sweep.dimensions.values()))
    named = (dict(zip(sweep.dimensions, values, strict=True)) for values in grid)
    return [*first, *(values for values in named if values != sweep.own)]


def interrupt(study: optuna.Study, trial: FrozenTrial | optuna.Trial) -> None:
    """Ends a trial that is running, and puts one with the same values into the study, to be run later."""
    study.tell(trial.number, state=TrialState.FAIL)
    study.enqueue_trial(dict(trial.params), user_attrs={_OWN: trial.user_attrs.get(_OWN, False)})


def counts(trial: FrozenTrial) -> bool:
    """Returns whether a trial is one of those asked for: it was neither interrupted nor refused."""
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED) or _ERROR in trial.user_attrs


class Search:
    """Runs the trials of a study.

    Args:
        sweep: to be run.
        folder: of the sweep.
        study: of its trials.
        start: starts the run of a trial.
        refusal: returns why values cannot be run together; "" if they can.
        on_end: called when a trial has ended.
    """

    def __init__(
        self,
        sweep: Sweep,
        folder: Path,
        study: optuna.Study,
        start: Starter,
        refusal: Callable[[Values], str] = lambda _: "",
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._sweep, self._folder, self._study, self._start = sweep, folder, study, start
        self._refusal, self._on_end = refusal, on_end
        self._running: list[FollowedRun] = []
        self._left = self._size() - sum(map(counts, study.get_trials(deepcopy=False)))
        self._ended = self._failed = 0
        self._is_stopping = False
        self._failure: SparringError | None = None
        self._log = logs.get()

    async def run(self) -> bool:
        """Runs trials until there are enough, or it is stopped; returns whether there are.

        Raises:
            ServiceError: too many trials fail.
            SettingsError: a trial cannot be run.
        """
        async with anyio.create_task_group() as tasks:
            for _ in range(self._sweep.settings.parallel):
                tasks.start_soon(self._work)
        if self._failure is not None:
            raise self._failure
        return not self._is_stopping

    def stop(self) -> None:
        """Stops the running trials in order, and begins no other."""
        self._is_stopping = True
        for run in self._running:
            run.stop()

    def _give_up(self, failure: SparringError) -> None:
        """Ends with a failure, once the running trials have stopped in order."""
        self._failure = self._failure or failure
        self.stop()

    def _size(self) -> int:
        trials = self._sweep.settings.trials
        return min(trials, len(planned(self._sweep))) if self._sweep.settings.sampler == "grid" else trials

    async def _work(self) -> None:
        while self._left > 0 and not self._is_stopping:
            self._left -= 1
            try:
                await self._train(self._next())
            except SettingsError as refused:
                self._give_up(refused)
            except optuna.exceptions.StorageInternalError as error:
                got = f"the study that cannot be written: {error.__cause__ or error}".splitlines()[0]
                remedy = "end what else uses the file, or make room, and go on with --resume"
                self._give_up(ServiceError(f"got {got}; expected it for this sweep alone; {remedy}"))

    def _next(self) -> optuna.Trial:
        """Returns a new trial, whose values can be run together."""
        for _ in range(_MOST_REFUSED):
            trial = self._study.ask()
            dimensions = self._sweep.dimensions
            is_inside = len(self._sweep.own) == len(dimensions)
            if not trial.user_attrs.get(_OWN) or is_inside:
                for key, one in dimensions.items():
                    _suggest(trial, key, one)
            if trial.user_attrs.get(_OWN) or not (text := self._refusal(trial.params)):
                return trial
            trial.set_user_attr(_REFUSED, text)
            self._study.tell(trial, state=TrialState.FAIL)
            self._log.info("values_refused", trial=trial.number, why=text)
        raise SettingsError(
            f"got {_MOST_REFUSED} combinations of values in a row that cannot be run, the last because of\n{text}\n"
            "expected most to be possible; narrow the space"
        )

    async def _train(self, trial: optuna.Trial) -> None:
        sweep, name = self._sweep, folder_name(trial.number)
        progress, pruned = Progress(sweep.objective, sweep.settings.window, sweep.steps), False

        def on_interval(values: Mapping[str, Json]) -> bool:
            nonlocal pruned
            for point in progress.add(values):
                assert progress.value is not None  # which a point has
                trial.report(progress.value, point)
            pruned = pruned or (not trial.user_attrs.get(_OWN) and trial.should_prune())
            return pruned

        run = self._start(self._folder / name, trial.params, sweep.settings.seed + trial.number)
        self._running.append(run)
        error = ""
        try:
            result = await follow(run, sweep.behavior, on_interval)
        except RunFailed as failure:
            error, status = failure.result.error or failure.result.status, "failed"
        else:
            status = result.status
        finally:
            self._running.remove(run)
            run.stop()
        trial.set_user_attr("steps", progress.step)
        if status == "stopped" and self._is_stopping and not pruned:
            interrupt(self._study, trial)
            return
        if status == "stopped" and not pruned:
            error = "something else has stopped the run"
        elif not error and progress.value is None:
            error = f"no interval of {sweep.behavior} with a {sweep.objective}"
        self._tell(trial, progress.value, pruned, error)

    def _tell(self, trial: optuna.Trial, value: float | None, pruned: bool, error: str) -> None:
        """Ends a trial; gives up where most trials fail."""
        name = folder_name(trial.number)
        self._ended += 1
        if error:
            self._failed += 1
            trial.set_user_attr(_ERROR, error)
            self._study.tell(trial, state=TrialState.FAIL)
            self._log.warning("trial_failed", trial=name, error=error)
        else:
            state = TrialState.PRUNED if pruned else TrialState.COMPLETE
            self._study.tell(trial, None if pruned else value, state)
            self._log.info(
                "trial_ended", trial=name, state=state.name.lower(), value=value, left=self._left, notice=True
            )
        self._on_end()
        if self._failed >= _FEWEST_FAILED and 2 * self._failed > self._ended:
            self._give_up(
                ServiceError(
                    f"got {self._failed} failed trials of {self._ended}, the last with: {error}\n"
                    f"expected most to end well; read {self._folder / name / 'logs'}; "
                    "go on with --resume, or begin again with --force"
                )
            )


def folder_name(number: int) -> str:
    """Returns the name of the folder of a trial."""
    return f"trial-{number:04d}"


def outcomes(study: optuna.Study, sweep: Sweep) -> list[Outcome]:
    """Returns the trials of a study that have begun, in their order."""
    return [
        _outcome(trial, sweep)
        for trial in study.get_trials(deepcopy=False)
        if trial.state is not TrialState.WAITING and _REFUSED not in trial.user_attrs
    ]


def _outcome(trial: FrozenTrial, sweep: Sweep) -> Outcome:
    known, attributes = trial.intermediate_values, trial.user_attrs
    is_own = bool(attributes.get(_OWN))
    state = "failed" if _ERROR in attributes else "interrupted" if trial.state is TrialState.FAIL else trial.state.name
    return Outcome(
        name=folder_name(trial.number),
        state=state.lower(),
        value=trial.value if trial.value is not None else known.get(max(known, default=0)),
        steps=attributes.get("steps"),
        seconds=None if trial.duration is None else trial.duration.total_seconds(),
        values=sweep.own if is_own else trial.params,
        own=is_own,
        curve=[(point * sweep.steps // POINTS, value) for point, value in sorted(known.items())],
        error=attributes.get(_ERROR, ""),
    )


def importance(study: optuna.Study, keys: Sequence[str]) -> dict[str, float]:
    """Returns the share of each parameter in what makes the best trials differ; nothing for few trials."""
    complete = [one for one in study.get_trials(deepcopy=False) if one.state is TrialState.COMPLETE and one.params]
    if len(complete) < _IMPORTANCE_TRIALS:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return optuna.importance.get_param_importances(study, evaluator=evaluator, params=list(keys))


# ---------------------------------------------------------------- what Optuna is asked for


def _suggest(trial: optuna.Trial, key: str, one: Dimension) -> None:
    if one.choices:
        trial.suggest_categorical(key, one.choices)
    elif one.whole:
        trial.suggest_int(key, round(one.low), round(one.high), step=round(one.step or 1), log=one.log)
    else:
        trial.suggest_float(key, one.low, one.high, step=one.step, log=one.log)


def _sampler(sweep: Sweep, begun: int) -> optuna.samplers.BaseSampler:
    """Returns the sampler; one that begins later must not repeat its first values."""
    seed = sweep.settings.seed + begun
    return (
        optuna.samplers.TPESampler(seed=seed)
        if sweep.settings.sampler == "tpe"
        else optuna.samplers.RandomSampler(seed)
    )


def _pruner(sweep: Sweep) -> optuna.pruners.BasePruner:
    settings = sweep.settings
    warmup = sweep.steps // 5 if settings.warmup_steps is None else settings.warmup_steps
    point, factor = max(1, warmup * POINTS // sweep.steps), settings.reduction_factor
    pruners: dict[str, Callable[[], Any]] = {
        "none": optuna.pruners.NopPruner,
        "median": lambda: optuna.pruners.MedianPruner(settings.startup_trials, point),
        "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=point, reduction_factor=factor),
        "hyperband": lambda: optuna.pruners.HyperbandPruner(point, POINTS, factor),
    }
    pruner: optuna.pruners.BasePruner = pruners[settings.pruner]()
    return pruner
