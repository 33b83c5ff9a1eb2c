"""Simulators authenticate with a certificate of the keys' authority over TLS, or with the token in their Hello."""

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
from sparring.pipeline.security import allowed, server_tls, token
from sparring.pipeline.stepping.settings import Accepted

_NUMBERED: Final = re.compile(r"simulator-\d+")


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Credentials are what an endpoint requires of simulators.

    Attributes:
        tls: context of the endpoint; None where it does not encrypt.
        names: names whose certificates are accepted.
        token: accepted token; "" where none is accepted.
    """

    tls: ssl.SSLContext | None = None
    names: Collection[str] = ()
    token: str = field(default="", repr=False)

    @property
    def required(self) -> bool:
        """Returns whether a simulator must authenticate."""
        return self.tls is not None or bool(self.token)

    async def secure(self, stream: ByteStream) -> ByteStream:
        """Returns the stream, encrypted where the endpoint encrypts.

        Raises:
            OSError: the other side does not speak TLS, or its certificate is not of this authority.
        """
        if self.tls is None:
            return stream
        # Without the closing alert of TLS: messages have lengths, so truncation is noticed.
        return await TLSStream.wrap(stream, server_side=True, ssl_context=self.tls, standard_compatible=False)

    def certificate_name(self, stream: ByteStream) -> str:
        """Returns the name in the peer's certificate; "" for none.

        Raises:
            RemoteProtocolError: the name is not accepted.
        """
        if self.tls is None:
            return ""
        certificate: Any = stream.extra(TLSAttribute.peer_certificate, None) or {}  # noqa: S610 (of a stream)
        names = [value for parts in certificate.get("subject", ()) for key, value in parts if key == "commonName"]
        name = str(names[0]) if names else ""
        if certificate and name not in self.names:
            raise _unknown("a certificate that is not accepted here", "one of a simulator on the list of the keys")
        return name

    def check(self, identity: str, credential: str) -> None:
        """Rejects a simulator without a certificate or the right token.

        Raises:
            RemoteProtocolError: it has neither.
        """
        if identity or not self.required:
            return
        # In constant time; a token that is not ASCII is compared as bytes.
        if not self.token or not hmac.compare_digest(credential.encode(), self.token.encode()):
            raise _unknown("no valid credential", "a certificate or the token of the keys of this run")

    def check_number(self, identity: str, number: int | None) -> None:
        """Rejects another simulator's number: number N belongs to the certificate `simulator-N`, if there is one.

        Raises:
            RemoteProtocolError: the number belongs to another simulator.
        """
        if number is None or identity == (owner := f"simulator-{number}"):
            return
        if owner in self.names or _NUMBERED.fullmatch(identity):
            raise RemoteProtocolError(
                "number",
                got=f"simulator number {number} with {f'the certificate {identity}' if identity else 'a token'}",
                expected=f"the certificate {owner}",
                remedy="leave the number out, or use the certificate of that number",
            )


def credentials(address: str, keys: Path | None, accepted: Accepted, *, encrypt: bool) -> Credentials:
    """Returns the credentials that the endpoint at an address requires.

    Args:
        address: of the endpoint. A Unix socket requires none: its mode admits only its owner.
        keys: folder of the keys; None requires none.
        accepted: kinds of credentials that simulators may use.
        encrypt: False leaves TCP unencrypted: then only the token is possible.

    Raises:
        SettingsError: a file of the keys cannot be used, or a token would leave this machine unencrypted.
    """
    if keys is None or urlsplit(address).scheme == "unix":
        return Credentials()
    if not encrypt and is_open(address):
        raise SettingsError(
            f"got encrypt: false for {address}, which other machines can reach; expected loopback, where a token may "
            "be sent unencrypted; leave encrypt out"
        )
    return Credentials(
        tls=server_tls(keys) if encrypt else None,
        names=allowed(keys) if encrypt and accepted != "token" else (),
        token=token(keys) if accepted != "certificate" else "",
    )


def _unknown(got: str, expected: str) -> RemoteProtocolError:
    remedy = "use the keys that were made for this run (docs/security.md)"
    return RemoteProtocolError("credential", got=got, expected=expected, remedy=remedy)
