"""`mlagents-learn` without its ONNX export, which needs onnxscript with a torch of today and ends the run without it.

It runs in ML-Agents' own environment: `python -m beside.learn CONFIG ...`. Nothing else of ML-Agents is changed.
"""

from __future__ import annotations

from pathlib import Path

from mlagents.trainers import learn
from mlagents.trainers.torch_entities.model_serialization import ModelSerializer


def _no_export(_serializer: ModelSerializer, output_filepath: str) -> None:
    """Leaves an empty file, which ML-Agents copies and counts."""
    Path(f"{output_filepath}.onnx").touch()


def main() -> None:
    ModelSerializer.export_policy_model = _no_export
    learn.main()


if __name__ == "__main__":
    main()
