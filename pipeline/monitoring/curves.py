"""Plots learning curves as a picture."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from sparring.pipeline.files import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = Mapping[str, Json]
Curves = dict[str, list[Record]]


def _means(*prefixes: str) -> Callable[[Record], dict[str, float]]:
    """Returns a function that selects the means of a record whose names begin with one of `prefixes`."""
    return lambda record: {
        f": {name.partition('/')[2]}": value
        for name, value in sorted(record["means"].items())
        if name.startswith(prefixes)
    }


REWARD: Final = "Cumulative reward"
PANELS: Final[Mapping[str, Callable[[Record], Mapping[str, float | None]]]] = {
    REWARD: lambda record: {"": record["reward"]},
    "Episode length (steps)": lambda record: {"": record["episode_length"]},
    "Losses": _means("Losses/"),
    "Policy lag (versions)": lambda record: {": mean": record["lag_mean"], ": max": record["lag_max"]},
    "Change of policy by an update": _means("Update/Approximate KL", "Update/Clip Fraction"),
    "Fit of values, weights of stale steps": _means(
        "Update/Explained Variance", "Update/Effective Sample Size", "Update/Stale Weight"
    ),
}
"""The values of an interval that each panel shows, None for an unknown one, by what follows the behavior's name."""


def lineages(records: Iterable[Record]) -> Curves:
    """Returns the interval lines of `metrics.jsonl` by behavior, with rising steps.

    Intervals that a crash rolled back, or beyond which an earlier session went, are left out: the later line counts.
    """
    curves: Curves = {}
    for record in records:
        if record.get("type") != "interval":
            continue
        line = curves.setdefault(record["behavior"], [])
        while line and line[-1]["step"] >= record["step"]:
            line.pop()
        line.append(record)
    return curves


def picture(curves: Curves, title: str) -> bytes:
    """Returns a PNG of reward, episode length, losses, policy lag and diagnostics of updates over steps.

    Args:
        curves: interval lines by behavior, from `lineages`.
        title: shown on top.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, parse_math=False)
    for axes, name in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        axes.set_title(name)
        axes.set_xlabel("trained steps")
        axes.grid(alpha=0.3)
        for behavior, line in sorted(curves.items()):
            _plot(axes, behavior, name, line)
        if axes.get_legend_handles_labels()[0]:
            for text in axes.legend(fontsize="small").get_texts():
                text.set_parse_math(False)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=100)
    return stream.getvalue()


def _plot(axes: Axes, behavior: str, panel: str, line: list[Record]) -> None:
    """Plots the curves of a behavior in a panel, and around the reward its standard deviation."""
    points: dict[str, list[tuple[int, float]]] = {}
    for record in line:
        for label, value in PANELS[panel](record).items():
            if value is not None:
                points.setdefault(behavior + label, []).append((record["step"], value))
    for label, values in points.items():  # a leading "_" would hide the curve from the legend
        marker = "." if len(values) < 50 else ""
        axes.plot(*zip(*values, strict=True), label=label.lstrip("_") or label, marker=marker)
    known = [record for record in line if record["reward"] is not None] if panel == REWARD else []
    if known:
        spreads = [(record["reward"], record["reward_deviation"] or 0.0) for record in known]
        low, high = [mean - spread for mean, spread in spreads], [mean + spread for mean, spread in spreads]
        axes.fill_between([record["step"] for record in known], low, high, alpha=0.15)
