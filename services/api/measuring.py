"""Measures and records from Python what policies do: `sparring evaluate`, `tournament` and `record`, as functions."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Unpack

from typing_extensions import TypedDict

from sparring.pipeline.errors import BAD_INPUT, ServiceError, SettingsError
from sparring.pipeline.files import Json
from sparring.services.api.arguments import checked
from sparring.services.api.runs import Config, options_of, without_file, written
from sparring.services.process.hosting import SPARRING
from sparring.services.process.lifeline import ending_with_caller

_END_S: Final = 30.0
"""Time for a command to end in order."""


class PlayOptions(TypedDict, total=False):
    """Further arguments of `evaluate` and `tournament`, which are options of these commands.

    Attributes:
        deterministic: act with the most likely actions.
        seed: of simulators and sampling; None for a random one.
        timeout_s: seconds after which it gives up (3600).
        results_dir: where a run is found by its id (`results`).
        in_process: all services in one process.
    """

    deterministic: bool
    seed: int | None
    timeout_s: float
    results_dir: str | Path
    in_process: bool


@checked
def evaluate(
    run: str | Path,
    *,
    episodes: int = 100,
    checkpoints: Mapping[str, str] | None = None,
    **options: Unpack[PlayOptions],
) -> dict[str, Json]:
    """Plays episodes with the checkpoints of a run, and returns the content of `evaluation.json`.

    Args:
        run: folder of the run, or its id.
        episodes: of each behavior.
        checkpoints: name of a checkpoint's folder by behavior; the newest of the others.
        options: those of `PlayOptions`.

    Raises:
        SettingsError: the run, a checkpoint or an argument is invalid.
        ServiceError: not all episodes were played.
    """
    words = ["evaluate", _name(run), "--episodes", str(episodes)]
    words += [word for name, one in (checkpoints or {}).items() for word in ("--checkpoint", f"{name}={one}")]
    return _measured(words, options)


@checked
def tournament(
    runs: str | Path | Sequence[str | Path],
    *,
    matches: int = 100,
    checkpoints: int = 1,
    untrained: bool = False,
    mirror: bool = False,
    **options: Unpack[PlayOptions],
) -> dict[str, Json]:
    """Lets trained policies play against each other, and returns the content of `tournament.json`.

    Args:
        runs: folder of a run, or its id; or several.
        matches: of each pair.
        checkpoints: of each run, evenly spread; 1 is the newest.
        untrained: a player has the first run's initial weights.
        mirror: each player also plays against itself.
        options: those of `PlayOptions`.

    Raises:
        SettingsError: a run or an argument is invalid.
        ServiceError: not all matches were played.
    """
    named = [runs] if isinstance(runs, str | Path) else runs
    words = ["tournament", *map(_name, named), "--matches", str(matches), "--checkpoints", str(checkpoints)]
    words += options_of({"untrained": untrained, "mirror": mirror})
    return _measured(words, options)


@checked
def record(
    config: Config,
    overrides: Mapping[str, Json] | None = None,
    *,
    policy: str | Path | None = None,
    results_dir: str | Path | None = None,
    script: str | None = None,
    episodes: int = 20,
    out: str | Path = "demos",
    seed: int | None = None,
    deterministic: bool = False,
    force: bool = False,
) -> list[Path]:
    """Records episodes of a simulator as demonstrations, and returns the files.

    Args:
        config: a configuration file, or its content; of its simulators the first is started.
        overrides: in place of what it says, by dotted key.
        policy: folder of a checkpoint or run that acts, or the id of a run.
        results_dir: where a run is found by its id (`results`).
        script: name of the simulator's own script that acts; one of the two is needed.
        episodes: of each behavior.
        out: folder for the files.
        seed: of simulator and sampling; None for a random one.
        deterministic: act with the most likely actions.
        force: replace files that exist.

    Raises:
        SettingsError: the configuration or an argument is invalid.
        ServiceError: not all episodes were recorded.
    """
    words = ["--episodes", str(episodes), "--out", str(out)]
    words += options_of({"policy": policy, "results_dir": results_dir, "script": script, "seed": seed})
    words += options_of({"deterministic": deterministic, "force": force})
    with written(config, overrides) as given:
        text = _output(["record", *given, *words])
    before = f"; {Path(out)}{os.sep}"
    return [Path(out, line.rpartition(before)[2]) for line in text.split("\n") if before in line]


def _name(run: str | Path) -> str:
    """Returns a run as a command line has it; a name that begins with - would be an option."""
    return str(Path(run).absolute()) if Path(run).exists() else f"./{run}" if str(run).startswith("-") else str(run)


def _measured(words: list[str], options: PlayOptions) -> dict[str, Json]:
    """Runs a command whose last line names a file of JSON, and returns its content."""
    named = {key.removesuffix("_s"): value for key, value in options.items()}
    return dict(json.loads(Path(_output([*words, *options_of(named)]).rstrip("\n").split("\n")[-1]).read_bytes()))


def _output(words: Sequence[str]) -> str:
    """Returns what a command prints. It ends with this process, which waits for it meanwhile.

    Raises:
        SettingsError: it refuses its arguments.
        ServiceError: it fails.
    """
    with tempfile.TemporaryFile("w+") as errors, ending_with_caller() as lifeline:
        with subprocess.Popen(
            [*SPARRING, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,
            **lifeline,
        ) as command:
            try:
                printed: str = command.communicate()[0]
            except BaseException:  # as an interrupt, with which it ends in order
                command.terminate()
                try:
                    with suppress(subprocess.TimeoutExpired):
                        command.wait(_END_S)
                finally:
                    command.kill()
                raise
        errors.seek(0)
        text = without_file(errors.read().strip())
    if command.returncode == BAD_INPUT:
        raise SettingsError(text.removeprefix("sparring: "))
    if command.returncode:
        raise ServiceError(f"{words[0]} ended with status {command.returncode}:\n{text}\n{printed}".rstrip())
    return printed
