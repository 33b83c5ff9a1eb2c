"""Trains from recorded steps alone: `sparring train CONFIG --offline`, in one process and without a simulator.

consumes      recorded episodes, whose specs are those of the behaviors
produces      checkpoints, ONNX models, `metrics.jsonl`, `curves.png` and `summary.json`, as a run with simulators does
waits for     nothing
unblocked by  nothing
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

from sparring.pipeline.demonstrations.library import spec_of
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.export import missing_packages
from sparring.pipeline.export.checkpoints import export
from sparring.pipeline.export.layout import ExportError
from sparring.pipeline.files import GONE, append, identity, is_gone, write_atomically
from sparring.pipeline.learning.checkpoints import REPLAY, CheckpointFolder, initial_folder, load
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.monitoring import logs
from sparring.pipeline.monitoring.curves import lineages, picture
from sparring.pipeline.monitoring.files import read_lines
from sparring.pipeline.monitoring.intervals import Interval
from sparring.pipeline.monitoring.summary import BehaviorSummary, Status, summary
from sparring.pipeline.networks.device import configure_torch, usable
from sparring.services.process.hosting import ending_signals
from sparring.services.process.runtime import Run
from sparring.services.supervision.topology import Topology


def train(topology: Topology, notes: list[str]) -> Status:
    """Trains all behaviors of a run, one after the other, and returns how it ended.

    Raises:
        RecordingError: recorded episodes are missing, unreadable, or of another spec.
        CheckpointError: a checkpoint to continue from is damaged, or of another network.
        ServiceError: the folder of the run is gone.
    """
    run, settings, began = topology.run, topology.run.settings, time.monotonic()
    topology.save()
    logs.configure(run.directory, run.id, "supervisor", console=True)
    for note in notes:
        logs.get().warning("settings", note=note, notice=True)
    configure_torch(settings.pipeline.torch_threads.learning, settings.torch_settings.matmul_precision)
    with _stopping() as stop:
        found = {name: _Offline(run, name, stop).train() for name in settings.behaviors}
    complete = all(one.steps >= settings.behaviors[name].max_steps for name, one in found.items())
    status: Status = "completed" if complete else "stopped"
    ended = summary(run_id=run.id, status=status, wall_s=time.monotonic() - began, error=None, behaviors=found)
    write_atomically(run.directory / "summary.json", json.dumps(ended, indent=2).encode())
    try:
        if (metrics := run.directory / "metrics.jsonl").exists():  # it may be stopped before its first interval
            write_atomically(run.directory / "curves.png", picture(lineages(read_lines(metrics)), run.id))
    except OSError as error:
        logs.get().warning("not_written", what="the curves", error=str(error), notice=True)
    logs.get().info("run_ended", status=status, summary=str(run.directory / "summary.json"), notice=True)
    return status


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Yields an event that the signals set which end a process."""
    stop = threading.Event()
    with ending_signals(lambda *_: stop.set()):
        yield stop


class _Offline:
    """Trains one behavior.

    Args:
        run: of the behavior.
        name: of the behavior.
        stop: set where training is to end.
    """

    def __init__(self, run: Run, name: str, stop: threading.Event) -> None:
        self._run, self._name, self._stop = run, name, stop
        self._behavior = run.settings.behaviors[name]
        self._folder, self._number = CheckpointFolder(run.directory, name), identity(run.directory)
        wanted = self._behavior.hyperparameters.recordings(self._behavior)
        spec = spec_of(wanted.demo_path, wanted.demo_actions)
        self._learner = Learner(
            *(name, spec, self._behavior, run.seed),
            device=usable(run.settings.torch_settings.of_learner(name)),
            is_stopping=stop.is_set,
            replay_folder=run.directory / name / REPLAY,
            offline=True,
        )
        for file in self._learner.demo_files:
            logs.get().info("demonstrations_loaded", **asdict(file))
        if (initial := initial_folder(run.directory, name)).exists():
            self._learner.load_weights(load(initial))
        if run.resumed and self._folder.newest_first():
            self._learner.restore(self._folder.load_latest())

    def train(self) -> BehaviorSummary:
        """Trains until `max_steps` or a stop, and saves the weights."""
        learner, behavior = self._learner, self._behavior
        shown, saved, began = learner.trained, learner.trained, time.monotonic()
        means, skipped = dict[str, list[float]](), 0
        while not learner.done and not self._stop.is_set():
            report = learner.update_offline()
            for name, value in report.statistics.items():
                means.setdefault(name, []).append(value)
            skipped += report.skipped
            if learner.done or learner.trained - shown >= behavior.summary_freq:
                self._show(shown, began, {name: sum(found) / len(found) for name, found in means.items()})
                if skipped:
                    cause = "loss or gradient not finite"
                    logs.get().warning("minibatches_skipped", behavior=self._name, count=skipped, cause=cause)
                shown, began, means, skipped = learner.trained, time.monotonic(), {}, 0
            if not learner.done and learner.trained - saved >= behavior.steps_between_checkpoints:
                saved = learner.trained
                try:
                    self._save()
                except OSError as error:  # the next one may find room
                    logs.get().warning("not_written", what="a checkpoint", error=str(error), notice=True)
        return BehaviorSummary(
            steps=learner.trained,
            updates=learner.updates,
            checkpoint=self._save(),
            weights_sha256=learner.weights_sha256,
        )

    def _check_folder(self) -> None:
        if is_gone(folder := self._run.directory, self._number):
            raise ServiceError(GONE.format(folder=folder))

    def _save(self) -> str:
        """Writes a checkpoint and its ONNX models; returns its path within the folder of the run."""
        self._check_folder()
        path = self._folder.save(self._learner.checkpoint(), self._behavior.keep_checkpoints)
        if self._run.settings.pipeline.export and not missing_packages():
            own = path.with_name(f"{self._name}-{self._learner.trained}.onnx")
            try:
                export(load(path), [self._run.directory / f"{self._name}.onnx", own])
            except (ExportError, OSError) as error:  # a policy that needs its previous action, or a full disk
                logs.get().warning("export_failed", behavior=self._name, cause=str(error), notice=True)
        return str(path.relative_to(self._run.directory))

    def _show(self, before: int, began: float, means: Mapping[str, float]) -> None:
        """Writes an interval to `metrics.jsonl` and to the console."""
        self._check_folder()
        learner = self._learner
        line = Interval(
            behavior=self._name,
            time_s=time.time(),
            seconds=time.monotonic() - began,
            step=learner.trained,
            max_steps=self._behavior.max_steps,
            trained=learner.trained - before,
            produced=0,
            updates=learner.updates,
            episodes=0,
            reward=None,
            reward_deviation=None,
            episode_length=None,
            group_reward=None,
            lag_mean=None,
            lag_max=None,
            means=dict(means),
            open_episodes=0,
            oldest=0,
        )
        try:
            append(self._run.directory / "metrics.jsonl", json.dumps(line.plain()).encode() + b"\n")
        except OSError as error:  # the weights matter more
            logs.get().warning("not_written", what="an interval", error=str(error), notice=True)
        losses = {name.removeprefix("Losses/"): round(one, 4) for name, one in means.items() if "Loss" in name}
        logs.get().info("interval", behavior=self._name, step=learner.trained, **losses, notice=True)
