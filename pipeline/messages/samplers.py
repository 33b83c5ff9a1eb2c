"""A sampler yields the same numbers on both sides of a connection."""

import random
from collections.abc import Callable, Iterator, Sequence

from sparring.pipeline.messages.simulator import Sampler


def samples(sampler: Sampler) -> Iterator[float]:
    """Yields samples from the distribution of `sampler` without end, beginning with its seed."""
    source = random.Random(sampler.seed)
    sample = _SAMPLE[sampler.kind]
    while True:
        yield sample(source, sampler.values)


def _uniform(source: random.Random, values: Sequence[float]) -> float:
    low, high = values
    return min(high, max(low, source.uniform(low, high)))  # rounding may exceed the range


def _gaussian(source: random.Random, values: Sequence[float]) -> float:
    mean, deviation = values
    return source.gauss(mean, deviation)


def _ranges(source: random.Random, values: Sequence[float]) -> float:
    """Samples a range in proportion to its width, then a value in it; all ranges equally where none has any width."""
    ranges = list(zip(values[::2], values[1::2], strict=True))
    widths = [high - low for low, high in ranges]
    return _uniform(source, source.choices(ranges, widths if sum(widths) > 0 else None)[0])


_SAMPLE: dict[str, Callable[[random.Random, Sequence[float]], float]] = {
    "uniform": _uniform,
    "gaussian": _gaussian,
    "multirangeuniform": _ranges,
}
