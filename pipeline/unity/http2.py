"""The server's side of an HTTP/2 connection that carries calls of gRPC, without I/O.

The library h2 speaks HTTP/2. Here is what gRPC says with it to a server of one method: a call is a stream, its message
comes whole before it is answered, and the answer is a message and a status.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from pipeline.errors import SettingsError
from pipeline.unity import INSTALL

if TYPE_CHECKING:
    from h2.connection import H2Connection
    from h2.events import DataReceived, RemoteSettingsChanged, RequestReceived, StreamEnded, StreamReset

RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 8, 12, 13, 14
"""Of gRPC's statuses; 0 is good."""

_PREFIX: Final = 5
"""Bytes before a message of gRPC: whether it is compressed, and its length."""
_LARGEST_NUMBER: Final = 2**31 - 1
"""Bytes of a window."""
_CALM: Final = 11
"""Of HTTP/2's errors: less of this."""
_MOST_STREAMS: Final = 4
"""Calls at once; a player makes one."""
_MOST_SETTINGS: Final = 1000
"""Between two calls. The library goes through all that there were for each that come, and keeps some."""
_PIECE: Final = 2**14
"""Bytes that it reads at once: after them is seen what there were too many of."""

_BEGIN: Final = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_END: Final = ((b"grpc-status", b"0"),)


class Violation(Exception):
    """The other side does not speak HTTP/2, or too much of it: the connection is over."""


class Call(NamedTuple):
    """What happened to a call.

    Attributes:
        stream: which it is.
        message: that it brings; None: it is broken off.
    """

    stream: int
    message: bytes | None


@dataclass(slots=True)
class _Stream:
    """A call that has not ended.

    Attributes:
        message: what has come of its message, with its prefix.
        refused: why it is not answered: status, and text.
        whole: whether all of it has come.
        rest: of our answer, not sent yet.
    """

    message: bytearray = field(default_factory=bytearray)
    refused: tuple[int, str] | None = None
    whole: bool = False
    rest: memoryview | None = None


class Connection:
    """One connection.

    Args:
        path: of the one method.
        largest: bytes of a message.

    Raises:
        SettingsError: h2 is not installed.
    """

    def __init__(self, path: str, largest: int) -> None:
        h2 = library()
        self._path = path.encode()
        self._largest = largest
        self._streams: dict[int, _Stream] = {}
        self._heard: list[Call] = []
        self._settings = 0
        self._http2 = _http2(h2)
        self._wrong: type[Exception] = h2.exceptions.ProtocolError
        self._reactions: dict[type, Callable[[Any], None]] = {
            h2.events.RequestReceived: self._begin,
            h2.events.DataReceived: self._data,
            h2.events.StreamEnded: self._come,
            h2.events.StreamReset: self._reset,
            h2.events.RemoteSettingsChanged: self._settle,
            h2.events.ConnectionTerminated: self._part,
        }

    def feed(self, data: bytes) -> list[Call]:
        """Takes what has arrived; what there is to `take` afterwards is to be sent.

        Raises:
            Violation: it is not HTTP/2; send what there is, which says so, and close.
        """
        try:
            for at in range(0, len(data), _PIECE):
                for event in self._http2.receive_data(data[at : at + _PIECE]):
                    if (react := self._reactions.get(type(event))) is not None:
                        react(event)
        except self._wrong as error:
            self._streams.clear()
            raise Violation(str(error)) from error
        self._go_on()
        heard, self._heard = self._heard, []
        return heard

    def take(self) -> bytes:
        """Bytes to send."""
        return self._http2.data_to_send()

    def answer(self, stream: int, message: bytes) -> None:
        """Answers a call; nothing happens where that is over."""
        if (call := self._streams.get(stream)) is None:
            return
        self._settings = 0
        self._http2.send_headers(stream, _BEGIN)
        call.rest = memoryview(bytes(1) + len(message).to_bytes(4, "big") + message)
        self._send(stream, call.rest)

    def refuse(self, stream: int, status: int, why: str) -> None:
        """Answers a call with a status of gRPC; nothing happens where that is over."""
        if self._streams.pop(stream, None) is not None:
            said = (b"grpc-status", b"%d" % status), (b"grpc-message", quote(why, safe=" ,;:").encode())
            self._http2.send_headers(stream, (*_BEGIN, *said), end_stream=True)

    # ------------------------------------------------------------ what the other side does

    def _begin(self, event: RequestReceived) -> None:
        call = self._streams[event.stream_id] = _Stream()
        fields = dict(event.headers)
        if (fields.get(b":method"), fields.get(b":path")) != (b"POST", self._path):
            call.refused = UNIMPLEMENTED, "no such method"

    def _data(self, event: DataReceived) -> None:
        self._http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        call = self._streams.get(event.stream_id)
        if call is not None and call.refused is None:
            call.message += event.data
            if len(call.message) > self._largest + _PREFIX:
                call.refused, call.message = (RESOURCE_EXHAUSTED, "too large a message"), bytearray()

    def _come(self, event: StreamEnded) -> None:
        """All of a call is here."""
        if (call := self._streams.get(event.stream_id)) is None:
            return
        message, call.message, call.whole = call.message, bytearray(), True
        if call.refused is None and message[:1] == b"\1":
            call.refused = UNIMPLEMENTED, "a message that is compressed"
        if call.refused is None and int.from_bytes(message[1:_PREFIX], "big") != len(message) - _PREFIX:
            call.refused = INTERNAL, "a message that was cut off"
        if call.refused is None:
            self._heard.append(Call(event.stream_id, bytes(memoryview(message)[_PREFIX:])))

    def _reset(self, event: StreamReset) -> None:
        if self._streams.pop(event.stream_id, None) is not None:
            self._heard.append(Call(event.stream_id, None))

    def _settle(self, event: RemoteSettingsChanged) -> None:
        self._settings += 1 + len(event.changed_settings)
        if self._settings > _MOST_SETTINGS:
            self._http2.close_connection(_CALM)
            raise self._wrong("too many settings")

    def _part(self, _event: object) -> None:
        """It takes no answer any more."""
        self._heard += (Call(stream, None) for stream in self._streams)
        self._streams.clear()

    # ------------------------------------------------------------ what we do

    def _go_on(self) -> None:
        """Once all that has arrived is known: a call that was refused may have been broken off since."""
        for stream, call in list(self._streams.items()):
            if call.rest is not None:
                self._send(stream, call.rest)
            elif call.whole and call.refused is not None:
                self.refuse(stream, *call.refused)

    def _send(self, stream: int, rest: memoryview) -> None:
        """Sends of an answer what the other side takes now; after the last of it the call is over."""
        http2 = self._http2
        while size := max(0, min(len(rest), http2.max_outbound_frame_size, http2.local_flow_control_window(stream))):
            http2.send_data(stream, rest[:size])
            rest = rest[size:]
        if rest:
            self._streams[stream].rest = rest
        else:
            del self._streams[stream]
            http2.send_headers(stream, _END, end_stream=True)


def library() -> Any:
    """The package h2, with its modules.

    Raises:
        SettingsError: it is not installed.
    """
    try:
        import h2.config
        import h2.connection
        import h2.events
        import h2.exceptions
        import h2.settings
    except ImportError as error:
        raise SettingsError(f"got a Unity player without the library h2; expected it; {INSTALL}") from error
    return h2


def _http2(h2: Any) -> H2Connection:
    """A server that lets its client send without waiting for more of a window.

    Frames are no larger than the least that HTTP/2 allows: in larger ones images do not come faster, and of headers
    that come in 64 of them, as many as the library takes, each byte can take a microsecond. Of headers that arrive two
    are compared, and those that are sent are ours, so neither are validated. They stay bytes: the library does not
    count a text that can not be decoded among the other side's errors.
    """
    http2: H2Connection = h2.connection.H2Connection(
        h2.config.H2Configuration(
            client_side=False,
            validate_inbound_headers=False,
            normalize_inbound_headers=False,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
    )
    codes = h2.settings.SettingCodes
    own = {
        codes.MAX_CONCURRENT_STREAMS: _MOST_STREAMS,
        codes.INITIAL_WINDOW_SIZE: _LARGEST_NUMBER,
        codes.MAX_HEADER_LIST_SIZE: http2.DEFAULT_MAX_HEADER_LIST_SIZE,
    }
    http2.local_settings = h2.settings.Settings(client=False, initial_values=own)
    http2.initiate_connection()
    http2.increment_flow_control_window(_LARGEST_NUMBER - http2.inbound_flow_control_window)
    return http2
