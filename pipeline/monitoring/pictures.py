"""Begins pictures, and encodes them as PNG, without a display and without matplotlib's global state."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(width: float, height: float, layout: Literal["constrained"] | None = None) -> Figure:
    """Returns an empty figure of a size in inches."""
    os.environ["MPLBACKEND"] = "agg"  # the user's is for windows, and a wrong one fails at the import
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(drawn)
    return drawn


def png(drawn: Figure) -> bytes:
    """Returns a figure as a file of PNG."""
    stream = io.BytesIO()
    drawn.savefig(stream, format="png", dpi=100)
    _remove_temporary_folder()
    return stream.getvalue()


def _remove_temporary_folder() -> None:
    """Removes the folder that matplotlib makes where it cannot write its own: it would stay where a service ends."""
    folder = Path(os.environ.get("MPLCONFIGDIR", ""))
    if folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("matplotlib-"):
        shutil.rmtree(folder, ignore_errors=True)
