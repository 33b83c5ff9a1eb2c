"""Describes the numbers of all services as Prometheus families, for its text file and for HTTP.

A family is named after what it measures; whose it is, is a label: run, service, behavior, queue, statistic and so on.
"""

import io
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sparring.pipeline.messages.metrics import Histogram
from sparring.pipeline.monitoring.metrics import SIMULATOR
from sparring.pipeline.monitoring.overview import Totals
from sparring.pipeline.monitoring.progress import IDLE, PASSED
from sparring.pipeline.monitoring.writers.delivery import DeliveryState

_NOT_ALLOWED: Final = re.compile(r"[^a-zA-Z0-9_]+")
_MOMENT: Final = r"(?P<statistic>.+)\.(?P<what>sum|sumsq|count)"
_COUNTERS: Final = tuple(
    (re.compile(pattern), family)
    for pattern, family in (
        (rf"{re.escape(SIMULATOR)}(?P<statistic>.+)\.total", "simulator_statistic_accumulated"),
        (rf"{re.escape(SIMULATOR)}{_MOMENT}", "simulator_statistic_{what}"),
        (rf"(?=[A-Z]){_MOMENT}", "statistic_{what}"),
        (r"faults\.(?P<code>.+)", "faults_by_code"),
        (rf"{re.escape(PASSED)}(?P<product>.+)", "passed"),
    )
)
_GAUGES: Final = tuple(
    (re.compile(pattern), family)
    for pattern, family in (
        (rf"{re.escape(SIMULATOR)}(?P<statistic>.+)", "simulator_statistic"),
        (rf"{re.escape(IDLE)}(?P<product>.+)", "idle_s"),
        (r"step_counts\.(?P<count>.+)", "step_counts"),
    )
)
_QUEUE: Final = re.compile(r"queue\.(?P<queue>[^:]+?)(:(?P<behavior>.+?))?(?P<end>\.out)?\.(?P<what>[a-z_]+)")
_MOST_CLIENTS: Final = 50
_CLIENT_S: Final = 10.0
"""Seconds that a client has, however slowly it sends or reads."""
_MOMENTS: Final = {"sum": "Sum", "sumsq": "Sum of the squares", "count": "Number"}
UNKNOWN: Final = "A number of a service."
HELP: Final = {
    "action_latency_s": "Seconds from the arrival of a simulator's frame to its answer, without backpressure.",
    "agents": "Live agents.",
    "backpressured_s": "Seconds that a simulator's frame waited for a step allowance or weights.",
    "batch_rows": "Agents that one pass of a policy acted for.",
    "budget": "Step budget: the most steps that may be in flight.",
    "correction_weak": "Updates whose correction for stale data left a small effective sample size.",
    "cpu_s": "CPU time of the process, in seconds.",
    "episode_oldest": "Steps of the longest episode that is open.",
    "episodes": "Episodes that have ended.",
    "episodes_open": "Episodes that are open.",
    "evaluated": "Episodes evaluated.",
    "faults": "Mistakes of simulators.",
    "faults_by_code": "Mistakes of simulators, by their code.",
    "flushes": "Flushes requested.",
    "frames": "Frames of simulators that were answered.",
    "ghost_steps": "Steps completed by ghosts.",
    "ghosts_held": "Ghosts whose weights stepping holds.",
    "handshakes_refused": "Connections that were refused, between services or of simulators.",
    "idle_s": "Seconds since an activity has produced something.",
    "in_flight": "Steps that were produced and are not yet part of a published update.",
    "interrupted": "Segments that ended by an interruption.",
    "intervals": "Intervals that the monitor has closed.",
    "lag": "Policy versions between the weights that chose an action and those that were trained.",
    "matches_ended": "Matches that have ended.",
    "matches_lost": "Results of matches that were lost with stepping.",
    "matches_under_way": "Matches under way.",
    "max_steps": "Steps after which the training ends.",
    "metrics_not_finite": "Values left out because they were NaN, infinite, or too large.",
    "open_segments": "Segments that are being assembled.",
    "open_steps": "Steps in segments that are being assembled.",
    "outbox": "Rows of steps that stepping has gathered and not sent.",
    "passed": "What an activity has produced.",
    "played": "Steps played.",
    "queue_capacity": "Messages that an end of a queue holds at most.",
    "queue_messages": "Messages that an end of a queue holds.",
    "queue_put_bytes": "Bytes put into a queue.",
    "queue_put_steps": "Steps put into a queue.",
    "queue_steps": "Steps in the messages that an end of a queue holds.",
    "queue_waited_s": "Seconds that the user of an end of a queue has waited.",
    "queue_waits": "Times that the user of an end of a queue has waited.",
    "received_bytes": "Bytes received from simulators.",
    "reward_mean_last100": "Mean return of the last 100 episodes.",
    "requests_refused": "Requests for these numbers that were refused, because too many were open.",
    "rss_bytes": "Physical memory of the process.",
    "segment_steps": "Steps in finished segments.",
    "segments": "Finished segments.",
    "simulator_statistic": "Latest value of a statistic that simulator 0 reports.",
    "simulator_statistic_accumulated": "Sum of a statistic that simulators report to be summed.",
    "simulators": "Connected simulators.",
    "simulators_connected": "Simulators that have connected.",
    "simulators_lost": "Simulators that have disconnected before the end of the run.",
    "skipped": "Minibatches skipped because their loss or gradient was not finite.",
    "slowed_down_s": "Seconds for which simulators were read more slowly, because they sent too much.",
    "stalled": "1 for the root of a present stall; of the monitor, the number of stalls.",
    "statistics_rejected": "Statistics of simulators that were left out: too many or too long names.",
    "step": "Steps in the lineage of the present weights.",
    "step_counts": "Step accounting: produced = trained + ghost + stale + lost + open.",
    "steps": "Steps produced by learning agents.",
    "ticks": "Rounds of the monitor.",
    "trained": "Steps trained.",
    "unwatched_s": "Seconds without a monitor.",
    "update_s": "Seconds that the learner updated.",
    "updates": "Updates of the weights.",
    "version": "Version of the present weights.",
    "wait_s": "Seconds that the learner waited for segments.",
    "writer_events": "Events that a writer got, or lost by a cause.",
    "writer_starts": "Starts of the process of a writer.",
    "writes_failed": "Files or lines that could not be written.",
} | {
    f"{prefix}_{moment}": f"{text} of {of}."
    for moment, text in _MOMENTS.items()
    for prefix, of in (
        ("statistic", "the values of a statistic"),
        ("simulator_statistic", "the values of a statistic that simulators report"),
        ("episode_length", "the steps of ended episodes"),
        ("episode_return", "the returns of ended episodes"),
        ("group_return", "the returns of groups"),
        ("step_reward", "the rewards of steps"),
    )
}


class _Handler(WSGIRequestHandler):
    """Answers a request, and gives up on a client that sends or reads nothing for too long."""

    timeout = _CLIENT_S

    def log_message(self, *_: object) -> None:
        """Logs nothing."""

    def get_stderr(self) -> io.StringIO:
        """Returns a place for the traceback of a request that the library cannot read; its client gets status 500."""
        return io.StringIO()


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each request in a thread; a client beyond the number of those allowed is disconnected."""

    daemon_threads = True
    request_queue_size = _MOST_CLIENTS

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(_MOST_CLIENTS)
        self.refused = 0
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread, unless too many are busy."""
        if self._free.acquire(blocking=False):
            with suppress(RuntimeError):  # the system has no thread left
                super().process_request(request, client_address)
                return
            self._free.release()
        self.refused += 1
        self.shutdown_request(request)

    def server_bind(self) -> None:
        """Binds without a look-up of this machine's name, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers, in a thread."""
        limit = threading.Timer(_CLIENT_S, partial(_hang_up, request))
        limit.daemon = True
        try:
            with suppress(RuntimeError):  # the system has no thread left
                limit.start()
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._free.release()

    def handle_error(self, *_: Any) -> None:
        """Ignores a client that has gone away."""


def _hang_up(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class Exporter(Collector):
    """Holds the families that Prometheus gets; a thread may read them while another replaces them.

    Args:
        run_id: id of the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._families: Sequence[Metric] = ()
        self._server: _Server | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Sequence[Metric]:
        """Returns the present families."""
        return self._families

    def text(self) -> bytes:
        """Returns the present families in Prometheus' text format."""
        return generate_latest(self._registry)

    @contextmanager
    def served(self, address: str) -> Iterator[None]:
        """Answers HTTP requests at `tcp://HOST:PORT`, in threads of its own.

        Raises:
            OSError: the address cannot be used.
        """
        parts = urlsplit(address)
        server = _Server((parts.hostname or "127.0.0.1", parts.port or 0), _Handler)
        server.set_app(make_wsgi_app(self._registry))
        self._server = server
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    @property
    def refused(self) -> int:
        """Returns how many requests were refused because too many were open."""
        return 0 if self._server is None else self._server.refused

    def update(
        self,
        services: Mapping[str, Totals],
        behaviors: Iterable[str],
        stalled: Iterable[str] = (),
        writers: Mapping[str, DeliveryState] | None = None,
    ) -> None:
        """Replaces the families by those of the present numbers.

        Args:
            services: numbers by service.
            behaviors: behavior names that may end a number's name.
            stalled: roots of the present stalls.
            writers: states by name.
        """
        families: dict[str, Metric] = {}
        known = sorted(behaviors)
        for service, totals in sorted(services.items()):
            own = {"run": self._run_id, "service": service}
            numbers = totals.numbers
            for name, value in numbers.counters.items():
                family, labels = _parts(name, known, _COUNTERS)
                _family(families, CounterMetricFamily, family).add_sample(f"{_full(family)}_total", own | labels, value)
            for name, value in numbers.gauges.items():
                family, labels = _parts(name, known, _GAUGES)
                _family(families, GaugeMetricFamily, family).add_sample(_full(family), own | labels, value)
            for name, histogram in numbers.histograms.items():
                family, labels = _parts(name, known, ())
                _add_histogram(_family(families, HistogramMetricFamily, family), own | labels, histogram)
        for root in stalled:
            labels = {"run": self._run_id, "root": root}
            _family(families, GaugeMetricFamily, "stalled").add_sample(_full("stalled"), labels, 1.0)
        for writer, state in (writers or {}).items():
            own = {"run": self._run_id, "writer": writer}
            samples = [("writer_events", {"outcome": str(one)}, count) for one, count in state.counts.items()]
            for family, labels, value in (*samples, ("writer_starts", {}, state.starts)):
                _family(families, CounterMetricFamily, family).add_sample(f"{_full(family)}_total", own | labels, value)
        self._families = tuple(families.values())


Patterns = Sequence[tuple[re.Pattern[str], str]]


def _parts(name: str, behaviors: Sequence[str], patterns: Patterns) -> tuple[str, dict[str, str]]:
    """Returns the family of a number, and the labels that its name holds."""
    if queue := _QUEUE.fullmatch(name):
        labels = {"queue": queue["queue"], "end": "sender" if queue["end"] else "receiver"}
        return f"queue_{queue['what']}", labels | ({"behavior": queue["behavior"]} if queue["behavior"] else {})
    behavior = next((one for one in behaviors if name.endswith(f"/{one}") and not name.startswith(SIMULATOR)), "")
    labels, plain = {"behavior": behavior} if behavior else {}, name.removesuffix(f"/{behavior}") if behavior else name
    for pattern, family in patterns:
        if found := pattern.fullmatch(plain):
            words = found.groupdict()
            return family.format(what=words.pop("what", "")), labels | words
    return _NOT_ALLOWED.sub("_", plain).strip("_").lower(), labels


def _full(family: str) -> str:
    return f"sparring_{family}"


def _family(families: dict[str, Metric], kind: type[Metric], family: str) -> Metric:
    key = f"{kind.__name__} {family}"
    if key not in families:
        families[key] = kind(_full(family), HELP.get(family, UNKNOWN))  # type: ignore[call-arg]
    return families[key]


def _add_histogram(family: Metric, labels: Mapping[str, str], histogram: Histogram) -> None:
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    reached = list(accumulate(histogram.counts))
    for bound, number in zip(bounds, reached, strict=True):
        family.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, number)
    family.add_sample(f"{family.name}_count", dict(labels), reached[-1])
    family.add_sample(f"{family.name}_sum", dict(labels), histogram.total)
