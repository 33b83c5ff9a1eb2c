"""This module moves data between arrays, the CPU, and the device that networks are trained on.

Parameters, their optimizer state and, during an update, the whole batch are on the device; a minibatch is selected
there. All else stays on the CPU: segments, statistics of observations, returns and random numbers. All
transfers go through the functions here; one seed gives the same initial weights and the same order on every device.
Reading from the device waits for all that it computes, so an update reads only before its first and after its last
minibatch.

    python -m sparring.pipeline.networks.device cuda KEY    # exit status 0, or why KEY cannot be that, as JSON
"""

import json
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from sparring.pipeline.errors import CheckpointError
from sparring.pipeline.networks.arrays import Arrays
from sparring.pipeline.networks.settings import Unsupported
from sparring.pipeline.specs import Array

CPU: Final = torch.device("cpu")

T = TypeVar("T")


Device = torch.device


def configure_torch(threads: int, precision: str) -> None:
    """Sets the number of threads that an operation may use on the CPU, and the precision of products of matrices.

    Args:
        threads: number of threads.
        precision: PyTorch's name of it: `highest` is float32; `high` is TF32 and `medium` bfloat16, where a device has
            fast products of these. Parameters, gradients and the optimizer's state remain float32.
    """
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def torch_configuration() -> tuple[int, str]:
    """Returns the arguments of `configure_torch` that are in force."""
    return torch.get_num_threads(), torch.get_float32_matmul_precision()


def usable(name: str | None, key: str = "torch_settings.device") -> torch.device:
    """Returns the device of a name, from the setting `key`, after a test computation on it; the CPU for None.

    Raises:
        Unsupported: PyTorch cannot use the device on this machine.
    """
    device = torch.device(name or "cpu")
    try:
        back(torch.ones(1, device=device) + 1)
    except (RuntimeError, AssertionError) as error:  # AssertionError: PyTorch was built without CUDA
        cuda = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        there = ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]
        # The first sentence, without PyTorch's advice on debugging kernels.
        reason = next(iter(str(error).splitlines()), type(error).__name__).partition(". ")[0]
        raise Unsupported(
            got=f"{key} {name!r}, which PyTorch {torch.__version__} cannot use here: {reason}",
            expected=" or ".join(there),
            remedy=f"install a PyTorch that is built for it where the service runs, or leave {key} out",
        ) from error
    return device


def over(record: T, device: torch.device) -> T:
    """Moves tensors from the CPU to a device; those already there are not copied.

    Args:
        record: a tensor, None, or a tuple of these and of such tuples; anything else is unchanged.
        device: the target.
    """
    return record if device == CPU else _moved(record, device)


def _moved(record: Any, device: torch.device) -> Any:
    if isinstance(record, tuple):
        parts = [_moved(part, device) for part in record]
        return type(record)(*parts) if hasattr(record, "_fields") else tuple(parts)
    # Without waiting for what a GPU computes: memory that is not pinned is copied before the call returns.
    return record.to(device, non_blocking=device.type == "cuda") if hasattr(record, "to") else record


def constant(value: float, like: Tensor, *shape: int) -> Tensor:
    """Returns a tensor of a shape, by default a scalar, with the dtype and device of another one; never write to it.

    It is cached. PyTorch converts a Python number for each operation, which takes as long as the operation on a few
    rows.
    """
    return _constant(value, like.dtype, like.device, shape)


@lru_cache(maxsize=64)
@torch.inference_mode(mode=False)  # a later caller may have a graph
def _constant(value: float, dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


def place(parameter: nn.Parameter, values: Tensor) -> None:
    """Replaces a parameter's storage with `values`; references to the parameter stay valid."""
    parameter.data = values


def move_parameters(module: nn.Module, device: torch.device) -> None:
    """Moves the parameters of a module to a device; its buffers stay, because statistics are read on the CPU."""
    for parameter in module.parameters():
        place(parameter, parameter.detach().to(device))


def back(tensor: Tensor) -> Array:
    """Returns a tensor of any device as an array; one on the CPU shares its memory."""
    array: Array = tensor.cpu().numpy()
    return array


def to_arrays(module: nn.Module) -> Arrays:
    """Returns copies of a module's parameters and buffers, by their names in its state dict, from any device."""
    return {name: back(tensor).copy() for name, tensor in module.state_dict().items()}


def load_arrays(module: nn.Module, arrays: Mapping[str, Array]) -> None:
    """Copies `arrays` into a module on any device, which must have exactly these names, shapes and dtypes.

    Raises:
        CheckpointError: a name, shape or dtype differs; the module is unchanged.
    """
    own = module.state_dict()
    got = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    expected = {name: (back(tensor).dtype.str, tuple(tensor.shape)) for name, tensor in own.items()}
    if differing := sorted(name for name in got.keys() | expected.keys() if got.get(name) != expected.get(name)):
        listed = [", ".join(f"{name} {one.get(name, 'missing')}" for name in differing[:8]) for one in (got, expected)]
        raise CheckpointError(
            got=f"weights {listed[0]}",
            expected=listed[1],
            remedy="use the network_settings and the simulator that these weights were trained with",
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(torch.from_numpy(np.array(arrays[name])))


if __name__ == "__main__":
    try:
        usable(*sys.argv[1:])
    except Unsupported as error:
        sys.stdout.write(json.dumps([error.got, error.expected, error.remedy]))
        sys.exit(1)
