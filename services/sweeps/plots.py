"""Plots what a sweep has found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.pictures import figure, png
from sparring.services.sweeps.results import Outcome, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS: Final = {"complete": "#3f90da", "member": "#3f90da", "pruned": "#ffa90e", "own": "#bd1f01", "other": "#94a4a2"}


def history(outcomes: Sequence[Outcome], objective: str) -> bytes:
    """Returns a PNG with the objective of each trial, in the order of their starts, and the best one so far."""
    drawn, (axes,) = _panels(1)
    axes.set(xlabel="trial", ylabel=objective, title="Objective of each trial")
    _scatter(axes, [(at, one) for at, one in enumerate(outcomes)])
    whole = [(at, one.value) for at, one in enumerate(outcomes) if one.is_whole]
    best = [(at, max(value for _, value in whole[: n + 1] if value is not None)) for n, (at, _) in enumerate(whole)]
    if best:
        axes.step(*zip(*best, strict=True), where="post", color=_COLORS["other"], label="best so far")
        axes.legend(fontsize="small")
    return png(drawn)


def parameters(outcomes: Sequence[Outcome], keys: Sequence[str], logarithmic: Sequence[str], objective: str) -> bytes:
    """Returns a PNG with a panel for each key: the objective over its values."""
    drawn, panels = _panels(len(keys))
    for axes, (key, name) in zip(panels, short_names(keys).items(), strict=False):
        values = [one.values.get(key) for one in outcomes]
        numeric = all(isinstance(one, int | float) and not isinstance(one, bool) for one in values if one is not None)
        known = [(value if numeric else str(value), one) for value, one in zip(values, outcomes, strict=True)]
        axes.set(ylabel=objective, title=name)
        axes.set_xscale("log" if key in logarithmic else "linear")
        _scatter(axes, [(value, one) for value, one in known if key in one.values])
    return png(drawn)


def curves(outcomes: Sequence[Outcome], objective: str) -> bytes:
    """Returns a PNG with the objective of every trial over its steps."""
    drawn, (axes,) = _panels(1)
    axes.set(xlabel="trained steps", ylabel=objective, title="Objective meanwhile")
    for one in outcomes:
        if one.curve:
            axes.plot(*zip(*one.curve, strict=True), color=_color(one), alpha=1.0 if one.own else 0.6, marker=".")
    return png(drawn)


def lineages(paths: Sequence[Sequence[Mapping[str, Json]]], keys: Sequence[str], best: int) -> bytes:
    """Returns a PNG with the scores and the values of each member's lineage over steps.

    Args:
        paths: of each member, the intervals from which it descends: `steps`, `score` and `values`.
        keys: of the values.
        best: the member that is drawn in bold.
    """
    drawn, panels = _panels(1 + len(keys))
    names = {"": "score", **short_names(keys)}
    for axes, (key, name) in zip(panels, names.items(), strict=False):
        axes.set(xlabel="trained steps", title=name)
        for member, path in enumerate(paths):
            points = [(one["steps"], one["values"][key] if key else one["score"]) for one in path]
            known = [
                (step, value if key == "" or not isinstance(value, bool | str) else str(value))
                for step, value in points
            ]
            shown = [(step, value) for step, value in known if value is not None]
            if shown:
                width = 2.5 if member == best else 1.0
                axes.plot(*zip(*shown, strict=True), marker=".", linewidth=width, label=f"member {member}")
    panels[0].legend(fontsize="small")
    return png(drawn)


def _scatter(axes: Axes, points: Sequence[tuple[Json, Outcome]]) -> None:
    for at, one in points:
        if one.value is not None:
            axes.scatter(at, one.value, color=_color(one), marker="*" if one.own else "o", s=90 if one.own else 25)


def _color(one: Outcome) -> str:
    return _COLORS["own"] if one.own else _COLORS.get(one.state, _COLORS["other"])


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    drawn = figure(5.5 * columns, 3.8 * rows, "constrained")
    panels = [drawn.add_subplot(rows, columns, number) for number in range(1, count + 1)]
    for axes in panels:
        axes.grid(alpha=0.3)
    return drawn, panels
