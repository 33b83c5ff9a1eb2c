"""The device that networks are trained on, and the border between it and the processor.

Parameters, what an optimiser knows of them, and each minibatch are on the device. All else stays on the processor:
segments, statistics of observations, returns, random numbers, and acting. So there is one way over and one way back,
here; and one seed begins with the same weights and shuffles alike on every device.

    python -m sparring.pipeline.networks.device cuda    # exit status 0, or why it cannot train there, as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from sparring.pipeline.networks.limits import Unsupported

CPU: Final = torch.device("cpu")

T = TypeVar("T")


def usable(name: str | None) -> torch.device:
    """The device of a name, after something was worked out on it; the processor for None.

    Raises:
        Unsupported: PyTorch cannot use it here.
    """
    device = torch.device(name or "cpu")
    try:
        back(torch.ones(1, device=device) + 1)
    except (RuntimeError, AssertionError) as error:  # the latter of a PyTorch that was built without CUDA
        raise Unsupported(
            got=f"torch_settings.device {name!r}, which PyTorch {torch.__version__} cannot use here: {_first(error)}",
            expected=" or ".join(_there()),
            remedy="install a PyTorch that is built for it where the learner runs, or leave torch_settings.device out",
        ) from error
    return device


def over(record: T, device: torch.device) -> T:
    """Tensors of the processor, on a device; what is on it already is not copied.

    Args:
        record: a tensor, None, or a tuple of these and of such tuples; what has no device stays as it is.
        device: where to.
    """
    return record if device == CPU else _moved(record, device)


def back(tensor: Tensor) -> NDArray[Any]:
    """A tensor of any device as an array; of the processor's the same memory."""
    array: NDArray[Any] = tensor.cpu().numpy()
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
    """Its first sentence: PyTorch goes on with advice for who debugs kernels."""
    return next(iter(str(error).splitlines()), type(error).__name__).partition(". ")[0]


if __name__ == "__main__":
    try:
        usable(sys.argv[1])
    except Unsupported as refused:
        sys.stdout.write(json.dumps([refused.got, refused.expected, refused.remedy]))
        sys.exit(1)
