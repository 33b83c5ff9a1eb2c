"""This module writes trained policies to files for other programs: ONNX, two forms for PyTorch, or weights alone.

A file is written only after its content has been loaded, run and compared with the network: after any failure, an
earlier export of the same name is unchanged, and no wrong one is visible.

The forms for PyTorch, which need nothing of this package, are TorchScript and a `torch.export` program.
`torch.jit.load` and libtorch read only the first. PyTorch calls it deprecated and names `torch.export` as its
successor, but still supports all of it.
"""

import io
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import torch
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors
from torch import Tensor, nn

from sparring.pipeline.export import layout
from sparring.pipeline.export.layout import ExportError, Model, Tensors, TrainedPolicy, require_packages, trained_policy
from sparring.pipeline.files import write_atomically
from sparring.pipeline.learning.checkpoints import Checkpoint
from sparring.pipeline.networks.distributions import FORBIDDEN
from sparring.pipeline.networks.perceptron import FUNCTIONS

Format = Literal["onnx", "godot", "torchscript", "torch_export", "safetensors"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)

SUFFIXES: Final = {
    "onnx": ".onnx",
    "godot": ".godot.onnx",
    "torchscript": ".pt",
    "torch_export": ".pt2",
    "safetensors": ".safetensors",
}
"""Suffixes of the files."""

WEIGHTS_FORMAT: Final = "1"
_ROWS: Final = 2  # of the example: torch.export treats sizes of 0 and 1 as fixed


class ExportResult(NamedTuple):
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
        content = weights_file(policy)
    else:
        _refuse(policy, kind)
        content, model = _WRITERS[kind](policy)
        difference = layout.compare(policy, model, godot=kind == "godot")
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    return ExportResult(tuple(paths), len(content), difference, seconds=time.perf_counter() - began)


def load_onnx(content: bytes) -> Model:
    """Loads a model into onnxruntime, to be run by one thread.

    Raises:
        ExportError: onnxruntime rejects the model.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # its import would write a file with an id of the session
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


def _onnx(policy: TrainedPolicy, *, godot: bool = False) -> tuple[bytes, Model]:
    require_packages()
    from sparring.pipeline.export.onnx import godot_model, onnx_model

    content = godot_model(policy) if godot else onnx_model(policy)
    return content, load_onnx(content)


def _refuse(policy: TrainedPolicy, kind: Format) -> None:
    """Refuses a policy that reads what a program that runs the format does not provide."""
    if policy.network.previous_action:
        raise ExportError(
            got=f"{policy.behavior}, trained with network_settings.previous_action",
            expected="a policy that reads only observations, masks and memory, which are all that a game provides",
            remedy="train it with network_settings.memory instead, or export its weights as safetensors",
        )
    kinds = {one.kind for one in policy.spec.observations}
    if kind == "godot" and (policy.memory or kinds != {"vector"}):
        what = "a memory" if policy.memory else f"observations of the kinds {', '.join(sorted(kinds))}"
        raise ExportError(
            got=f"{policy.behavior} with {what}",
            expected="vectors without a memory, which are all that the Godot plugin passes to a model",
            remedy="train it without, or run the format onnx with code of your own",
        )


class Program(nn.Module):
    """Evaluates a policy with the inputs and outputs of the ONNX model, by the same names.

    Args:
        policy: what to run; its actor becomes a part of this module.
    """

    def __init__(self, policy: TrainedPolicy) -> None:
        super().__init__()
        self.actor = policy.actor
        self._actions = policy.spec.actions
        self._observations = len(policy.spec.observations)
        self._facts = {name: torch.from_numpy(values) for name, values in policy.facts.items()}

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns outputs by name, from inputs by name."""
        head, memory = self._head(inputs)
        found = {name: values.clone() for name, values in self._facts.items()}
        if self._actions.continuous:
            found[layout.SAMPLED] = self.actor.continuous(head, sampled=True)
            found[layout.LIKELIEST] = self.actor.continuous(head, sampled=False)
        if self._actions.discrete:
            found |= zip(layout.CHOICES, self._discrete(self.actor.logits(head), inputs[layout.MASKS]), strict=True)
        if memory is not None:
            found[layout.MEMORY_OUT] = memory
        return {name: found[name] for name in layout.OUTPUTS if name in found}

    def _head(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Returns means and logits, and the memory after them."""
        given = [inputs[layout.observation_name(at)] for at in range(self._observations)]
        encoder, body = self.actor.encoder, self.actor.recurrent
        vectors = [given[at] for at in encoder.vectors]
        joined = torch.cat(vectors, 1) if vectors else given[0].new_empty((given[0].shape[0], 0))
        rows = encoder(encoder.prepare((joined, *(given[at] for at in encoder.others))))
        if body is None:
            return self.actor.body(rows), None
        before = inputs[layout.MEMORY_IN][:, 0].chunk(2, 1)
        hidden = FUNCTIONS[body.activation].forward(body.trunk(rows))
        after = torch.lstm_cell(hidden, before, *body.lstm.parameters())
        return body.head(after[0]), torch.cat(after, 1).unsqueeze(1)

    def _discrete(self, logits: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        masked = torch.where(allowed > 0, logits, FORBIDDEN)
        branches = masked.split_with_sizes(list(self._actions.discrete), dim=1)
        sampled = torch.cat([torch.multinomial(one.softmax(1), 1) for one in branches], 1)
        return sampled, torch.cat([one.argmax(1, keepdim=True) for one in branches], 1)


def torchscript(policy: TrainedPolicy) -> tuple[bytes, Model]:
    """Returns the content of a TorchScript file (`.pt`), and the model that is in it."""
    content = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        # PyTorch warns that TorchScript is deprecated, but its users have asked for it by name.
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        # Not strict, because it returns a dictionary; not checked by PyTorch, which would compare sampled actions.
        traced = torch.jit.trace(  # type: ignore[no-untyped-call]
            Program(policy).eval(), (_example(policy),), strict=False, check_trace=False
        )
        torch.jit.save(traced, content)
        loaded = torch.jit.load(io.BytesIO(content.getvalue()))  # type: ignore[no-untyped-call]
    return content.getvalue(), partial(_run, loaded)


def _run(module: nn.Module, inputs: Tensors) -> Tensors:
    with torch.no_grad():
        found = module({name: torch.from_numpy(np.array(one)) for name, one in inputs.items()})
    return {name: one.numpy() for name, one in found.items()}


def _example(policy: TrainedPolicy) -> dict[str, Tensor]:
    return {name: torch.zeros(_ROWS, *shape) for name, shape in policy.inputs.items()}


def torch_program(policy: TrainedPolicy) -> tuple[bytes, Model]:
    """Returns the content of a `torch.export` file (`.pt2`), and the model that is in it."""
    example = _example(policy)
    batch = torch.export.Dim("batch")
    open_sizes = ({name: {0: batch} for name in example},)
    with torch.no_grad():
        program = torch.export.export(Program(policy).eval(), (example,), dynamic_shapes=open_sizes)
    program.example_inputs = None  # otherwise the file would contain them pickled
    content = io.BytesIO()
    torch.export.save(program, content)
    return content.getvalue(), partial(_run, torch.export.load(io.BytesIO(content.getvalue())).module())


def weights_file(policy: TrainedPolicy) -> bytes:
    """Returns the content of a file of weights, with their description as JSON in its metadata.

    Raises:
        ExportError: the content differs when it is read back.
    """
    arrays = policy.actor.arrays()
    described = {
        "format": WEIGHTS_FORMAT,
        "behavior": policy.behavior,
        "steps": str(policy.steps),
        "version": str(policy.version),
        "spec": json.dumps(asdict(policy.spec)),
        "network_settings": policy.network.model_dump_json(),
    }
    content = save_tensors({name: np.asarray(one, order="C") for name, one in arrays.items()}, described)
    again = load_tensors(content)
    if again.keys() != arrays.keys() or any(not np.array_equal(again[name], one) for name, one in arrays.items()):
        raise ExportError(
            got=f"weights of {policy.behavior} that differ when read back from the file",
            expected="equal weights",
            remedy="report it with the run's settings",
        )
    return content


_WRITERS: Final[dict[Format, Callable[[TrainedPolicy], tuple[bytes, Model]]]] = {
    "onnx": _onnx,
    "godot": partial(_onnx, godot=True),
    "torchscript": torchscript,
    "torch_export": torch_program,
}
