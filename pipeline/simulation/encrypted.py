"""Encrypts the connection to the trainer with TLS, and finds the simulator's credentials."""

import os
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sparring.pipeline import security
from sparring.pipeline.errors import RemoteProtocolError, SettingsError

_WRONG_HOST: Final = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""

_COPY: Final = "copy the keys from the machine on which `sparring keys` made them (docs/security.md)"

NOT_READY: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Errors of a socket that cannot be read or written now; TLS may have to exchange bytes of its own first."""

HANDSHAKE_S: Final = 15.0
"""Time for the handshake with a busy trainer; a simulator that tries again goes to the end of its queue."""


def credential_of(
    address: str, keys: str | Path | None, name: str, credential: str, environ: Mapping[str, str] | None = None
) -> tuple[ssl.SSLContext | None, str]:
    """Returns a simulator's credentials: a context for TLS (None for none) and the token of its Hello ("" for none).

    Args:
        address: address of the trainer; a Unix socket is not encrypted.
        keys: folder of the keys; None: $SPARRING_KEYS, "" for none.
        name: name of the certificate to present; "": $SPARRING_NAME; without either, the token of the keys is sent.
        credential: token in place of the keys' own; "": $SPARRING_CREDENTIAL.
        environ: environment variables; None: those of this process.

    Raises:
        SettingsError: a file of the keys cannot be used.
    """
    variables = os.environ if environ is None else environ
    credential = credential or variables.get("SPARRING_CREDENTIAL", "")
    folder = variables.get("SPARRING_KEYS", "") if keys is None else str(keys)
    name = name or variables.get("SPARRING_NAME", "")
    if not folder and name:
        raise SettingsError(f"got the name {name!r} without keys; expected the folder of the keys; give it with --keys")
    if not folder or address.startswith("unix:"):
        return None, credential
    context = security.client_tls(Path(folder), name)
    return context, credential or ("" if name else security.token(Path(folder)))


def encrypt(connected: socket.socket, tls: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    """Returns the encrypted connection; closes it if encryption fails.

    Raises:
        OSError: the connection broke, or no answer came in time.
        RemoteProtocolError: the other side does not have the trainer's keys.
    """
    connected.settimeout(HANDSHAKE_S)
    try:
        return tls.wrap_socket(connected, server_hostname=host)
    except BaseException as error:
        connected.close()
        if (refusal := credential_error(error)) is not None:
            raise refusal from error
        raise


def credential_error(error: BaseException) -> RemoteProtocolError | None:
    """Returns what is wrong with the keys of either side, if `error` reports that; trying again does not help."""
    if not isinstance(error, ssl.SSLError):
        return None
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _WRONG_HOST:
            return _refusal(
                f"a trainer whose certificate is for other addresses ({error.verify_message.rstrip('.')})",
                "one of the addresses in its certificate",
                "include this address when the keys are made: `sparring keys DIR --hosts ...` (docs/security.md)",
            )
        return _refusal(f"a trainer whose certificate is not valid: {error.verify_message}", "the trainer's keys")
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return _refusal(f"a trainer that does not accept this certificate ({reason.lower()})", "the keys of its run")
    if reason == "WRONG_VERSION_NUMBER":
        return _refusal("a trainer that does not encrypt", "one with pipeline.keys, or no keys here")
    return None


def has_unread(connected: socket.socket) -> bool:
    """Returns whether TLS holds received bytes that `select` cannot see."""
    return isinstance(connected, ssl.SSLSocket) and bool(connected.pending())


def _refusal(got: str, expected: str, remedy: str = _COPY) -> RemoteProtocolError:
    return RemoteProtocolError("credential", got=got, expected=expected, remedy=remedy)
