"""Shows what a configuration would run, or everything that is wrong with it: `sparring check CONFIG`.

consumes      a YAML file
produces      a summary, or one line for each problem
waits for     nothing
unblocked by  nothing
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparring.pipeline.demonstrations.episodes import RecordingError
from sparring.pipeline.demonstrations.library import files_of, read_any
from sparring.pipeline.errors import FAILED, SettingsError
from sparring.pipeline.learning.settings import Hyperparameters
from sparring.pipeline.monitoring.logs import printable
from sparring.pipeline.settings import (
    Settings,
    SimulatorSettings,
    no_device,
    not_here,
    read,
    started_by_hand,
    without_effect,
)
from sparring.pipeline.settings.model import BehaviorSettings
from sparring.services.commands import tryout
from sparring.services.commands.runs import add_config, add_insecure, add_ray, connect, not_on_a_cluster
from sparring.services.process.encryption import exposed, keys_missing, keys_unusable, long_paths, unprotected

_MODES = {
    "overlap": "one buffer is collected while the last one trains",
    "lockstep": "collecting and training take turns; the same seed gives the same weights",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of `sparring check`."""
    add_config(parser)
    add_insecure(parser)
    add_ray(parser)


def run(args: argparse.Namespace) -> int:
    """Checks a file.

    Args:
        args: as `add_arguments` declares them.

    Returns:
        0 if the file is valid and this machine has all that it names, else 1.
    """
    try:
        loaded = read(args.config, assigned=args.assigned)
    except SettingsError as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        return FAILED
    settings = loaded.settings
    if problems := [*exposed(settings, insecure=args.insecure), *keys_unusable(settings), *long_paths(settings)]:
        sys.stderr.writelines(f"{args.config}: {problem}\n" for problem in problems)
        return FAILED
    if args.ray is not None:
        return _check_cluster(args, settings)
    described = [*tryout.described(args.config, loaded, args.assigned)]
    described += [*unnamed(settings, described)]
    lines = [*summary(settings, insecure=args.insecure), *(f"notice: {notice}" for notice in loaded.notices)]
    missing = any(line.startswith(("not found: ", tryout.REFUSED)) for line in [*lines, *described])
    verdict = "it cannot run here" if missing else "valid"
    sys.stdout.write(printable("\n".join([f"{args.config}: {verdict}", *lines, *described])) + "\n")
    return FAILED if missing else 0


def _check_cluster(args: argparse.Namespace, settings: Settings) -> int:
    """Shows where a cluster would run the parts of a run; returns as `run`.

    Raises:
        SettingsError: no cluster can be used, or something has no room.
    """
    if lines := [*not_on_a_cluster(settings, in_process=False)]:
        sys.stderr.writelines(f"{args.config}: {line}\n" for line in lines)
        return FAILED
    placement = settings.pipeline.placement.model_copy(update={"wait_s": 0.0})  # a check asks for no new nodes
    settings = settings.model_copy(update={"pipeline": settings.pipeline.model_copy(update={"placement": placement})})
    with connect(args.ray, settings) as cluster:
        sys.stdout.write("\n".join([f"{args.config}: valid", *cluster.described()]) + "\n")
    return 0


def summary(settings: Settings, *, insecure: bool = False) -> Iterator[str]:
    """Describes what would run, line by line."""
    yield f"mode: {settings.mode}: {_MODES[settings.mode]}"
    for name, behavior in settings.behaviors.items():
        yield f"behavior {name}: {_behavior(behavior)}, at most {settings.step_budget(behavior):,} in flight"
    if settings.unnamed is not None:
        other = "any other behavior" if settings.behaviors else "any behavior"
        yield f"{other} that a simulator names: {_behavior(settings.unnamed)}"
    for simulator in settings.launched:
        yield f"simulator: {_simulator(simulator)}"
    for line in started_by_hand(settings):
        yield f"notice: {line}"
    if not settings.launched:
        yield f"simulators: none to launch; waits for them at {settings.pipeline.address}"
    for line in (*not_here(settings), *unreadable(settings), *missing_players(settings), *keys_missing(settings)):
        yield f"not found: {line}"
    if refused := no_device(settings):
        yield f"{tryout.REFUSED}{refused}"
    for line in without_effect(settings):
        yield f"without effect: {line}"
    for line in unprotected(settings, insecure=insecure):
        yield f"warning: {line}"


def unnamed(settings: Settings, described: Sequence[str]) -> Iterator[str]:
    """Yields a warning of behaviors that no simulator names, where all simulators are described.

    Args:
        settings: of the run.
        described: what the simulators are like, as `tryout.described` yields it.
    """
    unseen = any(one.name in (None, "unity", "godot") for one in settings.launched)
    if unseen or any(line.startswith(tryout.REFUSED) for line in described):
        return
    ids = (line.strip().partition(": ")[0].split(", ") for line in described if line.startswith("  "))
    named = {one.partition("?")[0] for some in ids for one in some}
    if named and (missing := [name for name in settings.behaviors if name not in named]):
        yield (
            f"warning: behaviors {', '.join(missing)}: no simulator names them at its start (but "
            f"{', '.join(sorted(named))}), and the run does not end without them; correct the names, or remove them"
        )


def unreadable(settings: Settings) -> Iterator[str]:
    """Lists folders of environments and demonstrations that cannot be read, a line for each.

    Whether demonstrations fit a simulator is checked in the run.
    """
    for folder in settings.pipeline.python_path:
        if not Path(folder).is_dir():
            yield f"pipeline.python_path: {folder}, which is no folder; relative ones are relative to the configuration"
    for section, behavior in settings.sections.items():
        gail, cloning = behavior.reward_signals.gail, behavior.behavioral_cloning
        each = (("reward_signals.gail", gail), ("behavioral_cloning", cloning), ("offline", behavior.offline))
        for key, demonstrations in each:
            if demonstrations is None:
                continue
            try:
                for file in files_of(Path(demonstrations.demo_path)):
                    read_any(file, demonstrations.demo_actions)
            except RecordingError as error:
                yield f"{section}.{key}.demo_path: {error}"


def missing_players(settings: Settings) -> Iterator[str]:
    """Lists the initial checkpoints and opponents that do not exist or are damaged, a line for each."""
    behaviors, initial = settings.behaviors.values(), settings.checkpoint_settings.initialize_from
    if initial or any(one.init_path or (one.self_play and one.self_play.opponents) for one in behaviors):
        from sparring.services.commands.players import missing  # zmq and anyio: most files name no checkpoint

        yield from missing(settings)


def _behavior(behavior: BehaviorSettings) -> str:
    parameters = behavior.hyperparameters
    passes = f"{parameters.num_epoch} x " if isinstance(parameters, Hyperparameters) else ""
    return (
        f"{behavior.trainer_type}, {behavior.max_steps:,} steps, updates of {parameters.update_steps:,} steps "
        f"in {passes}minibatches of {parameters.batch_size:,}"
    )


def _simulator(simulator: SimulatorSettings) -> str:
    if simulator.command is not None:
        return f"{simulator.count} x {' '.join(simulator.command)}"
    if simulator.name == "unity":
        build = simulator.options.get("path")
        return f"{simulator.count} x Unity build {build}" if build else "the Unity editor, when Play is pressed"
    options = "".join(f", {key} {value}" for key, value in simulator.options.items())
    areas = "1 area" if simulator.areas == 1 else f"{simulator.areas} areas"
    return f"{simulator.count} x {simulator.name} with {areas}{options}"
