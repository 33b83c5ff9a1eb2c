"""Formats the numbers of all services as a Prometheus text file, for node exporter's textfile collector."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from sparring.pipeline.messages.metrics import Histogram
from sparring.pipeline.monitoring.totals import Totals

_NOT_ALLOWED = re.compile(r"[^a-zA-Z0-9_]+")


def text(run_id: str, services: Mapping[str, Totals], behaviors: Iterable[str], stalled: Iterable[str] = ()) -> str:
    """Returns every counter, gauge and histogram, labelled with run, service and behavior.

    Args:
        run_id: id of the run.
        services: numbers by service.
        behaviors: behavior names that may end a number's name.
        stalled: roots of the present stalls.
    """
    families: dict[tuple[str, str], list[str]] = {}
    known = sorted(behaviors)
    for service, totals in sorted(services.items()):
        labels = {"run": run_id, "service": service}
        for name, value in totals.counters().items():
            base, all_labels = _named(name, labels, known)
            families.setdefault((f"{base}_total", "counter"), []).append(_sample(f"{base}_total", all_labels, value))
        for name, value in totals.gauges().items():
            base, all_labels = _named(name, labels, known)
            families.setdefault((base, "gauge"), []).append(_sample(base, all_labels, value))
        for name, histogram in totals.histograms().items():
            base, all_labels = _named(name, labels, known)
            families.setdefault((base, "histogram"), []).extend(_buckets(base, all_labels, histogram))
    for root in stalled:
        stall = _sample("sparring_stalled", {"run": run_id, "root": root}, 1.0)
        families.setdefault(("sparring_stalled", "gauge"), []).append(stall)
    lines = [line for (name, kind), samples in families.items() for line in (f"# TYPE {name} {kind}", *samples)]
    return "\n".join(lines) + "\n"


def _named(name: str, labels: Mapping[str, str], behaviors: Iterable[str]) -> tuple[str, dict[str, str]]:
    behavior = next((one for one in behaviors if name.endswith(f"/{one}")), None)
    base = name if behavior is None else name.removesuffix(f"/{behavior}")
    more = {} if behavior is None else {"behavior": behavior}
    return "sparring_" + _NOT_ALLOWED.sub("_", base).strip("_").lower(), {**labels, **more}


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {value!r}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _buckets(name: str, labels: Mapping[str, str], histogram: Histogram) -> Iterator[str]:
    reached = list(accumulate(histogram.counts))
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    for bound, number in zip(bounds, reached, strict=True):
        yield _sample(f"{name}_bucket", {**labels, "le": bound}, number)
    yield _sample(f"{name}_sum", labels, histogram.total)
    yield _sample(f"{name}_count", labels, reached[-1])
