"""The numbers that every service publishes for the monitor."""

from __future__ import annotations

from dataclasses import field

from sparring.pipeline.messages.schema import (
    record,
)


@record("histogram")
class Histogram:
    """Cumulative counts of values: `counts[i]` at most `bounds[i]`, the last one above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@record("wait")
class Wait:
    """What one activity of a service needs before it can go on.

    Attributes:
        activity: what it hands on when it goes on, as "segments/Walk"; "*" where it is the whole service.
        what: it waits for, as "steps/Walk", or "credit.segments/Walk" for room in the queue of these.
        sources: services that give it, or "simulators"; none where no other stage can be blamed.
        seconds: for how long it has waited.
        who: of the sources, which one, where the service knows; "" where it does not.
    """

    activity: str
    what: str
    sources: tuple[str, ...] = ()
    seconds: float = 0.0
    who: str = ""


@record("metrics")
class Metrics:
    """All numbers of one service start. Counters and histograms are cumulative, so that any
    interval is a difference and a lost message loses nothing.

    Attributes:
        service: as "learning-Ball".
        start: this start of it.
        sequence: rises with each publication.
        time_s: seconds since the epoch.
        counters: by name; a name may end in "/Behavior".
        gauges: by name, the value now.
        histograms: by name.
        waiting_for: what the service waits for, or "" while it works.
        waits: the same for each of its activities that waits.
    """

    service: str
    start: str
    sequence: int
    time_s: float
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    waiting_for: str = ""
    waits: tuple[Wait, ...] = ()
