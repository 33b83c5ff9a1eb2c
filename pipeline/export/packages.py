"""This module checks whether the packages for exports are installed, without loading them or torch."""

from __future__ import annotations

import importlib.util
from typing import Final

ONNX_PACKAGES: Final = ("onnx", "onnxruntime")


def missing_packages() -> list[str]:
    """Returns the packages of the extra `onnx` that are not installed."""
    return [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
