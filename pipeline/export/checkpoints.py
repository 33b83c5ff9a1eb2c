"""Trained policies as files for other programs: ONNX for a game, two forms for PyTorch, or weights alone.

A file is written only after what is to be in it has been loaded, run and compared with the network: whatever goes
wrong, an earlier export of the same name stays as it is, and a wrong one is never seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal, get_args

from sparring.pipeline.export import program as program
from sparring.pipeline.export.check import Model, compare
from sparring.pipeline.export.policy import ExportError, Tensors, TrainedPolicy, require_packages, trained_policy
from sparring.pipeline.files import write_atomically
from sparring.pipeline.learning.checkpoints import Checkpoint

__all__ = ["FORMATS", "SUFFIXES", "ExportError", "ExportResult", "Format", "export"]

Format = Literal["onnx", "torchscript", "torch_export", "safetensors"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)

SUFFIXES: Final[dict[Format, str]] = {
    "onnx": ".onnx",
    "torchscript": ".pt",
    "torch_export": ".pt2",
    "safetensors": ".safetensors",
}
"""Of the files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """An export that was written.

    Attributes:
        paths: its files, all the same.
        size: bytes of each.
        difference: the largest between it and the network; 0 for weights, which are equal.
        seconds: it took, the comparison included.
    """

    paths: tuple[Path, ...]
    size: int
    difference: float
    seconds: float


def export(checkpoint: Checkpoint, paths: Sequence[Path], kind: Format = "onnx") -> ExportResult:
    """Writes the policy of a checkpoint to files.

    Args:
        checkpoint: with the policy.
        paths: of the files; missing folders are made.
        kind: of the files.

    Raises:
        ExportError: the policy cannot be exported, the export does not do what the network does, or a package is
            missing; no file was written.
        CheckpointError: the checkpoint's weights do not fit its description.
        OSError: the disk is full or a folder cannot be written.
    """
    began = time.perf_counter()
    policy = trained_policy(checkpoint)
    content, difference = _WRITERS[kind](policy)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    return ExportResult(
        paths=tuple(paths), size=len(content), difference=difference, seconds=time.perf_counter() - began
    )


def load_onnx(content: bytes) -> Model:
    """Loads a model into onnxruntime, to be run by one thread.

    Raises:
        ExportError: onnxruntime is not installed, or does not take the model.
    """
    require_packages()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's failures have no base of their own
        raise ExportError(
            got=f"an ONNX model that onnxruntime does not load: {error}",
            expected="one that it runs",
            remedy="install the version of onnxruntime that constraints.txt names, or report it",
        ) from error
    names = [one.name for one in session.get_outputs()]

    def run(inputs: Tensors) -> Tensors:
        return dict(zip(names, session.run(names, inputs), strict=True))

    return run


def _onnx(policy: TrainedPolicy) -> tuple[bytes, float]:
    require_packages()
    from sparring.pipeline.export.onnx import onnx_model

    content = onnx_model(policy)
    return content, compare(policy, load_onnx(content))


def _torchscript(policy: TrainedPolicy) -> tuple[bytes, float]:
    content = program.torchscript(policy)
    return content, compare(policy, program.load_torchscript(content))


def _program(policy: TrainedPolicy) -> tuple[bytes, float]:
    content = program.torch_program(policy)
    return content, compare(policy, partial(program.run_program, content))


def _weights(policy: TrainedPolicy) -> tuple[bytes, float]:
    return program.weights_file(policy), 0.0


_WRITERS: Final[dict[Format, Callable[[TrainedPolicy], tuple[bytes, float]]]] = {
    "onnx": _onnx,
    "torchscript": _torchscript,
    "torch_export": _program,
    "safetensors": _weights,
}
