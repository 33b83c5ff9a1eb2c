"""Plots learning curves as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.intervals import REWARD_PER_STEP
from sparring.pipeline.monitoring.pictures import figure, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = Mapping[str, Json]
Curves = dict[str, list[Record]]


PANELS: Final[Mapping[str, Mapping[str, str]]] = {
    "Rating": {"Self-play/ELO": "", "Self-play/Mu": "", "Self-play/Opponents ELO": ": opponents"},
    "Win rate": {"Self-play/Win Rate": ""},
    "Cumulative reward": {"reward": "", "group_reward": ": group"},
    "Reward per step": {REWARD_PER_STEP: ""},
    "Episode length (steps)": {"episode_length": ""},
    "Policy entropy": {"Policy/Entropy": ""},
    "Entropy coefficient": {f"Policy/{kind.title()} Entropy Coeff": f": {kind}" for kind in ("continuous", "discrete")},
    "Losses": {"Losses/": ": "},
    "Change of policy by an update": {f"Update/{name}": f": {name}" for name in ("Approximate KL", "Clip Fraction")},
    "Fit of values, weights of stale steps": {
        f"Update/{name}": f": {name}" for name in ("Explained Variance", "Effective Sample Size", "Stale Weight")
    },
    "Policy lag (versions)": {"lag_mean": ": mean", "lag_max": ": max"},
    "Speed (steps/s)": {"steps_per_s": ""},
}
"""The values and means of an interval that each panel shows, with what follows the behavior's name there.

A name that ends in "/" is the beginning of names, of which the rest follows too.
"""


def lineages(records: Iterable[Record]) -> Curves:
    """Returns the interval lines of `metrics.jsonl` by behavior, with rising steps.

    Intervals that a crash rolled back, or beyond which an earlier session went, are left out: the later line counts.
    """
    curves: Curves = {}
    for record in records:
        match record:
            case {"type": "interval", "behavior": str(behavior), "step": int(step)}:
                line = curves.setdefault(behavior, [])
                while line and line[-1]["step"] >= step:
                    line.pop()
                line.append(record)
            case _:  # something else, or another program has changed the file
                pass
    return curves


def picture(curves: Curves, title: str) -> bytes:
    """Returns a PNG with a panel over steps for each kind of values that the intervals have.

    Args:
        curves: interval lines by behavior, from `lineages`; one at least.
        title: shown on top.
    """
    from cycler import cycler

    panels = {name: points for name in PANELS if (points := _points(curves, name))}
    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    width, height = 5 * columns, 3.5 * rows
    drawn = figure(width, height)  # with margins in inches: a computed layout draws everything twice
    drawn.subplots_adjust(0.8 / width, 0.6 / height, 1 - 0.2 / width, 1 - 0.8 / height, wspace=0.25, hspace=0.4)
    drawn.suptitle(title, parse_math=False)
    for number, (name, points) in enumerate(panels.items(), 1):
        axes = drawn.add_subplot(rows, columns, number)
        axes.set_title(name)
        axes.set_xlabel("trained steps" if all(line[0].get("training", True) for line in curves.values()) else "steps")
        axes.grid(alpha=0.3)
        axes.set_prop_cycle(cycler(linestyle=("-", "--", ":")) * cycler(color=COLORS))
        _plot(axes, points)
    return png(drawn)


def _points(curves: Curves, panel: str) -> dict[str, list[tuple[int, float]]]:
    """Returns the points of the curves of a panel by label, which names the behavior where there are several."""
    points: dict[str, list[tuple[int, float]]] = {}
    for behavior, line in sorted(curves.items()):
        for record in line:
            for label, value in _shown(record, panel):
                name = behavior + label if len(curves) > 1 else label.removeprefix(": ") or behavior
                points.setdefault(name, []).append((record["step"], value))
    return points


def _shown(record: Record, panel: str) -> Iterator[tuple[str, float]]:
    """Yields the known values that a panel shows of an interval, each after its label."""
    values = {**record, **record["means"]}
    for key, label in PANELS[panel].items():
        for name in sorted(name for name in values if name.startswith(key)) if key.endswith("/") else [key]:
            if values.get(name) is not None:
                yield label + name.removeprefix(key), values[name]


def _plot(axes: Axes, points: Mapping[str, list[tuple[int, float]]]) -> None:
    for label, values in points.items():  # a leading "_" would hide the curve from the legend
        marker = "." if len(values) < 50 else ""
        axes.plot(*zip(*values, strict=True), label=label.lstrip("_") or label, marker=marker)
    for text in axes.legend(fontsize="small").get_texts():
        text.set_parse_math(False)


COLORS: Final = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#717581", "#92dadd")
"""Colors that the color-blind can tell apart (Petroff, arXiv 2107.02270)."""
