"""Players from checkpoints: those of a tournament, and external opponents."""

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sparring.pipeline.coordination.ghosts import PLAYERS_FOLDER, Snapshots
from sparring.pipeline.coordination.opponents import OPPONENTS_FILE, opponents_of
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.files import DAMAGE, Json, copy_folder, regular, write_atomically
from sparring.pipeline.learning.checkpoints import Checkpoint, CheckpointFolder, initial_folder
from sparring.pipeline.messages.state import PolicyWeights
from sparring.pipeline.settings import Settings
from sparring.services.supervision.launch import load_player


def actor_of(checkpoint: Checkpoint) -> PolicyWeights:
    """Returns the actor of a checkpoint."""
    from sparring.pipeline.export.layout import trained_policy  # torch: most runs have no external opponents

    return PolicyWeights(
        behavior=checkpoint.behavior,
        version=checkpoint.version,
        arrays=trained_policy(checkpoint).actor.arrays(),
        trained=checkpoint.trained,
        network=json.dumps(checkpoint.description["network_settings"]),
        trainer=checkpoint.description["trainer"],
    )


def write(directory: Path, players: Sequence[Mapping[str, PolicyWeights]]) -> None:
    """Writes players to the folder from which coordination reads them, numbered from 1.

    Args:
        directory: of the run that they play in.
        players: weights by behavior name.
    """
    folder = Snapshots(directory / PLAYERS_FOLDER)
    for number, player in enumerate(players, 1):
        for name, weights in player.items():
            folder.save(replace(weights, behavior=name, version=number))


def write_opponents(directory: Path, settings: Settings, names: Collection[str]) -> None:
    """Writes the external opponents of self-play into the folder of a run.

    Those of an earlier session keep their numbers; one that is no longer asked for is not sampled again.

    Args:
        directory: of the run.
        settings: of the run.
        names: of the behaviors.

    Raises:
        SettingsError: a checkpoint is damaged, does not exist, or is of another behavior.
    """
    folder, path = Snapshots(directory / PLAYERS_FOLDER), directory / OPPONENTS_FILE
    opponents_of(directory)  # refuses what is damaged
    known: dict[str, dict[str, Json]] = json.loads(path.read_text()) if path.exists() else {}
    for name, behavior in settings.behaviors.items():
        if behavior.self_play is None or name not in names:
            continue
        own = known.setdefault(name, {})
        for former in own.values():
            former["weight"] = 0.0
        for opponent in behavior.self_play.opponents:
            if opponent.scripted is not None:
                entry = {"weight": opponent.weight, "script": opponent.scripted, "path": ""}
                own[f"simulator/{opponent.scripted}"] = entry
                continue
            paths = _expanded(Path(opponent.checkpoint or ""), name, "self_play.opponents")
            for one in paths:
                checkpoint = load_player(one)
                label = f"{one.parent.parent.name}/{one.name}"
                if own.get(label, {}).get("path", str(one)) != str(one):  # another run folder of the same name
                    label = str(one)
                own[label] = {"weight": opponent.weight / len(paths), "script": "", "path": str(one)}
                folder.save(replace(actor_of(checkpoint), behavior=name, version=list(own).index(label) + 1))
    if any(known.values()):
        write_atomically(path, json.dumps(known, indent=2).encode())


def missing(settings: Settings) -> Iterator[str]:
    """Lists the initial checkpoints and opponents that do not exist or are damaged, a line for each."""
    kept = settings.checkpoint_settings
    if kept.initialize_from is not None and not (run := Path(kept.results_dir) / kept.initialize_from).is_dir():
        yield f"got {run} under initialize_from, which is no folder; expected that of a run; correct the name"
    for name, behavior in settings.behaviors.items():
        opponents = () if behavior.self_play is None else behavior.self_play.opponents
        named = [(one.checkpoint, "self_play.opponents") for one in opponents if one.checkpoint is not None]
        for path, where in [*named, (behavior.init_path, "init_path")]:
            try:
                if path is not None:
                    load_player(_expanded(Path(path), name, where)[-1])
            except SettingsError as error:
                yield str(error)


def copy_initial(directory: Path, settings: Settings, names: Collection[str]) -> tuple[str, ...]:
    """Copies the initial checkpoint of each behavior into the folder of a run: `init_path`, or `initialize_from`.

    Args:
        directory: of the run.
        settings: of the run.
        names: of the behaviors.

    Returns:
        A line for each behavior that the run of `initialize_from` does not have.

    Raises:
        SettingsError: a checkpoint is damaged, or there is none.
    """
    kept = settings.checkpoint_settings
    notes = []
    for name in names:
        if (initial := settings.behaviors[name].init_path) is not None:
            path = _expanded(Path(initial), name, "init_path")[-1]
        elif kept.initialize_from is None:
            continue
        else:
            run = Path(kept.results_dir) / kept.initialize_from
            if run.is_dir() and not CheckpointFolder(run, name).newest_first():
                notes.append(f"{name} starts from fresh weights: {run} has no checkpoint of it")
                continue
            path = _expanded(run / name, name, "initialize_from")[-1]
        load_player(path)
        copy_folder(path, initial_folder(directory, name))
    return tuple(notes)


def check_networks(directory: Path, settings: Settings, names: Collection[str]) -> None:
    """Checks that trainer and networks of the newest checkpoints are those of the settings with which a run goes on.

    Args:
        directory: of the run.
        settings: of the run.
        names: of the behaviors.

    Raises:
        SettingsError: one of them differs.
    """
    for name in names:
        behavior = settings.behaviors[name]
        network = behavior.network_settings.model_dump(mode="json", exclude={"deterministic"})
        own = {f"network_settings.{key}": value for key, value in network.items()}
        own |= {"trainer_type": behavior.trainer_type, "reward_signals": list(behavior.reward_signals.named())}
        own["hyperparameters.shared_critic"] = behavior.hyperparameters.shares_critic
        for path in CheckpointFolder(directory, name).newest_first()[:1]:
            saved: dict[str, Json] = {}
            with contextlib.suppress(*DAMAGE):  # whoever loads it reports damage
                described = json.loads(regular(path / "state.json").read_bytes())["description"]
                saved |= {f"network_settings.{key}": value for key, value in described["network_settings"].items()}
                saved["trainer_type"], saved["reward_signals"] = described["trainer"], described["signals"]
                saved["hyperparameters.shared_critic"] = described["shared_critic"]
            for key in sorted(own.keys() & saved.keys()):
                if own[key] != saved[key]:
                    raise SettingsError(
                        f"got behaviors.{name}.{key} {own[key]} with --resume; expected {saved[key]}, "
                        f"with which {path} was trained; write that, or start a new run"
                    )


def _expanded(path: Path, behavior: str, where: str) -> list[Path]:
    """Returns the checkpoint at `path`, or those in it, the newest last: in a folder of checkpoints, or of a run."""
    if path.suffix in (".pt", ".onnx", ".nn"):
        raise SettingsError(
            f"got {path} under {where} of {behavior}, a file of another program; expected the folder of a checkpoint "
            "of sparring; train once from fresh weights (a .pt file is a pickle, which could run anything)"
        )
    if (path / "state.json").exists():
        return [path.absolute()]
    for folder in (path, path / behavior):
        found = sorted(one.parent for one in folder.glob("*/state.json"))
        if found:
            return [one.absolute() for one in found]
    raise SettingsError(
        f"got {path} under {where} of {behavior}, which holds no checkpoint; expected the folder of one, "
        "or of several; correct the path"
    )
