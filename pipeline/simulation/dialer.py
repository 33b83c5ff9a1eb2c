"""Dials the trainer, and tries again until an attempt's time is over."""

import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.simulation.encrypted import encrypt
from sparring.pipeline.simulation.link import Link, LinkLost, Stop

Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""

FIRST_DELAY_S: Final = 0.05
LONGEST_DELAY_S: Final = 2.0
"""The delay between two tries doubles from the first to the longest."""
LONGEST_TRY_S: Final = 5.0
"""A host that drops packets never answers, so that another try helps; a stop request waits for this long."""


def parse_address(text: str) -> Address:
    """Reads `tcp://HOST:PORT` or `unix:///PATH`.

    Raises:
        SettingsError: it has neither form.
    """
    with suppress(ValueError):  # of a port that is no number, or above 65535
        url = urlsplit(text)
        if url.scheme == "tcp" and url.hostname and url.port:
            return url.hostname, url.port
        if url.scheme == "unix" and not url.netloc and url.path:
            return url.path
    raise SettingsError(f"got address {text!r}; expected tcp://HOST:PORT or unix:///PATH; correct the address")


def dial(address: Address, timeout_s: float, tls: ssl.SSLContext | None = None) -> socket.socket:
    """Returns a connected stream socket; a TCP connection is encrypted if `tls` is given.

    Raises:
        OSError: the address refuses connections, or no answer came in time.
        RemoteProtocolError: the other side does not have the trainer's keys.
    """
    if isinstance(address, tuple):
        try:
            connected = socket.create_connection(address, timeout_s)
        except UnicodeError as error:  # of the name of the host
            raise SettingsError(
                f"got host {address[0]!r} ({error}); expected a name or an IP address; correct it"
            ) from error
        return connected if tls is None else encrypt(connected, tls, address[0])
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(timeout_s)
        connected.connect(address)
    except BaseException:
        connected.close()
        raise
    return connected


class Dialer:
    """Makes connections to one address.

    An attempt begins with `begin` and consists of any number of tries; it ends with `end`, or with its time.

    Args:
        address: `tcp://HOST:PORT` or `unix:///PATH`.
        timeout_s: duration of an attempt.
        tls: encrypts TCP; None for plain TCP.
        clock: monotonic clock, in seconds.
        sleep: waits between two tries; None: a wait that `stop` ends.

    Attributes:
        stop: ends the waits of the dialer and of its links early; the caller closes it.

    Raises:
        SettingsError: the address cannot be read.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float,
        tls: ssl.SSLContext | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self._text = address
        self._address = parse_address(address)
        self.stop = Stop()
        self._timeout_s = timeout_s
        self._tls = tls
        self._clock = clock
        self._sleep = sleep or self.stop.wait
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
