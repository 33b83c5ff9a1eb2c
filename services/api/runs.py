"""Starts runs from Python and follows them.

A run is a `sparring train` command of its own: it needs no event loop, signal or thread of the caller, so that it works
in a script, a notebook and a test alike. It stops in order when the caller's process ends. Events are read from
the files in its folder, which are the queue of a caller that reads slowly.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Unpack

from typing_extensions import TypedDict

from sparring.pipeline.errors import BAD_INPUT, ServiceError, SettingsError, SparringError, how_ended
from sparring.pipeline.files import DAMAGE, Json, regular, working_folder
from sparring.pipeline.monitoring.events import Event, EventFiles, EventKind, Identity, identity_of, present
from sparring.pipeline.queues.endpoints import private_folder
from sparring.pipeline.settings.document import is_text
from sparring.services.api.arguments import checked
from sparring.services.process.hosting import SAME_SIGNAL_S, SPARRING
from sparring.services.process.lifeline import ending_with_caller

Callback = Callable[[Event], object]
Config = str | Path | Mapping[str, Json]

_POLL_S: Final = 0.1
_WRITTEN: Final = "sparring_given-"
"""Begins the name of the folder in which a configuration is written that was given as data."""
_CALLBACKS_S: Final = 30.0
"""Seconds that the end of a run waits for callbacks."""
_ENDED: Final = "completed", "stopped"
_TERMINATED: Final = -signal.SIGTERM, 128 + signal.SIGTERM
"""Exit statuses of a command that is stopped before it handles signals."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Describes how a run ended.

    Attributes:
        folder: of the run.
        status: `completed`, `stopped`, or what went wrong: `failed`, `stalled` and so on, as in `summary.json`.
        error: what went wrong; "" for nothing.
        behaviors: by name, what `summary.json` says: `steps`, `reward_mean_last100`, `checkpoint`, `step_counts`, ...
    """

    folder: Path
    status: str
    error: str
    behaviors: Mapping[str, Mapping[str, Json]]


class RunFailed(SparringError):
    """A run has neither completed nor been stopped.

    Attributes:
        result: how it ended.
    """

    def __init__(self, result: RunResult, console: str) -> None:
        super().__init__(f"the run in {result.folder} ended as {result.status}: {result.error}\n{console}".rstrip())
        self.result = result


class Run:
    """A Run is a run that `start` has started.

    Iterate over it, with `for` or `async for`, for its events from `start` to the end; several loops may do so. A
    loop that begins late, or reads slowly, misses what the run has removed meanwhile (`pipeline.logs`).

    Attributes:
        folder: of the run.
        callback_errors: what callbacks have raised, by the kind of the event; the run goes on.

    Args:
        folder: of the run.
        process: the command.
        output: file with what it prints.
        callbacks: called with each event, in a thread of the run.
        held: closed when the run and this object have ended.
        former: what the folder held before (`present`).
    """

    def __init__(
        self,
        folder: Path,
        process: "subprocess.Popen[bytes]",
        output: IO[bytes],
        callbacks: Sequence[Callback],
        held: ExitStack,
        former: Mapping[Identity, int],
    ) -> None:
        self.folder = folder
        self.callback_errors: list[tuple[EventKind, BaseException]] = []
        self._process = process
        self._output = output
        self._callbacks = callbacks
        self._former = former
        self._is_stopping = False
        _RUNNING.add(self)
        self._let_go = weakref.finalize(self, held.close)
        self._owner = os.getpid()
        # The thread keeps a run that the caller does not, and calls back at its own pace: the files are its queue.
        self._watcher = threading.Thread(target=self._watch, name=f"run {folder.name}", daemon=True)
        self._watcher.start()

    def __iter__(self) -> Iterator[Event]:
        """Yields each event, and waits for the next one."""
        self._check_owner()
        files = EventFiles(self.folder, self._former)
        while (ended := self._process.poll()) is None:
            yield from files.events()
            time.sleep(_POLL_S)
        yield from files.events()
        yield self._end(ended)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Does the same without blocking the event loop, asyncio's or trio's."""
        import anyio

        self._check_owner()
        files = EventFiles(self.folder, self._former)
        while (ended := self._process.poll()) is None:
            for event in files.events():
                yield event
            await anyio.sleep(_POLL_S)
        for event in files.events():
            yield event
        yield self._end(ended)

    def wait(self, timeout_s: float | None = None) -> RunResult:
        """Waits for the end of the run, and then at most 30 s for callbacks that have not returned.

        Raises:
            TimeoutError: it still runs.
            SettingsError: the configuration or an argument cannot be run.
            RunFailed: it has neither completed nor been stopped.
            ServiceError: this process was forked from the one that has started the run.
        """
        self._check_owner()
        began = time.monotonic()
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the run in {self.folder} still runs after {timeout_s:g} s") from None
        left_s = _CALLBACKS_S if timeout_s is None else timeout_s - (time.monotonic() - began)
        if self._watcher is not threading.current_thread():  # a callback waits
            self._watcher.join(max(0.0, min(left_s, _CALLBACKS_S)))
        result = self._result(status)
        if status == BAD_INPUT and result.status == "refused":
            raise SettingsError(result.error)
        if result.status not in _ENDED:
            raise RunFailed(result, self.console())
        return result

    def stop(self) -> None:
        """Asks the run, once, to stop in order: the weights are saved. Returns at once; `wait` waits for the end.

        Raises:
            ServiceError: this process was forked from the one that has started the run.
        """
        self._check_owner()
        self._is_stopping = True
        self.release()  # a signal may be lost while the command loads, and a second one would end it at once

    def status(self) -> dict[str, Json]:
        """Returns the present numbers, the content of `status.json`; nothing before the first ones."""
        try:
            return dict(json.loads(regular(self.folder / "status.json").read_bytes()))
        except DAMAGE:
            return {}

    def console(self) -> str:
        """Returns what the command has printed so far. Raises as `stop`."""
        self._check_owner()
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def _watch(self) -> None:
        for event in self if self._callbacks else ():
            for call in self._callbacks:
                try:
                    call(event)
                except BaseException as error:
                    self.callback_errors.append((event.kind, error))
        self._process.wait()
        self.release()

    def release(self) -> None:
        """Closes this process's end of the pipe with which the run ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def forget(self) -> None:
        """Closes what this process holds of the run, which belongs to the process from which this one was forked."""
        self.release()
        self._let_go()

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise ServiceError(
                f"got the run in {self.folder} in a process forked from the one that has started it, which alone can "
                "follow and stop it; expected a call in that process; make it there, or start the run here"
            )

    def _end(self, status: int) -> Event:
        result = self._result(status)
        return Event("end", {"status": result.status, "error": result.error})

    def _result(self, status: int) -> RunResult:
        path = self.folder / "summary.json"
        try:
            if status == BAD_INPUT or (status and identity_of(path.stat()) in self._former):
                raise FileNotFoundError(path)  # it is of another run, or of an earlier session
            summary = json.loads(regular(path).read_bytes())
            return RunResult(self.folder, summary["status"], summary.get("error") or "", summary["behaviors"])
        except DAMAGE:  # it has not begun
            if self._is_stopping and status in _TERMINATED:
                return RunResult(self.folder, "stopped", "", {})
            lines = [line for line in self.console().splitlines() if line]
            error = "\n".join(lines[-20:]).removeprefix("sparring: ")
            if status < 0 or not error:  # what it has printed does not say that something has killed it
                error = f"{how_ended(status)}\n{error}".rstrip()
            return RunResult(self.folder, "refused" if status == BAD_INPUT else "failed", without_file(error), {})


_RUNNING: Final[weakref.WeakSet[Run]] = weakref.WeakSet()
"""Runs of this process."""


def _forget_all() -> None:
    """A process that is forked from this one, by multiprocessing for example, must not keep its runs."""
    for run in _RUNNING:
        run.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


class RunOptions(TypedDict, total=False):
    """Further arguments of `start` and `train`, which are options of `sparring train`.

    Attributes:
        run_id: name of the run's folder; None for the time.
        results_dir: where runs are kept (`results`).
        seed: of the run; None for that of the configuration.
        resume: go on with the run in its folder.
        force: replace the run in its folder.
        in_process: all services in one process.
        insecure: listen without keys where others can connect.
        ray: address of a Ray cluster; "" for the one that the environment names, None for this machine alone.
    """

    run_id: str | None
    results_dir: str | Path
    seed: int | None
    resume: bool
    force: bool
    in_process: bool
    insecure: bool
    ray: str | None


@checked
def start(
    config: Config,
    overrides: Mapping[str, Json] | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    in_order: bool = True,
    **options: Unpack[RunOptions],
) -> Run:
    """Starts a run, and returns at once.

    Args:
        config: a configuration file, or its content.
        overrides: in place of what it says, by dotted key: `{"behaviors.Ball.hyperparameters.beta": 0.01}`.
        callbacks: called with each event, in a thread; an exception is kept in `callback_errors`.
        in_order: the run stops in order when this process ends; False: it ends at once, and nothing is saved. On Linux
            it then ends with the thread that has started it.
        options: those of `RunOptions`.

    Raises:
        SettingsError: an argument has another type.
    """
    folder = Path(options.get("results_dir") or "results")
    name = options.get("run_id") or f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    words = ["--run-id", name, "--results-dir", str(folder), "--until-eof"]
    words += options_of({key: value for key, value in options.items() if key not in ("run_id", "results_dir")})
    former = present(folder / name)
    with ExitStack() as held:
        output = held.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(
            [*SPARRING, "train", *held.enter_context(written(config, overrides)), *words],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            process_group=0,  # Ctrl-C is for the caller, who decides whether the run stops
            **({} if in_order else held.enter_context(ending_with_caller())),
        )
        return Run((folder / name).absolute(), process, output, callbacks, held.pop_all(), former)


@checked
def train(
    config: Config,
    overrides: Mapping[str, Json] | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Unpack[RunOptions],
) -> RunResult:
    """Trains, and returns when the run has ended; Ctrl-C stops it in order. Arguments are those of `start`.

    Raises:
        SettingsError: the configuration or an argument cannot be run.
        RunFailed: the run has neither completed nor been stopped.
    """
    run = start(config, overrides, callbacks, **options)
    try:
        return run.wait()
    except KeyboardInterrupt:
        run.stop()
        _wait_for_end(run, time.monotonic())
        raise


def _wait_for_end(run: Run, interrupted_at: float) -> None:
    """Waits for the end of a run that was interrupted, once more where the same interrupt comes a second time."""
    try:
        run.wait()
    except KeyboardInterrupt:
        if time.monotonic() - interrupted_at > SAME_SIGNAL_S:
            raise
        _wait_for_end(run, interrupted_at)


def options_of(values: Mapping[str, object]) -> list[str]:
    """Returns the words of a command line for options by name: none for None and False, a flag for True."""
    words = []
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        if value is not None and value is not False:
            words.append(option if value is True else f"{option}={value}")
    return words


@contextmanager
def written(config: Config, overrides: Mapping[str, Json] | None) -> Iterator[list[str]]:
    """Writes the content of a configuration to a file meanwhile; yields the words of a command line.

    Raises:
        SettingsError: something is no data of JSON.
    """
    assigned = [word for key, value in (overrides or {}).items() for word in ("--set", f"{key}={_json(value)}")]
    if wrong := [word for word in assigned if not is_text(word)]:
        raise SettingsError(f"got {wrong[0]!r:.100}; expected a key in UTF-8 without NUL; correct it")
    here = str(working_folder())
    if not isinstance(config, Mapping):
        yield [str(Path(config).absolute()), *assigned]  # it might begin with -
        return
    content, pipeline = dict(config), config.get("pipeline") or {}
    if isinstance(pipeline, Mapping) and isinstance(own := pipeline.get("python_path", ()), list | tuple):
        content["pipeline"] = {**pipeline, "python_path": [*own, here]}
    text = _json(content)
    with private_folder(_WRITTEN, shutil.rmtree) as folder:
        path = folder / "config.yaml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")  # JSON is YAML
        yield [str(path), *assigned]


def without_file(error: str) -> str:
    """Returns an error of a configuration that was given as data, without the file and line where it was `written`."""
    return re.sub(rf"\S*{_WRITTEN}\w+/config\.yaml(:\d+)?", "the configuration", error)


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError) as error:
        try:
            got = f"{value!r:.200}"
        except ValueError:  # of a number of thousands of digits
            got = f"a {type(value).__name__}"
        raise SettingsError(f"got {got} ({error}); expected data as in a configuration; correct it") from error


def _plain(value: Any) -> Json:
    """Returns a number or an array of numpy, or a path, as JSON data."""
    return str(value) if isinstance(value, Path) else value.tolist() if hasattr(value, "tolist") else list(value)
