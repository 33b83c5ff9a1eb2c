"""Plots learning curves as a picture."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS: Final = (
    "Cumulative reward",
    "Episode length (steps)",
    "Losses",
    "Policy lag (versions)",
    "Change of policy by an update",
    "Fit of values, weights of stale steps",
)
_CHANGE: Final = ("Update/Approximate KL", "Update/Clip Fraction")
_FIT: Final = ("Update/Explained Variance", "Update/Effective Sample Size", "Update/Stale Weight")

Curves = dict[str, list[Mapping[str, Any]]]


def lineages(records: Iterable[Mapping[str, Any]]) -> Curves:
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
    for panel, (axes, name) in enumerate(zip(figure.subplots(2, 3).flat, PANELS, strict=True)):
        axes.set_title(name)
        axes.set_xlabel("trained steps")
        axes.grid(alpha=0.3)
        for behavior, line in sorted(curves.items()):
            _PAINTERS[panel](axes, behavior, line)
        if axes.get_legend_handles_labels()[0]:
            for text in axes.legend(fontsize="small").get_texts():
                text.set_parse_math(False)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=100)
    return stream.getvalue()


def _reward(axes: Axes, behavior: str, line: list[Mapping[str, Any]]) -> None:
    known = [record for record in line if record["reward"] is not None]
    steps, mean = [record["step"] for record in known], [record["reward"] for record in known]
    spread = [record["reward_deviation"] or 0.0 for record in known]
    _plot(axes, behavior, steps, mean)
    low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
    if known:
        axes.fill_between(steps, low, high, alpha=0.15)


def _length(axes: Axes, behavior: str, line: list[Mapping[str, Any]]) -> None:
    known = [record for record in line if record["episode_length"] is not None]
    _plot(axes, behavior, [record["step"] for record in known], [record["episode_length"] for record in known])


def _losses(axes: Axes, behavior: str, line: list[Mapping[str, Any]]) -> None:
    names = sorted({name for record in line for name in record["means"] if name.startswith("Losses/")})
    _means(names, axes, behavior, line)


def _means(names: Sequence[str], axes: Axes, behavior: str, line: list[Mapping[str, Any]]) -> None:
    """Plots one curve for each mean that intervals have."""
    for name in names:
        known = [record for record in line if name in record["means"]]
        label = f"{behavior}: {name.partition('/')[2]}"
        _plot(axes, label, [record["step"] for record in known], [record["means"][name] for record in known])


def _lag(axes: Axes, behavior: str, line: list[Mapping[str, Any]]) -> None:
    known = [record for record in line if record["lag_mean"] is not None]
    steps = [record["step"] for record in known]
    _plot(axes, f"{behavior}: mean", steps, [record["lag_mean"] for record in known])
    _plot(axes, f"{behavior}: max", steps, [record["lag_max"] for record in known])


def _plot(axes: Axes, label: str, steps: list[int], values: list[float]) -> None:
    if steps:  # a leading "_" would hide the curve from the legend
        axes.plot(steps, values, label=label.lstrip("_") or label, marker="." if len(steps) < 50 else "")


_PAINTERS: Final = (_reward, _length, _losses, _lag, partial(_means, _CHANGE), partial(_means, _FIT))
