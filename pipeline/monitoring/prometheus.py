"""Formats the numbers of all services as a Prometheus text file, for node exporter's textfile collector."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from sparring.pipeline.monitoring.metrics import count
from sparring.pipeline.monitoring.overview import Numbers, Totals

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
    known, by_service = sorted(behaviors), sorted(services.items())
    found = [({"service": service}, *one) for service, totals in by_service for one in _samples(totals.numbers)]
    found += [({"root": root}, "gauge", "stalled", "", {}, 1.0) for root in stalled]
    for own, kind, name, suffix, more, value in found:
        behavior = next((one for one in known if name.endswith(f"/{one}")), "")
        labels = {"run": run_id} | own | ({"behavior": behavior} if behavior else {}) | more
        base = "sparring_" + _NOT_ALLOWED.sub("_", name.removesuffix(f"/{behavior}")).strip("_").lower()
        inside = ",".join(f'{label}="{_escaped(word)}"' for label, word in labels.items())
        family = f"{base}_total" if kind == "counter" else base
        families.setdefault((family, kind), []).append(f"{base}{suffix}{{{inside}}} {value!r}")
    lines = [line for (name, kind), samples in families.items() for line in (f"# TYPE {name} {kind}", *samples)]
    return "\n".join(lines) + "\n"


def _samples(numbers: Numbers) -> Iterator[tuple[str, str, str, dict[str, str], float]]:
    """Yields kind, name, suffix, further labels and value of each sample of a service."""
    for name, value in numbers.counters.items():
        yield "counter", name, "_total", {}, value
    for name, value in numbers.gauges.items():
        yield "gauge", name, "", {}, value
    for name, histogram in numbers.histograms.items():
        bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        for bound, reached in zip(bounds, accumulate(histogram.counts), strict=True):
            yield "histogram", name, "_bucket", {"le": bound}, reached
        yield "histogram", name, "_sum", {}, histogram.total
        yield "histogram", name, "_count", {}, count(histogram)


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
