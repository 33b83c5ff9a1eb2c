"""The server's side of an HTTP/2 connection that carries calls of gRPC, without I/O.

The library h2 speaks HTTP/2. Here is what gRPC says with it to a server of one method: a call is a stream, its message
comes whole before it is answered, and the answer is a message and a status. One call at a time is taken.

What the other side can make us keep or do is bounded: one message, of so many bytes; headers, by the library; and by
`_MOST_OVERHEAD` all that is not of messages: headers, pings, resets, settings, padding, empty frames. Until it is
welcome its windows are small, so that a call that is refused does not bring its message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from sparring.pipeline.errors import SettingsError, install_command

if TYPE_CHECKING:
    from h2.connection import H2Connection
    from h2.events import DataReceived, RemoteSettingsChanged, RequestReceived, StreamEnded, StreamReset

RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 8, 12, 13, 14
"""Of gRPC's statuses; 0 is good."""
OTHER: Final = UNAVAILABLE, "another player plays on this port"
"""Status and text of a call of who is not listened to."""

_PREFIX: Final = 5
"""Bytes before a message of gRPC: whether it is compressed, and its length."""
_LARGEST_NUMBER: Final = 2**31 - 1
"""Bytes of a window."""
_CALM: Final = 11
"""Of HTTP/2's errors: less of this."""
_MOST_STREAMS: Final = 4
"""Calls at once; a player makes one, the others are refused."""
_MOST_SETTINGS: Final = 1000
"""Until a call is answered. The library goes through all that there were for each that come, and keeps some."""
_MOST_OVERHEAD: Final = 2**18
"""Bytes that are not of messages, until a call is answered: the heads of 256 MB in frames of 16 kB are 147 kB."""
_PIECE: Final = 2**14
"""Bytes that it reads at once: after them is seen what there were too many of."""

_BEGIN: Final = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_END: Final = ((b"grpc-status", b"0"),)
_ACCEPTED: Final = (b"grpc-accept-encoding", b"identity")


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
        refused: why it is not answered: status, and text; nothing of its message is kept.
        whole: whether all of it has come.
        rest: of our answer, not sent yet.
    """

    message: bytearray = field(default_factory=bytearray)
    refused: tuple[int, str] | None = None
    whole: bool = False
    rest: memoryview | None = None

    def refuse(self, status: int, why: str) -> None:
        """Nothing more is taken of it."""
        self.message, self.refused = bytearray(), (status, why)


class Http2Connection:
    """One connection.

    Args:
        path: of the one method.
        largest: bytes of a message; 0 refuses every call as another player's.

    Raises:
        SettingsError: h2 is not installed.
    """

    def __init__(self, path: str, largest: int) -> None:
        h2 = library()
        self._path = path.encode()
        self._largest = largest
        self._streams: dict[int, _Stream] = {}
        self._heard: list[Call] = []
        self._welcome = self._parted = False
        self._settings = 0
        self._overhead = 0
        self._http2 = _http2(h2)
        self._window = h2.settings.SettingCodes.INITIAL_WINDOW_SIZE
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
                piece = data[at : at + _PIECE]
                self._overhead += len(piece)
                for event in self._http2.receive_data(piece):
                    if (react := self._reactions.get(type(event))) is not None:
                        react(event)
                self._check_calm()
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
        self.pardon()
        self._http2.send_headers(stream, _BEGIN)
        call.rest = memoryview(bytes(1) + len(message).to_bytes(4, "big") + message)
        self._send(stream, call.rest)

    def refuse(self, stream: int, status: int, why: str) -> None:
        """Answers a call with a status of gRPC; nothing happens where that is over."""
        if (call := self._streams.pop(stream, None)) is not None:
            said = (b"grpc-status", b"%d" % status), (b"grpc-message", quote(why, safe=" ,;:").encode()), _ACCEPTED
            self._http2.send_headers(stream, (*_BEGIN, *said), end_stream=True)
            if not call.whole:
                self._http2.reset_stream(stream)

    def welcome(self, largest: int) -> None:
        """Takes messages of so many bytes, which wait for no window. It is welcome until its end."""
        self._largest, self._welcome = largest, True
        if self._parted:
            return
        self._http2.update_settings({self._window: _LARGEST_NUMBER})
        self._http2.increment_flow_control_window(_LARGEST_NUMBER - self._http2.inbound_flow_control_window)

    def limit(self, largest: int) -> None:
        """Takes messages of so many bytes from now on; 0 refuses every call, also those that are under way."""
        self._largest = largest
        for call in self._streams.values():
            if not largest and not call.whole and call.refused is None:
                call.refuse(*OTHER)
        self._go_on()

    def kept(self) -> int:
        """Bytes of messages that are not here whole."""
        return sum(len(call.message) for call in self._streams.values())

    def pardon(self) -> None:
        """Forgets how much there was that is not of messages: after an answer, and after a while."""
        self._settings = self._overhead = 0

    def end(self) -> None:
        """Takes leave: no call is answered any more."""
        self._streams.clear()
        self._http2.close_connection()

    # ------------------------------------------------------------ what the other side does

    def _begin(self, event: RequestReceived) -> None:
        taken = any(call.refused is None for call in self._streams.values())
        call = self._streams[event.stream_id] = _Stream()
        fields = dict(event.headers)
        if (fields.get(b":method"), fields.get(b":path")) != (b"POST", self._path):
            call.refuse(UNIMPLEMENTED, "no such method")
        elif not self._largest:
            call.refuse(*OTHER)
        elif taken:
            call.refuse(UNAVAILABLE, "a call that is not answered yet")

    def _data(self, event: DataReceived) -> None:
        self._http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        if (call := self._streams.get(event.stream_id)) is None:
            return
        self._overhead -= len(event.data)
        if call.refused is not None:
            return
        message = call.message
        message += event.data
        if message[:1] == b"\1":
            call.refuse(UNIMPLEMENTED, "a message that is compressed")
        elif max(len(message) - _PREFIX, int.from_bytes(message[1:_PREFIX], "big")) > self._largest:
            call.refuse(RESOURCE_EXHAUSTED, "too large a message")

    def _come(self, event: StreamEnded) -> None:
        """All of a call is here."""
        if (call := self._streams.get(event.stream_id)) is None:
            return
        message, call.message, call.whole = call.message, bytearray(), True
        if call.refused is not None:
            return
        if int.from_bytes(message[1:_PREFIX], "big") != len(message) - _PREFIX:
            call.refuse(INTERNAL, "a message that was cut off")
        else:
            self._heard.append(Call(event.stream_id, bytes(memoryview(message)[_PREFIX:])))

    def _reset(self, event: StreamReset) -> None:
        if self._streams.pop(event.stream_id, None) is not None:
            self._heard.append(Call(event.stream_id, None))

    def _settle(self, event: RemoteSettingsChanged) -> None:
        self._settings += 1 + len(event.changed_settings)
        self._check_calm()

    def _check_calm(self) -> None:
        if self._settings > _MOST_SETTINGS or self._overhead > _MOST_OVERHEAD:
            self._http2.close_connection(_CALM)
            raise self._wrong("too much that is not of messages")

    def _part(self, _event: object) -> None:
        """It takes no answer any more."""
        self._parted = True
        self._heard += (Call(stream, None) for stream in self._streams)
        self._streams.clear()

    # ------------------------------------------------------------ what we do

    def _go_on(self) -> None:
        """Once all that has arrived is known: a call that was refused may have been broken off since.

        Who is welcome has sent much of a message before it hears of that: it is let pass, and not kept.
        """
        for stream, call in list(self._streams.items()):
            if call.rest is not None:
                self._send(stream, call.rest)
            elif call.refused is not None and (call.whole or not self._welcome):
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
        raise SettingsError(
            f"got a Unity player without the library h2; expected it; {install_command('unity')}"
        ) from error
    return h2


def _http2(h2: Any) -> H2Connection:
    """A server, whose windows are those that HTTP/2 begins with.

    Frames are no larger than the least that HTTP/2 allows: in larger ones images do not come faster, and of headers
    that come in 64 of them, as many as the library takes, each byte can take a microsecond. Of headers that arrive two
    are compared, and those that are sent are ours, so neither are validated. They stay bytes: the library does not
    count a text that cannot be decoded among the other side's errors.
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
        codes.MAX_HEADER_LIST_SIZE: http2.DEFAULT_MAX_HEADER_LIST_SIZE,
    }
    http2.local_settings = h2.settings.Settings(client=False, initial_values=own)
    http2.initiate_connection()
    return http2
