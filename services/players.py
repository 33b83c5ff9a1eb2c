"""Players from checkpoints: of a tournament, and opponents from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from pipeline.coordination.ghosts import OPPONENTS_FILE, PLAYERS_FOLDER
from pipeline.coordination.snapshots import Snapshots
from pipeline.errors import CheckpointError, SettingsError
from pipeline.files import write_atomically
from pipeline.learning.checkpoints import Checkpoint, CheckpointFolder, load
from pipeline.messages.service import PolicyWeights
from pipeline.settings import Settings

_ACTOR: Final = "actor."


def checkpoints_of(directory: Path, behavior: str) -> list[Path]:
    """The checkpoints of a behavior in the folder of a run, the oldest first.

    Raises:
        SettingsError: there is none.
    """
    paths = CheckpointFolder(directory.absolute(), behavior).newest_first()[::-1]
    if not paths:
        raise SettingsError(
            f"got no checkpoint of {behavior} in {directory}; expected one at least; train it first, or name a run "
            "with the same behaviors"
        )
    return paths


def load_player(path: Path) -> Checkpoint:
    """A checkpoint that is to play.

    Raises:
        SettingsError: it is damaged, or not there.
    """
    try:
        return load(path)
    except (OSError, CheckpointError) as error:
        raise SettingsError(f"got the checkpoint {path}, which can not be played: {error}") from error


def actor_of(checkpoint: Checkpoint) -> PolicyWeights:
    """The part of a checkpoint that acts."""
    return PolicyWeights(
        behavior=checkpoint.behavior,
        version=checkpoint.version,
        arrays={
            name.removeprefix(_ACTOR): array for name, array in checkpoint.weights.items() if name.startswith(_ACTOR)
        },
        trained=checkpoint.trained,
        network=json.dumps(checkpoint.description["network_settings"]),
    )


def write(directory: Path, players: Sequence[Mapping[str, PolicyWeights]]) -> None:
    """Puts players where coordination looks for them, numbered from 1.

    Args:
        directory: of the run that they play in.
        players: weights by behavior name.
    """
    folder = Snapshots(directory / PLAYERS_FOLDER)
    for number, player in enumerate(players, 1):
        for name, weights in player.items():
            folder.save(replace(weights, behavior=name, version=number))


def write_opponents(directory: Path, settings: Settings) -> None:
    """Puts the opponents from elsewhere that self-play asks for into the folder of a run.

    Those of an earlier session keep their numbers; one that is not asked for any more is not drawn again.

    Raises:
        SettingsError: a checkpoint is damaged, not there, or of another behavior.
    """
    folder, path = Snapshots(directory / PLAYERS_FOLDER), directory / OPPONENTS_FILE
    known: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    for name, behavior in settings.behaviors.items():
        if behavior.self_play is None:
            continue
        own = known[name] = dict.fromkeys(known.get(name, ()), 0.0)
        for opponent in behavior.self_play.opponents:
            paths = _expanded(Path(opponent.checkpoint), name)
            for one in paths:
                checkpoint = load_player(one)
                label = f"{one.parent.parent.name}/{one.name}"
                own[label] = opponent.weight / len(paths)
                folder.save(replace(actor_of(checkpoint), behavior=name, version=list(own).index(label) + 1))
    if any(known.values()):
        write_atomically(path, json.dumps(known, indent=2).encode())


def _expanded(path: Path, behavior: str) -> list[Path]:
    """The checkpoint at `path`, or all that are in it: a folder of checkpoints, or that of a run."""
    if (path / "state.json").exists():
        return [path.absolute()]
    for folder in (path, path / behavior):
        found = sorted(one.parent for one in folder.glob("*/state.json"))
        if found:
            return [one.absolute() for one in found]
    raise SettingsError(
        f"got {path} under self_play.opponents of {behavior}, which holds no checkpoint; expected the folder of one, "
        "or of several; correct the path"
    )
