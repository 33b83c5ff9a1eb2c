"""Export writes trained policies to files that games and other programs run."""

import importlib.util
from typing import Final

ONNX_PACKAGES: Final = ("onnx", "onnxruntime")


def missing_packages() -> list[str]:
    """Returns the packages of the extra `onnx` that are not installed, without loading them or torch."""
    return [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
