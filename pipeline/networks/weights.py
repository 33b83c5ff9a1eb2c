"""This module converts weights of a module to arrays by name, and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from sparring.pipeline.errors import CheckpointError
from sparring.pipeline.networks.arrays import Arrays
from sparring.pipeline.networks.device import back
from sparring.pipeline.specs import Array


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
        raise CheckpointError(
            got=f"weights {_listed(got, differing)}",
            expected=f"{_listed(expected, differing)}",
            remedy="use the network_settings and the simulator that these weights were trained with",
        )
    for name, tensor in own.items():
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.array(arrays[name])))


def _listed(described: Mapping[str, tuple[str, tuple[int, ...]]], names: list[str]) -> str:
    return ", ".join(f"{name} {described.get(name, 'missing')}" for name in names[:8])
