"""TLS between a simulator and the trainer, and what it shows there. `ssl` is loaded where keys are used."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sparring.pipeline.errors import RemoteProtocolError, SettingsError

if TYPE_CHECKING:
    import ssl

_OTHER_NAME: Final = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL."""

_COPY: Final = "copy the keys from where `sparring keys` made them (docs/security.md)"

HANDSHAKE_S: Final = 15.0
"""Of a trainer with a crowd at its door: who gives up and comes again stands at the end of the queue."""


def credential_of(
    address: str, keys: str | Path | None, name: str, credential: str, environ: Mapping[str, str] | None = None
) -> tuple[ssl.SSLContext | None, str]:
    """What a simulator shows: a context for TLS (None for none), and the token of its Hello ("" for none).

    Args:
        address: of the trainer. A Unix socket is not encrypted.
        keys: folder of the keys; None: $SPARRING_KEYS, "" for none.
        name: whose certificate is shown; "": $SPARRING_NAME; without that the token of the keys is.
        credential: the token, where it is not that of the keys; "": $SPARRING_CREDENTIAL.
        environ: variables; None: the process's own.

    Raises:
        SettingsError: a file of the keys cannot be used.
    """
    variables = os.environ if environ is None else environ
    credential = credential or variables.get("SPARRING_CREDENTIAL", "")
    folder = variables.get("SPARRING_KEYS", "") if keys is None else str(keys)
    name = name or variables.get("SPARRING_NAME", "")
    if not folder and name:
        raise SettingsError(f"got the name {name!r} without keys; expected their folder; name it with --keys")
    if not folder or address.startswith("unix:"):
        return None, credential
    from sparring.pipeline import security as kept

    context = kept.client_tls(Path(folder), name)
    return context, credential or ("" if name else kept.token(Path(folder)))


def encrypt(connected: socket.socket, tls: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    """The connection, encrypted; closed where that fails.

    Raises:
        OSError: the connection broke, or no answer came in time.
        RemoteProtocolError: whoever answered does not have the trainer's keys.
    """
    connected.settimeout(HANDSHAKE_S)
    try:
        return tls.wrap_socket(connected, server_hostname=host)
    except OSError as error:
        connected.close()
        if (refusal := refused(error)) is not None:
            raise refusal from error
        raise
    except BaseException:
        connected.close()
        raise


def refused(error: OSError) -> RemoteProtocolError | None:
    """What is wrong with the keys of either side, where `error` tells that: trying again does not help."""
    library = sys.modules.get("ssl")
    if library is None or not isinstance(error, library.SSLError):
        return None
    reason = error.reason or ""
    if isinstance(error, library.SSLCertVerificationError):
        if error.verify_code in _OTHER_NAME:
            return _refusal(
                f"a trainer whose certificate is for other addresses ({error.verify_message.rstrip('.')})",
                "one of those by which it was made to be called",
                "name this one, too, when the keys are made: `sparring keys DIR --hosts ...` (docs/security.md)",
            )
        return _refusal(f"a trainer whose certificate does not hold: {error.verify_message}", "the trainer's keys")
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return _refusal(f"a trainer that does not accept this certificate ({reason.lower()})", "the keys of its run")
    if reason == "WRONG_VERSION_NUMBER":
        return _refusal("a trainer that does not encrypt", "one with pipeline.keys, or no keys here")
    return None


def wants_more(error: OSError) -> bool:
    """Whether TLS has to hear or say more of its own before it can go on."""
    library = sys.modules.get("ssl")
    return library is not None and isinstance(error, library.SSLWantReadError | library.SSLWantWriteError)


def unread(connected: socket.socket) -> bool:
    """Whether TLS holds received bytes, of which the system knows nothing."""
    pending = getattr(connected, "pending", None)
    return pending is not None and bool(pending())


def _refusal(got: str, expected: str, remedy: str = _COPY) -> RemoteProtocolError:
    return RemoteProtocolError("credential", got=got, expected=expected, remedy=remedy)
