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
    known = sorted(behaviors)
    for service, totals in sorted(services.items()):
        for kind, name, suffix, more, value in _samples(totals.numbers):
            behavior = next((one for one in known if name.endswith(f"/{one}")), "")
            labels = {"run": run_id, "service": service} | ({"behavior": behavior} if behavior else {})
            base = _NOT_ALLOWED.sub("_", name.removesuffix(f"/{behavior}")).strip("_").lower()
            family = f"sparring_{base}_total" if kind == "counter" else f"sparring_{base}"
            sample = _sample(f"sparring_{base}{suffix}", labels | more, value)
            families.setdefault((family, kind), []).append(sample)
    for root in stalled:
        stall = _sample("sparring_stalled", {"run": run_id, "root": root}, 1.0)
        families.setdefault(("sparring_stalled", "gauge"), []).append(stall)
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


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    escaped = {
        label: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for label, text in labels.items()
    }
    inside = ",".join(f'{label}="{text}"' for label, text in escaped.items())
    return f"{name}{{{inside}}} {value!r}"
