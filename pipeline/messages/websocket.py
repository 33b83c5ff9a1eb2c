"""A WebSocket carries the messages of a simulator, one in each binary message, without I/O.

Browsers open no other sockets. The library `websockets` does the handshake and the frames; here are the rules that this
endpoint adds: allowed origins, one message of the protocol in each of the WebSocket's, no text, no compression.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from websockets.exceptions import InvalidOrigin, PayloadTooBig
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Origin

from sparring.pipeline.errors import LimitExceeded, RemoteProtocolError
from sparring.pipeline.messages.codec import PREFIX

_SMALL: Final = 2**12
"""Bytes of a fragment that costs hardly more than its bytes."""
_LONGEST_REASON: Final = 123
"""Bytes of a reason in a Close frame."""
_SILENT: Final = logging.getLogger("sparring.websocket")
_SILENT.disabled = True  # a peer could fill a log that has no limits


class WebSocket:
    """A WebSocket is the server's side of one connection, its handshake included.

    Args:
        origins: origins of pages whose scripts may connect; None allows any. Programs other than browsers send none.
        most: bytes of a message; until `allow` is called, of the handshake too.

    Attributes:
        held: bytes received since the last whole message.
        asides: frames received that were no message: Pings, and small fragments of one.
        is_open: the handshake is complete.
        is_closed: a Close frame was received or sent, or the handshake has failed.
    """

    def __init__(self, origins: Sequence[str] | None, most: int) -> None:
        allowed = None if origins is None else [None, *map(Origin, origins)]
        self._protocol = ServerProtocol(origins=allowed, max_size=most, logger=_SILENT)
        self._most = most
        self._fragments: list[bytes] = []
        self.held = 0
        self.asides = 0

    @property
    def is_open(self) -> bool:
        return self._protocol.state is State.OPEN

    @property
    def is_closed(self) -> bool:
        return self._protocol.state in (State.CLOSING, State.CLOSED) or self._protocol.handshake_exc is not None

    def allow(self, most: int) -> None:
        """Replaces the limit of a message."""
        self._most = self._protocol.max_message_size = most

    def receive(self, data: bytes) -> bytes:
        """Returns the whole messages that end with these bytes, one after the other; `to_send` may have an answer.

        Raises:
            RemoteProtocolError: the peer violates the WebSocket protocol, or its origin is not allowed.
            LimitExceeded: a message is too large.
        """
        if self._protocol.eof_sent:  # what follows the end is not read
            return b""
        self.held += len(data)
        self._protocol.receive_data(data)
        messages = [message for event in self._protocol.events_received() for message in self._messages(event)]
        self._check()
        if messages:
            self.held = 0
        elif self.held > 2 * self._most:  # framing may take as much again
            got = f"{self.held} bytes without a whole message"
            self._fail(CloseCode.MESSAGE_TOO_BIG, got)
            raise LimitExceeded(got=got, expected=f"at most {self._most} in a message", remedy="send less at once")
        return b"".join(messages)

    def wrap(self, message: bytes) -> bytes:
        """Returns a message as a binary message; b"" once the connection is closed: nothing may follow a Close."""
        if not self.is_open:
            return b""
        self._protocol.send_binary(message)
        return self.to_send()

    def close(self) -> bytes:
        """Returns a Close frame, unless there was one."""
        if self.is_open:
            self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
        return self.to_send()

    def to_send(self) -> bytes:
        """Returns what is to be sent: an answer to the handshake, to a Ping or to a Close."""
        return b"".join(self._protocol.data_to_send())

    def _messages(self, event: object) -> Sequence[bytes]:
        if isinstance(event, Request):
            self._protocol.send_response(self._protocol.accept(event))
        elif isinstance(event, Frame):
            if event.opcode is Opcode.TEXT:
                self._fail(CloseCode.UNSUPPORTED_DATA, "a text message")
                raise _malformed("a text message", "binary messages")
            if event.opcode in (Opcode.BINARY, Opcode.CONT):
                return self._joined(event)
            self.asides += 1
        return ()

    def _joined(self, frame: Frame) -> Sequence[bytes]:
        """Returns the message that a frame completes, which is one of the protocol's."""
        self._fragments.append(bytes(frame.data))
        if not frame.fin:
            self.asides += len(frame.data) < _SMALL
            return ()
        message, self._fragments = b"".join(self._fragments), []
        size = PREFIX.unpack_from(message)[0] if len(message) >= PREFIX.size else 0
        if not message or size != len(message):
            raise _malformed(f"a binary message of {len(message)} bytes", f"a message of the protocol, here of {size}")
        return (message,)

    def _check(self) -> None:
        """Raises the error that the library has noted."""
        failed, error = self._protocol.handshake_exc, self._protocol.parser_exc
        if isinstance(failed, InvalidOrigin):
            raise RemoteProtocolError(
                "origin",
                got=f"a page of {failed.value}",
                expected="one of pipeline.websocket_origins",
                remedy="add the origin there if its scripts may act as simulators",
            )
        if isinstance(error, PayloadTooBig):
            raise LimitExceeded(got=str(error), expected=f"at most {self._most}", remedy="send less at once")
        if failed is not None or error is not None:
            raise _malformed(f"{failed or error}", "a WebSocket (RFC 6455)")

    def _fail(self, code: CloseCode, reason: str) -> None:
        self._protocol.fail(code, reason[:_LONGEST_REASON])


def _malformed(got: str, expected: str) -> RemoteProtocolError:
    remedy = "see WebSocket in docs/protocol.md"
    return RemoteProtocolError("malformed", got=got, expected=expected, remedy=remedy)
