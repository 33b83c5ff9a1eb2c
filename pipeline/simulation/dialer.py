"""Dials the trainer, and tries again until an attempt's time is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sparring.pipeline.simulation.link import Link, LinkLost, Stop, dial, parse_address

if TYPE_CHECKING:
    import ssl

FIRST_DELAY_S: Final = 0.05
LONGEST_DELAY_S: Final = 2.0
"""The delay between two tries doubles from the first to the longest."""
LONGEST_TRY_S: Final = 5.0
"""A host that drops packets never answers, so that another try helps; a stop request waits for this long."""


class Dialer:
    """Makes connections to one address.

    An attempt begins with `begin` and consists of any number of tries; it ends with `end`, or with its time.

    Args:
        address: `tcp://HOST:PORT` or `unix:///PATH`.
        timeout_s: duration of an attempt.
        clock: monotonic clock, in seconds.
        sleep: waits between two tries; None: a wait that `stop` ends.
        tls: encrypts TCP; None for plain TCP.

    Attributes:
        stop: ends the waits of the dialer and of its links early; the caller closes it.

    Raises:
        SettingsError: the address cannot be read.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None] | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._text = address
        self._address = parse_address(address)
        self.stop = Stop()
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep or self.stop.wait
        self._tls = tls
        self._deadline: float | None = None
        self._delay_s = FIRST_DELAY_S

    @property
    def is_dialing(self) -> bool:
        """Returns whether an attempt is running."""
        return self._deadline is not None

    def begin(self) -> None:
        """Begins an attempt; a running one continues."""
        if self._deadline is None:
            self._deadline = self._clock() + self._timeout_s
            self._delay_s = FIRST_DELAY_S

    def end(self) -> None:
        """Ends the attempt: the connection works."""
        self._deadline = None

    def dial(self) -> Link:
        """Returns a link over a new connection.

        Raises:
            LinkLost: this try failed.
            RemoteProtocolError: the other side does not have the trainer's keys.
        """
        left_s = max(0.001, self._left_s())
        try:
            connected = dial(self._address, min(left_s, LONGEST_TRY_S), self._tls)
        except OSError as error:
            raise LinkLost(
                got=f"{type(error).__name__}: {error}", expected="a connection", remedy="start the trainer"
            ) from error
        return Link(connected, stop=self.stop, timeout_s=left_s, clock=self._clock)

    def pause(self, lost: LinkLost) -> None:
        """Waits before the next try.

        Args:
            lost: error of the last try.

        Raises:
            LinkLost: the time of the attempt is over.
        """
        left_s = self._left_s()
        if left_s <= 0:
            raise LinkLost(
                got=f"no trainer at {self._text} in {self._timeout_s:g} s (last: {lost.got})",
                expected="one that listens there and keeps the connection",
                remedy="start the run first, or correct the address"
                + ("" if self._tls else "; where the run has keys, name theirs (SPARRING_KEYS, --keys)"),
            ) from lost
        self._sleep(min(self._delay_s, left_s))
        self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)

    def _left_s(self) -> float:
        return 0.0 if self._deadline is None else self._deadline - self._clock()
