"""Every service publishes these numbers for the monitor."""

from dataclasses import field

from sparring.pipeline.messages.schema import record


@record("histogram")
class Histogram:
    """A histogram counts values cumulatively: `counts[i]` are at most `bounds[i]`, the last ones above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@record("wait")
class Wait:
    """A Wait names what one activity of a service needs before it can continue.

    Attributes:
        activity: what it produces, such as "segments/Walk"; "*" for the whole service.
        what: what it waits for, such as "steps/Walk", or "credit.segments/Walk" for space in that queue.
        sources: services that provide it, or "simulators"; none where no other stage can be the cause.
        who: which of the sources, where the service knows; else "".
    """

    activity: str
    what: str
    sources: tuple[str, ...] = ()
    who: str = ""


@record("metrics")
class Metrics:
    """A service publishes all its numbers. Counters and histograms are cumulative: a lost message loses nothing.

    Attributes:
        service: such as "learning-Ball".
        start: its incarnation.
        sequence: rises with each publication.
        time_s: seconds since the epoch.
        counters: by name; a name may end in "/Behavior".
        gauges: present value by name.
        histograms: by name.
        waiting_for: what the service waits for; "" while it works.
        waits: one for each of its activities that waits.
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
