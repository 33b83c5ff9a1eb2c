"""Who a simulator is: a certificate of the keys' authority over TLS, or the token in its Hello."""

from __future__ import annotations

import hmac
import re
import ssl
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from anyio.abc import ByteStream
from anyio.streams.tls import TLSAttribute, TLSStream

from sparring.pipeline.errors import RemoteProtocolError, SettingsError
from sparring.pipeline.queues.endpoints import is_open
from sparring.pipeline.security import SIMULATORS, allowed, server_tls, token
from sparring.pipeline.stepping.settings import Accepted

_NUMBERED: Final = re.compile(r"simulator-\d+")


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What an endpoint for simulators asks for.

    Attributes:
        tls: of the endpoint; None where it does not encrypt.
        names: whose certificates are accepted.
        token: that others show; "" where none is accepted.
    """

    tls: ssl.SSLContext | None = None
    names: Collection[str] = ()
    token: str = field(default="", repr=False)

    @property
    def asked(self) -> bool:
        """Whether a simulator has to show something."""
        return self.tls is not None or bool(self.token)

    async def secure(self, stream: ByteStream) -> ByteStream:
        """The stream, encrypted where the endpoint does that.

        Raises:
            OSError: the other side does not speak TLS, or its certificate is not of this authority.
        """
        if self.tls is None:
            return stream
        # Without the farewell of TLS: messages have lengths, so nothing can be cut off unseen.
        return await TLSStream.wrap(stream, server_side=True, ssl_context=self.tls, standard_compatible=False)

    def certified(self, stream: ByteStream) -> str:
        """Name in the certificate that was shown; "" for none.

        Raises:
            RemoteProtocolError: it is none of those that are accepted.
        """
        if self.tls is None:
            return ""
        nothing: dict[str, Any] = {}
        shown: Any = stream.extra(TLSAttribute.peer_certificate, nothing) or nothing  # noqa: S610 (of a stream)
        names = [value for parts in shown.get("subject", ()) for key, value in parts if key == "commonName"]
        name = str(names[0]) if names else ""
        if shown and name not in self.names:
            raise _unknown("a certificate that is not accepted here", "one of a simulator on the list of the keys")
        return name

    def check(self, identity: str, credential: str) -> None:
        """Refuses who has shown no certificate, and whose token is not the one.

        Raises:
            RemoteProtocolError: so it is.
        """
        if identity or not self.asked:
            return
        # In constant time; a token that is not ASCII is compared as bytes.
        if not self.token or not hmac.compare_digest(credential.encode(), self.token.encode()):
            raise _unknown("no valid credential", "a certificate or the token of the keys of this run")

    def check_number(self, identity: str, number: int | None) -> None:
        """Refuses a number that is another simulator's: N is that of the certificate `simulator-N`, if there is one.

        Raises:
            RemoteProtocolError: so it is.
        """
        if number is None or identity == (owner := f"simulator-{number}"):
            return
        if owner in self.names or _NUMBERED.fullmatch(identity):
            raise RemoteProtocolError(
                "number",
                got=f"simulator number {number} with {f'the certificate {identity}' if identity else 'a token'}",
                expected=f"the certificate {owner}",
                remedy="leave the number out, or show the certificate of that number",
            )


def credentials(address: str, keys: Path | None, accepted: Accepted, *, encrypt: bool) -> Credentials:
    """What the endpoint at an address asks for.

    Args:
        address: of the endpoint. A Unix socket asks for nothing: its mode lets only its owner in.
        keys: folder of the keys; None asks for nothing.
        accepted: what simulators may show.
        encrypt: False leaves TCP in the clear: then the token is all that can be shown.

    Raises:
        SettingsError: a file of the keys cannot be used, or a token would be shown in the clear beyond this machine.
    """
    if keys is None or urlsplit(address).scheme == "unix":
        return Credentials()
    if not encrypt and is_open(address):
        raise SettingsError(
            f"got encrypt: false for {address}, which other machines can reach; expected loopback, where a token may "
            "be shown in the clear; leave encrypt out"
        )
    return Credentials(
        tls=server_tls(keys) if encrypt else None,
        names=allowed(keys, SIMULATORS) if encrypt and accepted != "token" else (),
        token=token(keys) if accepted != "certificate" else "",
    )


def _unknown(got: str, expected: str) -> RemoteProtocolError:
    remedy = "use the keys that were made for this run (docs/security.md)"
    return RemoteProtocolError("credential", got=got, expected=expected, remedy=remedy)
