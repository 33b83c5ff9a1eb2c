"""Which packages exports need, for who only wants to know whether they are here. Loads none of them, nor torch."""

from __future__ import annotations

import importlib.util
from typing import Final

ONNX_PACKAGES: Final = ("onnx", "onnxruntime")


def missing_packages() -> list[str]:
    """Packages of the extra `onnx` that are not installed."""
    return [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
