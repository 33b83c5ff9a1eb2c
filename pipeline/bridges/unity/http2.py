"""Implements the server's side of an HTTP/2 connection that carries calls of gRPC, without I/O.

The library h2 implements HTTP/2; this module adds gRPC for a server of one method: a call is a stream, its message is
complete before it is answered, and the answer is a message and a status. One call at a time is accepted.

Nearly all calls are steady: their frames differ from those of the call before in the stream and the message alone. They
and their answers pass by the library, which needs ten times as long for them. It reads the last of them after all, and
is as if it had read each, before anything else happens: any other frame, another call, an answer that must wait.

The memory and work that the other side can cause is bounded: one message by its limit; headers by the library; and by
`_MOST_OVERHEAD` everything else: headers, pings, resets, settings, padding, empty frames. The windows are small until
the connection is admitted, so that a rejected call does not send its message.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.parse import quote

from sparring.pipeline.errors import SettingsError, install_command

try:
    from h2 import events
    from h2.config import H2Configuration
    from h2.connection import H2Connection
    from h2.exceptions import ProtocolError
    from h2.settings import SettingCodes, Settings
    from hpack import NeverIndexedHeaderTuple

    from sparring.pipeline.bridges.unity import steady
    from sparring.pipeline.bridges.unity.steady import (
        BEGIN,
        END,
        LARGEST_FRAME,
        PREFIX,
        FrameReader,
        WholeCall,
        whole_call,
    )
except ImportError as missing:
    raise SettingsError(
        f"got a Unity player without the library h2; expected it to be installed; try: {install_command('unity')}"
    ) from missing

RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 8, 12, 13, 14
"""Statuses of gRPC; 0 is success."""
OTHER: Final = UNAVAILABLE, "another player is connected to this port"
"""Status and text for calls on connections other than the player's."""

_LARGEST_NUMBER: Final = 2**31 - 1
"""Largest window, in bytes."""
_CALM: Final = 11
"""HTTP/2's error ENHANCE_YOUR_CALM."""
_MOST_STREAMS: Final = 4
"""Concurrent calls; a player makes one, others are rejected."""
_MOST_OVERHEAD: Final = 2**18
"""Bytes between two answers that are not of messages: the heads of 256 MB in frames of 16 kB are 147 kB."""
_MOST_SETTINGS: Final = 1000
"""Settings that count as so many bytes. For each new one the library iterates over all, and stores some."""
_PIECE: Final = LARGEST_FRAME
"""Bytes that are processed at once; the limits are checked after each piece."""
_PREFACE: Final = 24
"""Bytes before the first frame (RFC 9113, section 3.4)."""
_UNSENT: Final = (NeverIndexedHeaderTuple(b":status", b"200"),)
"""Headers that do not enter the table of the connection, because they are not sent."""
_ACKNOWLEDGED: Final = 2**15
"""Bytes of steady calls after which the window of the connection, 2**16 at first, is enlarged again."""

_ACCEPTED: Final = (b"grpc-accept-encoding", b"identity")


class Violation(Exception):
    """Reports that the other side breaks HTTP/2 or a limit; the connection is over."""


class Call(NamedTuple):
    """Represents a message of a call, or its end.

    Attributes:
        stream: stream of the call.
        message: its message; None: the client broke the call off.
    """

    stream: int
    message: bytes | None


@dataclass(slots=True)
class _Stream:
    """Holds a call that has not ended.

    Attributes:
        message: received bytes of its message, with the prefix.
        refused: status and text of the rejection; its message is not buffered then.
        whole: whether the message is complete.
        rest: unsent part of the answer.
    """

    message: bytearray = field(default_factory=bytearray)
    refused: tuple[int, str] | None = None
    whole: bool = False
    rest: memoryview | None = None

    def refuse(self, status: int, why: str) -> None:
        """Marks the call as rejected and discards its message."""
        self.message, self.refused = bytearray(), (status, why)


class Http2Connection:
    """Represents one connection of a client.

    Args:
        path: path of the one method.
        largest: limit of a message in bytes; 0 rejects every call because another player is connected.
    """

    def __init__(self, path: str, largest: int) -> None:
        self._path = path.encode()
        self._largest = largest
        self._streams: dict[int, _Stream] = {}
        self._calls: list[Call] = []
        self._admitted = self._parted = False
        self._overhead = 0
        self._http2 = _http2()
        self._frames = FrameReader(_PREFACE)
        self._headers: bytes | None = None  # of a steady call, compressed
        self._newest = 0  # stream of the last call with these headers
        self._last: WholeCall | None = None  # the last call, where the library has not read it
        self._is_open = False  # the last call waits for its answer
        self._unacknowledged = 0
        self._sent = b""

    def feed(self, data: bytes) -> list[Call]:
        """Processes received bytes and returns the calls; afterwards the bytes of `take` must be sent.

        Raises:
            Violation: the bytes break HTTP/2 or a limit; send the bytes of `take`, which say so, and close.
        """
        whole = whole_call(data) if self._frames.is_between_frames() else None
        if whole is not None and self._is_steady(whole):
            self._take_steady(whole)
            return [Call(whole.stream, whole.message)]
        if self._frames.read(data):
            self._headers = None
        calls = self._read(data)
        if whole is not None and calls == [Call(whole.stream, whole.message)] and whole.is_stateless():
            self._headers, self._newest = whole.headers, whole.stream
        return calls

    def _read(self, data: bytes) -> list[Call]:
        """Has the library read bytes, and returns the calls."""
        try:
            self._catch_up()
            for at in range(0, len(data), _PIECE):
                piece = data[at : at + _PIECE]
                self._overhead += len(piece)
                for event in self._http2.receive_data(piece):
                    self._react(event)
                if self._overhead > _MOST_OVERHEAD:
                    self._http2.close_connection(_CALM)
                    raise ProtocolError("too many bytes that are not of messages")
        except ProtocolError as error:
            self._streams.clear()
            self._parted = True
            raise Violation(str(error)) from error
        self._continue()
        calls, self._calls = self._calls, []
        return calls

    def take(self) -> bytes:
        """Returns the bytes to send."""
        sent, self._sent = self._sent + self._http2.data_to_send(), b""
        return sent

    def answer(self, stream: int, message: bytes) -> None:
        """Answers a call, unless it has ended."""
        if self._answer_steady(stream, message):
            return
        self._catch_up()
        if (call := self._streams.get(stream)) is None:
            return
        self.reset_overhead()
        self._http2.send_headers(stream, BEGIN)
        call.rest = memoryview(bytes(1) + len(message).to_bytes(4, "big") + message)
        self._send(stream, call.rest)

    def refuse(self, stream: int, status: int, why: str) -> None:
        """Answers a call with a status of gRPC, unless it has ended."""
        self._catch_up()
        if (call := self._streams.pop(stream, None)) is not None:
            trailers = (b"grpc-status", b"%d" % status), (b"grpc-message", quote(why, safe=" ,;:").encode()), _ACCEPTED
            self._http2.send_headers(stream, (*BEGIN, *trailers), end_stream=True)
            if not call.whole:
                self._http2.reset_stream(stream)

    def admit(self, largest: int) -> None:
        """Admits messages of `largest` bytes without waits for a window, until the connection ends."""
        self._largest, self._admitted = largest, True
        if self._parted:
            return
        self._http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: _LARGEST_NUMBER})
        self._http2.increment_flow_control_window(_LARGEST_NUMBER - self._http2.inbound_flow_control_window)

    def limit(self, largest: int) -> None:
        """Limits messages to `largest` bytes from now on; 0 rejects every call, including incomplete ones."""
        self._largest = largest
        for call in self._streams.values():
            if not largest and not call.whole and call.refused is None:
                call.refuse(*OTHER)
        self._continue()

    def buffered_bytes(self) -> int:
        """Returns the bytes of incomplete messages."""
        return sum(len(call.message) for call in self._streams.values())

    def reset_overhead(self) -> None:
        """Resets the count of bytes that are not of messages: after an answer, and periodically."""
        self._overhead = 0

    def end(self) -> None:
        """Closes the connection: no call is answered any more."""
        self._catch_up()
        self._streams.clear()
        self._parted = True
        self._http2.close_connection()

    # ------------------------------------------------------------ steady calls

    def _is_steady(self, call: WholeCall) -> bool:
        """Returns whether the library would take the call, and would change nothing that the next call depends on."""
        return (
            call.headers == self._headers
            and not (self._parted or self._is_open or self._streams)
            and call.stream > self._newest
            and call.stream % 2 == 1
            and len(call.message) <= self._largest
            and self._overhead + len(call.data) - call.size <= _MOST_OVERHEAD
            and call.window <= _LARGEST_NUMBER - self._http2.remote_settings.initial_window_size
            and call.windows <= _LARGEST_NUMBER - self._http2.outbound_flow_control_window
        )

    def _take_steady(self, call: WholeCall) -> None:
        if self._last is not None:  # the library will never read it
            self._unacknowledged += self._last.size
            if self._unacknowledged >= _ACKNOWLEDGED:
                self._sent += steady.acknowledgement(self._unacknowledged)
                self._unacknowledged = 0
        self._overhead += len(call.data) - call.size
        self._http2.outbound_flow_control_window += call.windows
        self._last, self._newest, self._is_open = call, call.stream, True

    def _answer_steady(self, stream: int, message: bytes) -> bool:
        """Answers the last call if it is steady, and the windows take the answer."""
        if not self._is_open or stream != self._newest:
            return False
        http2, size = self._http2, PREFIX + len(message)
        window = min(http2.outbound_flow_control_window, http2.remote_settings.initial_window_size)
        if size > min(window, http2.max_outbound_frame_size):
            return False
        http2.outbound_flow_control_window -= size
        self._sent += steady.answer(stream, message)
        self._is_open = False
        self.reset_overhead()
        return True

    def _catch_up(self) -> None:
        """Has the library read the last call, and if it is answered, close its stream, of which it sends nothing."""
        call, self._last = self._last, None
        if call is None:
            return
        http2 = self._http2
        http2.outbound_flow_control_window -= call.windows  # the library adds them
        for event in http2.receive_data(call.data):
            if isinstance(event, events.DataReceived):
                http2.acknowledge_received_data(event.flow_controlled_length, call.stream)
        if self._is_open:
            self._is_open = False
            self._streams[call.stream] = _Stream(whole=True)
        else:
            self._sent += http2.data_to_send()
            http2.send_headers(call.stream, _UNSENT, end_stream=True)
            http2.clear_outbound_data_buffer()

    # ------------------------------------------------------------ events of the other side

    def _react(self, event: events.Event) -> None:
        match event:
            case events.RequestReceived():
                self._begin(event)
            case events.DataReceived():
                self._add(event)
            case events.StreamEnded():
                self._complete(event.stream_id)
            case events.StreamReset():
                self._break_off(event.stream_id)
            case events.RemoteSettingsChanged():
                self._overhead += (1 + len(event.changed_settings)) * _MOST_OVERHEAD // _MOST_SETTINGS
            case events.ConnectionTerminated():  # the other side takes no answers any more
                self._parted = True
                for stream in list(self._streams):
                    self._break_off(stream)

    def _begin(self, event: events.RequestReceived) -> None:
        taken = any(call.refused is None for call in self._streams.values())
        call = self._streams[event.stream_id] = _Stream()
        fields = dict(event.headers)
        if (fields.get(b":method"), fields.get(b":path")) != (b"POST", self._path):
            call.refuse(UNIMPLEMENTED, "no such method")
        elif not self._largest:
            call.refuse(*OTHER)
        elif taken:
            call.refuse(UNAVAILABLE, "a call that is not answered yet")

    def _add(self, event: events.DataReceived) -> None:
        """Adds bytes to the message of a call."""
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
        elif max(len(message) - PREFIX, int.from_bytes(message[1:PREFIX], "big")) > self._largest:
            call.refuse(RESOURCE_EXHAUSTED, "too large a message")

    def _complete(self, stream: int) -> None:
        """Handles the end of a call's message."""
        if (call := self._streams.get(stream)) is None:
            return
        message, call.message, call.whole = call.message, bytearray(), True
        if call.refused is not None:
            return
        if int.from_bytes(message[1:PREFIX], "big") != len(message) - PREFIX:
            call.refuse(INTERNAL, "a truncated message")
        else:
            self._calls.append(Call(stream, bytes(memoryview(message)[PREFIX:])))

    def _break_off(self, stream: int) -> None:
        if self._streams.pop(stream, None) is not None:
            self._calls.append(Call(stream, None))

    # ------------------------------------------------------------ answers

    def _continue(self) -> None:
        """Continues answers and rejections once all received bytes are processed: a rejected call may be broken off.

        An admitted client has sent much of a message before a rejection reaches it: its bytes are read and discarded.
        """
        for stream, call in list(self._streams.items()):
            if call.rest is not None:
                self._send(stream, call.rest)
            elif call.refused is not None and (call.whole or not self._admitted):
                self.refuse(stream, *call.refused)

    def _send(self, stream: int, rest: memoryview) -> None:
        """Sends as much of an answer as the other side accepts; after the last byte the call is over."""
        http2 = self._http2
        while size := max(0, min(len(rest), http2.max_outbound_frame_size, http2.local_flow_control_window(stream))):
            http2.send_data(stream, rest[:size])
            rest = rest[size:]
        if rest:
            self._streams[stream].rest = rest
        else:
            del self._streams[stream]
            http2.send_headers(stream, END, end_stream=True)


def _http2() -> H2Connection:
    """Returns a server with the initial windows of HTTP/2.

    Frames have the least size that HTTP/2 allows: images are no faster in larger ones, and headers in 64 of them, the
    library's limit, can take a microsecond per byte. Two received headers are compared, and sent ones are ours, so
    neither are validated. They stay bytes: the library does not count undecodable text as an error of the other side.
    """
    http2 = H2Connection(
        H2Configuration(
            client_side=False,
            validate_inbound_headers=False,
            normalize_inbound_headers=False,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
    )
    own = {
        SettingCodes.MAX_CONCURRENT_STREAMS: _MOST_STREAMS,
        SettingCodes.MAX_HEADER_LIST_SIZE: http2.DEFAULT_MAX_HEADER_LIST_SIZE,
    }
    http2.local_settings = Settings(client=False, initial_values=own)
    http2.initiate_connection()
    return http2
