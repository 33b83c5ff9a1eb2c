"""This module writes trained policies to files for other programs: ONNX, two forms for PyTorch, or weights alone.

A file is written only after its content has been loaded, run and compared with the network: after any failure, an
earlier export of the same name is unchanged, and no wrong one is visible.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from sparring.pipeline.export import program
from sparring.pipeline.export.check import Model, compare
from sparring.pipeline.export.layout import ExportError, Tensors, TrainedPolicy, require_packages, trained_policy
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
"""Suffixes of the files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """Describes a written export.

    Attributes:
        paths: its files, with equal content.
        size: bytes of each.
        difference: the largest between it and the network; 0 for weights, which are equal.
        seconds: duration, including the comparison.
    """

    paths: tuple[Path, ...]
    size: int
    difference: float
    seconds: float


def export(checkpoint: Checkpoint, paths: Sequence[Path], kind: Format = "onnx") -> ExportResult:
    """Writes the policy of a checkpoint to files.

    Args:
        checkpoint: with the policy.
        paths: of the files; missing folders are created.
        kind: format of the files.

    Raises:
        ExportError: the policy cannot be exported, the export differs from the network, or a package is missing; no
            file was written.
        CheckpointError: the checkpoint's weights do not fit its description.
        OSError: the disk is full or a folder cannot be written.
    """
    began = time.perf_counter()
    policy = trained_policy(checkpoint)
    difference = 0.0
    if kind == "safetensors":
        content = program.weights_file(policy)
    else:
        _refuse_previous_action(policy)
        content, model = _WRITERS[kind](policy)
        difference = compare(policy, model)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    return ExportResult(
        paths=tuple(paths), size=len(content), difference=difference, seconds=time.perf_counter() - began
    )


def _refuse_previous_action(policy: TrainedPolicy) -> None:
    """Refuses a policy that needs an input that games do not provide."""
    if policy.network.previous_action:
        raise ExportError(
            got=f"{policy.behavior}, trained with network_settings.previous_action",
            expected="a policy that reads only observations, masks and memory, which are all that a game provides",
            remedy="train it with network_settings.memory instead, or export its weights as safetensors",
        )


def load_onnx(content: bytes) -> Model:
    """Loads a model into onnxruntime, to be run by one thread.

    Raises:
        ExportError: onnxruntime is not installed, or rejects the model.
    """
    require_packages()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no base class of their own
        raise ExportError(
            got=f"an ONNX model that onnxruntime does not load: {error}",
            expected="a model that it can run",
            remedy="install the version of onnxruntime that constraints.txt names, or report it",
        ) from error
    names = [one.name for one in session.get_outputs()]

    def run(inputs: Tensors) -> Tensors:
        return dict(zip(names, session.run(names, inputs), strict=True))

    return run


def _onnx(policy: TrainedPolicy) -> tuple[bytes, Model]:
    require_packages()
    from sparring.pipeline.export.onnx import onnx_model

    content = onnx_model(policy)
    return content, load_onnx(content)


_WRITERS: Final[dict[Format, Callable[[TrainedPolicy], tuple[bytes, Model]]]] = {
    "onnx": _onnx,
    "torchscript": program.torchscript,
    "torch_export": program.torch_program,
}
