"""This module moves data between the CPU and the device that networks are trained on.

Parameters, their optimizer state and each minibatch are on the device. All else stays on the CPU: segments, statistics
of observations, returns, random numbers, and acting. All transfers go through the two functions here; one seed gives
the same initial weights and the same order on every device.

    python -m sparring.pipeline.networks.device cuda    # exit status 0, or why it cannot train there, as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from sparring.pipeline.networks.limits import Unsupported
from sparring.pipeline.specs import Array

CPU: Final = torch.device("cpu")

T = TypeVar("T")


def usable(name: str | None) -> torch.device:
    """Returns the device of a name after a test computation on it; the CPU for None.

    Raises:
        Unsupported: PyTorch cannot use the device on this machine.
    """
    device = torch.device(name or "cpu")
    try:
        back(torch.ones(1, device=device) + 1)
    except (RuntimeError, AssertionError) as error:  # AssertionError: PyTorch was built without CUDA
        raise Unsupported(
            got=f"torch_settings.device {name!r}, which PyTorch {torch.__version__} cannot use here: {_first(error)}",
            expected=" or ".join(_there()),
            remedy="install a PyTorch that is built for it where the learner runs, or leave torch_settings.device out",
        ) from error
    return device


def over(record: T, device: torch.device) -> T:
    """Moves tensors from the CPU to a device; those already there are not copied.

    Args:
        record: a tensor, None, or a tuple of these and of such tuples; anything else is unchanged.
        device: the target.
    """
    return record if device == CPU else _moved(record, device)


def back(tensor: Tensor) -> Array:
    """Returns a tensor of any device as an array; one on the CPU shares its memory."""
    array: Array = tensor.cpu().numpy()
    return array


def _moved(record: Any, device: torch.device) -> Any:
    if isinstance(record, tuple):
        parts = [_moved(part, device) for part in record]
        return type(record)(*parts) if hasattr(record, "_fields") else tuple(parts)
    return record.to(device) if hasattr(record, "to") else record


def _there() -> list[str]:
    cuda = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def _first(error: Exception) -> str:
    """Returns the error's first sentence, without PyTorch's advice on debugging kernels."""
    return next(iter(str(error).splitlines()), type(error).__name__).partition(". ")[0]


if __name__ == "__main__":
    try:
        usable(sys.argv[1])
    except Unsupported as error:
        sys.stdout.write(json.dumps([error.got, error.expected, error.remedy]))
        sys.exit(1)
