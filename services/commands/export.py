"""`sparring export RUN`: writes trained policies as files for games and other programs."""

import argparse
import sys
from pathlib import Path
from typing import Final

from sparring.pipeline.errors import FAILED, CheckpointError, SettingsError
from sparring.pipeline.export.checkpoints import FORMATS, SUFFIXES, Format, export
from sparring.pipeline.export.layout import ExportError
from sparring.pipeline.learning.checkpoints import CheckpointFolder, load
from sparring.services.commands.runs import add_run, find

_KEPT: Final = "checkpoint-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_run(parser)
    parser.add_argument("--behavior", help="name of one behavior (default: all)")
    parser.add_argument("--checkpoint", metavar="NAME", help="name of a checkpoint's folder (default: the newest)")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="onnx",
        help="onnx for Unity (default), godot for its plugin, torchscript or torch_export, safetensors for weights",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: that of the run)")
    parser.add_argument("--prune", action="store_true", help="remove exports of checkpoints that no longer exist")


def run(args: argparse.Namespace) -> int:
    """Exports a checkpoint of each behavior.

    Returns:
        0 if all were exported, 1 if one could not be.

    Raises:
        SettingsError: there is no such run, behavior or checkpoint, or --out is no folder.
    """
    given = find(args.run, args.results_dir)
    run_folder, out = given.absolute(), args.out or given
    if not out.is_dir() and (out.exists() or out.name.endswith(tuple(SUFFIXES.values()))):
        raise SettingsError(f"got --out {out}, which is no folder; expected one, or a new name; correct it")
    failed = False
    for behavior, checkpoint in _chosen(run_folder, args.behavior, args.checkpoint).items():
        folder = CheckpointFolder(run_folder, behavior)
        try:
            _export(folder, checkpoint, out, args.format, named=args.checkpoint is not None)
        except BrokenPipeError:  # what has read the output has ended
            raise
        except (ExportError, CheckpointError, OSError) as error:
            sys.stderr.write(f"sparring export: {behavior}: {error}\n")
            failed = True
        if args.prune:
            _prune(folder, out)
    return FAILED if failed else 0


def _chosen(directory: Path, behavior: str | None, name: str | None) -> dict[str, Path]:
    """Returns the chosen checkpoint of each chosen behavior, the newest where none is named."""
    behaviors = sorted({path.parent.parent.name for path in directory.glob("[!.]*/*/state.json")})
    there = {one: CheckpointFolder(directory, one).newest_first() for one in behaviors if behavior in (None, one)}
    if not any(there.values()):
        raise SettingsError(
            f"got {directory} without a checkpoint{f' of {behavior!r}' if behavior else ''}; "
            f"expected the folder of a run that has trained{f' one of {behaviors}' if behaviors else ''}; "
            "correct the folder or --behavior, or train first"
        )
    chosen = {one: [path for path in paths if name in (None, path.name)] for one, paths in there.items()}
    if not any(chosen.values()):
        shown = {one: [path.name for path in paths] for one, paths in there.items()}
        raise SettingsError(f"got no checkpoint {name!r} in {directory}; expected one of {shown}; correct --checkpoint")
    return {one: paths[0] for one, paths in chosen.items() if paths}


def _export(folder: CheckpointFolder, path: Path, out: Path, kind: Format, *, named: bool) -> None:
    """Exports a checkpoint: as BEHAVIOR-STEPS where it is named, and as BEHAVIOR where it is the newest."""
    checkpoint = load(path)
    newest = out / f"{folder.behavior}{SUFFIXES[kind]}"
    paths = [newest]
    if named:
        paths = [out / folder.behavior / f"{folder.behavior}-{checkpoint.trained}{SUFFIXES[kind]}"]
        kept = [one for one in folder.newest_first() if one.name.startswith(_KEPT)]
        paths += [newest] if path in (*kept[:1], *folder.newest_first()[:1]) else []
    done = export(checkpoint, paths, kind)
    shown = "  ".join(map(str, done.paths))
    sys.stdout.write(
        f"{folder.behavior}  {checkpoint.trained} steps  {shown}  {done.size} bytes  "
        f"largest difference {done.difference:.2g}  {done.seconds:.2f} s\n"
    )


def _prune(folder: CheckpointFolder, out: Path) -> None:
    """Removes exports whose checkpoint no longer exists."""
    steps = {int(path.name.split("-")[1]) for path in folder.newest_first()}
    for suffix in SUFFIXES.values():
        for path in (out / folder.behavior).glob(f"*{suffix}"):
            stem = path.name.removesuffix(suffix)
            number = stem.removeprefix(f"{folder.behavior}-")
            if stem != number and number.isdecimal() and int(number) not in steps:
                path.unlink(missing_ok=True)
