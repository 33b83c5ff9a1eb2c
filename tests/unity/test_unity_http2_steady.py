"""Calls that pass by the library for HTTP/2 are as if it had read and answered them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import hpack
import pytest
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, Event, ResponseReceived, StreamReset, TrailersReceived
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes
from hyperframe.frame import DataFrame, GoAwayFrame, HeadersFrame, PingFrame, RstStreamFrame, WindowUpdateFrame
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparring.pipeline.bridges.unity import http2
from sparring.pipeline.bridges.unity.http2 import UNAVAILABLE, Call, Http2Connection, Violation
from sparring.pipeline.bridges.unity.steady import FrameReader, WholeCall, whole_call
from tests.fuzzers.http2 import frames
from tests.unity.unity_client import PATH, Client, begun, grpc_message

LARGEST = 100_000


class Thorough(Http2Connection):
    """A connection whose library reads everything."""

    def _is_steady(self, call: WholeCall) -> bool:
        return False


@dataclass
class Talk:
    """A client that makes calls, its connection, and what both have seen."""

    client: Client
    stream: int = -1
    calls: list[Call] = field(default_factory=list)
    violations: int = 0
    answers: dict[int, list[object]] = field(default_factory=dict)
    ended: bool = False

    def act(self, act: Callable[[Talk], None], chunk: int) -> None:
        try:
            act(self)
        except ProtocolError as error:  # it may not do this now, as after the end
            self.calls.append(Call(0, str(error).encode()))
        data = self.client.http2.data_to_send()
        try:
            for at in range(0, len(data), chunk):
                new = self.client.connection.feed(data[at : at + chunk])
                if new and not self.calls:
                    self.client.connection.admit(LARGEST)
                self.calls += new
        except Violation:
            self.violations += 1
        self.hear()

    def hear(self) -> None:
        for event in self.client.read():
            self._note(event)
        self.client.events.clear()

    def _note(self, event: Event) -> None:
        match event:
            case ResponseReceived() | TrailersReceived():
                self.answers.setdefault(event.stream_id, []).append(dict(event.headers))
            case DataReceived():
                parts = self.answers.setdefault(event.stream_id, [])
                if parts and isinstance(parts[-1], bytes):
                    parts[-1] += event.data
                else:
                    parts.append(event.data)
            case StreamReset():
                self.answers.setdefault(event.stream_id, []).append("reset")
            case ConnectionTerminated():
                self.ended = True


Action = Callable[[Talk], None]


def call(size: int, *, pieces: int = 1, kind: str = "steady", window: int = 0, windows: int = 0) -> Action:
    """Begins and completes a call, with windows before and after its message."""

    def act(talk: Talk) -> None:
        http2 = talk.client.http2
        talk.stream += 2
        more = {"steady": [], "new header": [("own", str(talk.stream))], "length": [("content-length", str(size + 5))]}
        talk.client.begin(talk.stream, more=[("te", "trailers"), *more.get(kind, [])])
        if window:
            http2.increment_flow_control_window(window, talk.stream)
        data = grpc_message(bytes([talk.stream % 251]) * size, compressed=kind == "compressed")
        step = -(-len(data) // pieces)
        for at in range(0, len(data), step):
            last = at + step >= len(data)
            pad = 3 if kind == "padded" else None
            http2.send_data(talk.stream, data[at : at + step], end_stream=last, pad_length=pad)
        if windows:
            http2.increment_flow_control_window(windows)
        if kind == "cancelled":
            http2.reset_stream(talk.stream)

    return act


def answer(size: int) -> Action:
    return lambda talk: talk.client.connection.answer(talk.stream, bytes([talk.stream % 251]) * size)


def refuse(talk: Talk) -> None:
    talk.client.connection.refuse(talk.stream, UNAVAILABLE, "no")


def cancel(talk: Talk) -> None:
    if talk.stream > 0 and not _is_answered(talk):
        talk.client.http2.reset_stream(talk.stream)


def _is_answered(talk: Talk) -> bool:
    return any(isinstance(part, dict) and "grpc-status" in part for part in talk.answers.get(talk.stream, []))


def ping(talk: Talk) -> None:
    talk.client.http2.ping(b"12345678")


def more_window(talk: Talk) -> None:
    talk.client.http2.increment_flow_control_window(70_000)


def new_settings(size: int) -> Action:
    return lambda talk: talk.client.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: size})


def leave(talk: Talk) -> None:
    talk.client.http2.close_connection()


def dismiss(talk: Talk) -> None:
    talk.client.connection.end()


a_call = st.builds(
    call,
    st.one_of(st.integers(0, 60), st.integers(0, 20_000)),
    pieces=st.integers(1, 3),
    kind=st.sampled_from(["steady"] * 6 + ["new header", "length", "compressed", "padded", "cancelled"]),
    window=st.sampled_from([0, 5, 40_000]),
    windows=st.sampled_from([0, 305, 30_000]),
)
STEADY = (call(10, window=5, windows=15), answer(10))
answers = st.builds(answer, st.one_of(st.integers(0, 300), st.integers(0, 90_000)))
others = st.sampled_from([refuse, cancel, ping, more_window, new_settings(70_000), new_settings(1000), leave, dismiss])
actions = st.lists(st.one_of(a_call, st.tuples(a_call, answers), st.just(STEADY), answers, others), max_size=25)
chunks = st.one_of(st.just(2**20), st.just(2**20), st.integers(1, 3000))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(actions, chunks), max_size=4))
@example([([STEADY, STEADY, STEADY, STEADY, call(3), refuse], 2**20), ([STEADY, new_settings(1000), answer(2000)], 7)])
@example([([STEADY] * 3 + [call(5), cancel, STEADY, leave], 2**20)])
@example([([STEADY] * 3 + [call(5), call(5), answer(3), ping, STEADY, dismiss, STEADY], 2**20)])
def test_a_connection_with_and_without_steady_calls_does_the_same(rounds: list[tuple[list[object], int]]) -> None:
    """Actions run one by one; what both clients and both servers see is the same after each."""
    talks = []
    for kind in (Http2Connection, Thorough):
        talk = Talk(Client(kind(PATH, LARGEST)))
        talk.client.http2.initiate_connection()
        talks.append(talk)
    for listed, chunk in rounds:
        for one in listed:
            for act in one if isinstance(one, tuple) else (one,):
                if talks[0].ended or talks[0].violations:
                    return
                for talk in talks:
                    talk.act(act, chunk)
                fast, thorough = talks
                assert fast.calls == thorough.calls
                assert (fast.violations, fast.ended) == (thorough.violations, thorough.ended)
                assert fast.answers == thorough.answers
                windows = [talk.client.connection._http2.outbound_flow_control_window for talk in talks]
                assert windows[0] == windows[1]


def in_steady_state(connection: Http2Connection | None = None, *, admitted: bool = True) -> Client:
    """Returns a client that has made three calls, and been answered."""
    client = begun(LARGEST)
    if connection is not None:
        client = Client(connection)
        client.http2.initiate_connection()
        client.send()
    for stream in (1, 3, 5):
        client.call(stream)
        assert client.send() == [Call(stream, b"hello")]
        if stream == 1 and admitted:
            client.connection.admit(LARGEST)
        client.connection.answer(stream, b"answer")
        client.answer()
        client.send()
    return client


def test_steady_calls_pass_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    client = in_steady_state()
    read: list[bytes] = []
    real = H2Connection.receive_data

    def counted(self: H2Connection, data: bytes) -> list[Event]:
        if self is not client.http2:
            read.append(data)
        return real(self, data)

    monkeypatch.setattr(H2Connection, "receive_data", counted)
    for stream in range(7, 101, 2):
        client.call(stream, grpc_message(b"n%d" % stream))
        client.http2.increment_flow_control_window(11)
        assert client.send() == [Call(stream, b"n%d" % stream)]
        client.connection.answer(stream, b"answer")
        assert client.answer() == (grpc_message(b"answer"), {"grpc-status": "0"})
    assert not read
    client.http2.ping(b"12345678")
    client.send()
    assert len(read) == 2  # the last call, and the ping


@pytest.mark.parametrize("pings", [False, True])
@pytest.mark.parametrize("admitted", [False, True])
def test_no_window_ever_closes(pings: bool, admitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client can send its message whoever has read the one before, the library or not."""
    monkeypatch.setattr(f"{http2.__name__}._LARGEST_NUMBER", 100_000)
    client = in_steady_state(admitted=admitted)
    for stream in range(7, 207, 2):
        client.call(stream, grpc_message(bytes(12_000)))
        client.http2.increment_flow_control_window(12_005)
        assert client.send() == [Call(stream, bytes(12_000))]
        client.connection.answer(stream, bytes(12_000))
        assert client.answer()[0] == grpc_message(bytes(12_000))
        assert client.http2.outbound_flow_control_window <= 100_000
        if pings:
            client.http2.ping(b"12345678")
            client.send()


def test_a_connection_sends_nothing_of_a_call_that_the_library_reads_late() -> None:
    """The call is over for the client; what the library has sent before is still sent."""
    client = in_steady_state()
    ack = PingFrame(0, b"12345678", flags=["ACK"]).serialize()
    for stream in range(7, 27, 2):
        client.call(stream)
        assert client.send() == [Call(stream, b"hello")]
        client.connection.answer(stream, b"answer")
        client.answer()
        client.http2.ping(b"12345678")
        client.connection.feed(client.http2.data_to_send())
        assert client.connection.take() == ack
    client.http2.ping(b"12345678")
    client.connection.feed(client.http2.data_to_send())
    client.call(27)
    client.connection.feed(client.http2.data_to_send())
    client.connection.answer(27, b"answer")
    client.http2.ping(b"12345678")
    client.connection.feed(client.http2.data_to_send())
    assert client.connection.take().count(ack) == 2


HEADERS: Final = b"\x83\x86\xbf\xbe"
"""Headers of the last call of `in_steady_state`: of the last two, 0xbe means the one that entered the table last."""
MORE: Final = b"\x40\1a\1b"
"""A header that enters the table."""
LITERAL: Final = b"\x83\x86\4" + bytes([len(PATH)]) + PATH.encode() + MORE


def whole(stream: int, headers: bytes = HEADERS, *, message: bytes = b"hello", between: bytes = b"") -> bytes:
    begin = HeadersFrame(stream, headers, flags=["END_HEADERS"]).serialize()
    data = grpc_message(message)
    pieces = [DataFrame(stream, data[at : at + 2**14]) for at in range(0, len(data), 2**14)]
    pieces[-1].flags.add("END_STREAM")
    return begin + between + b"".join(piece.serialize() for piece in pieces)


def window(stream: int, size: int = 1) -> bytes:
    return WindowUpdateFrame(stream, size).serialize()


def another(size: int) -> bytes:
    """Returns the head of a frame of a kind that is ignored."""
    return size.to_bytes(3, "big") + b"\x20" + bytes(5)


PADDED: Final = DataFrame(7, grpc_message(b"hello"), pad_length=2, flags=["PADDED", "END_STREAM"]).serialize()

NEARLY_STEADY: Final = {
    "steady": [whole(7), whole(9)],
    "headers that mean others now": [whole(7, HEADERS + MORE), whole(9)],
    "headers that enter the table": [whole(7, LITERAL), whole(9, LITERAL), whole(11, LITERAL), whole(13, b"\x83\xc2")],
    "in another frame": [another(len(whole(7)) + 2) + b"xx", whole(7), whole(9)],
    "an old stream": [whole(5)],
    "an even stream": [whole(8)],
    "the last stream": [whole(2**31 - 1), whole(2**31 - 1)],
    "too large a message": [whole(7, message=bytes(LARGEST + 1))],
    "a large message": [whole(7, message=bytes(LARGEST)), whole(9)],
    "too large a frame": [whole(7)[:13] + DataFrame(7, bytes(5 + 2**14), flags=["END_STREAM"]).serialize()],
    "after a farewell": [GoAwayFrame(0).serialize(), whole(7)],
    "too large a window of the call": [whole(7, between=window(7, 2**31 - 1)), whole(9)],
    "windows of the call": [whole(7, between=window(7, 2**30) * 2), whole(9)],
    "too large a window of the connection": [whole(7, between=window(0, 2**31 - 1)), whole(9)],
    "windows without end": [whole(7, between=window(7) * 21_000)],
    "unanswered, with windows and pings": [
        whole(7, between=window(7) * 15_000),
        PingFrame(0, bytes(8)).serialize() * 5000,
    ],
    "no message": [HeadersFrame(7, HEADERS, flags=["END_HEADERS", "END_STREAM"]).serialize(), whole(9)],
    "half a call": [whole(7)[:30], whole(7)[30:], whole(9)],
    "unanswered, two calls": [whole(7) + whole(9), whole(11)],
    "unanswered, and another": [whole(7), whole(9)],
    "data after the end": [whole(7) + DataFrame(7, b"x").serialize()],
    "a window of nothing": [whole(7, between=b"\0\0\4\x08\0\0\0\0\7" + bytes(4))],
    "a window of an old call": [whole(7, between=window(5))],
    "a window of no call": [whole(7, between=window(9))],
    "padding": [HeadersFrame(7, HEADERS, flags=["END_HEADERS"]).serialize() + PADDED],
}


@pytest.mark.parametrize(("name", "parts"), [pytest.param(*one, id=one[0]) for one in NEARLY_STEADY.items()])
def test_nearly_steady_calls_are_taken_as_the_library_takes_them(name: str, parts: list[bytes]) -> None:
    seen = []
    for kind in (Http2Connection, Thorough):
        client = in_steady_state(kind(PATH, LARGEST))
        result: list[object] = []
        for part in parts:
            try:
                result += (calls := client.connection.feed(part))
                for one in calls:
                    if not name.startswith("unanswered"):
                        client.connection.answer(one.stream, b"answer")
            except Violation as error:
                result.append(str(error))
            result += told(client.connection.take(), client.http2.decoder)
        seen.append(result)
    assert seen[0] == seen[1] != []


def told(sent: bytes, decoder: hpack.Decoder) -> Iterator[object]:
    """Yields what the frames say; nothing for windows."""
    for frame in frames(sent):
        match frame:
            case HeadersFrame():
                yield frame.stream_id, [tuple(header) for header in decoder.decode(frame.data)]
            case DataFrame():
                yield frame.stream_id, frame.data
            case RstStreamFrame() | GoAwayFrame():
                yield type(frame), frame.stream_id, frame.error_code
            case PingFrame():
                yield frame.opaque_data


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_the_border_of_frames_is_known_wherever_bytes_are_cut(data: st.DataObject) -> None:
    client = begun(LARGEST)
    client.http2.data_to_send()
    ends = {0}
    stream = b""
    for number in range(data.draw(st.integers(1, 4))):
        client.call(2 * number + 1, grpc_message(bytes(data.draw(st.integers(0, 40)))))
        client.http2.ping(b"12345678")
        stream += client.http2.data_to_send()
    at = 0
    while at < len(stream):
        at += 9 + int.from_bytes(stream[at : at + 3], "big")
        ends.add(at)
    frames, at = FrameReader(0), 0
    while at < len(stream):
        assert frames.is_between_frames() == (at in ends)
        size = data.draw(st.integers(1, 30))
        frames.read(stream[at : at + size])
        at += size
    assert frames.is_between_frames()


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_changed_bytes_are_a_call_only_if_its_parts_fit(data: st.DataObject) -> None:
    client = in_steady_state()
    client.call(7, grpc_message(bytes(range(40))))
    changed = bytearray(client.http2.data_to_send())
    found = whole_call(bytes(changed))
    assert found is not None
    assert (found.message, found.size, found.is_stateless()) == (bytes(range(40)), 45, True)
    assert whole_call(bytes(changed[:-1])) is whole_call(bytes(changed) + b"\0") is None
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(changed) - 1), st.integers(0, 255)), max_size=2)):
        changed[at] = value
    found = whole_call(bytes(changed))
    if found is not None:
        assert found.size == len(found.message) + 5
        assert found.message in bytes(changed)
