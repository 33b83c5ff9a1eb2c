"""Makes TLS contexts for the endpoint of simulators and its clients, from the folder of keys."""

from __future__ import annotations

import ssl
from pathlib import Path

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.security.folder import refuse_open


def server_tls(directory: Path) -> ssl.SSLContext:
    """Returns the context of the simulators' endpoint. A client may present a certificate of this folder's authority.

    A client without a certificate has to send the token, which the conversation checks.

    Raises:
        SettingsError: a file is missing, is no certificate or key, or is readable by others.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # all game engines support at least this version
    context.verify_mode = ssl.CERT_OPTIONAL
    context.options |= ssl.OP_NO_COMPRESSION | getattr(ssl, "OP_NO_RENEGOTIATION", 0)
    context.num_tickets = 0  # each connection presents its certificate
    _trust(context, directory)
    _show(context, directory, "server")
    return context


def client_tls(directory: Path, name: str = "") -> ssl.SSLContext:
    """Returns the context of a simulator.

    Args:
        directory: folder of the keys.
        name: name of the simulator whose certificate is presented; "" presents none.

    Raises:
        SettingsError: as `server_tls`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _trust(context, directory)
    if name:
        _show(context, directory, name)
    return context


def _trust(context: ssl.SSLContext, directory: Path) -> None:
    path = directory / "tls" / "authority.pem"
    try:
        refuse_open(path, path.stat().st_mode, secret=False)
        context.load_verify_locations(cafile=path)
    except OSError as error:  # SSLError too
        raise _unusable(path, error) from None


def _show(context: ssl.SSLContext, directory: Path, name: str) -> None:
    certificate, key = (directory / "tls" / f"{name}.{ending}" for ending in ("pem", "key"))
    try:
        refuse_open(certificate, certificate.stat().st_mode, secret=False)
        refuse_open(key, key.stat().st_mode, secret=True)
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except OSError as error:
        raise _unusable(certificate, error) from None


def _refuse_password() -> str:
    raise SettingsError("got a key with a password; expected one without; make new keys with `sparring keys`")


def _unusable(path: Path, error: OSError) -> SettingsError:
    reason = getattr(error, "reason", None) or error.strerror
    return SettingsError(
        f"got {path} or its key, which cannot be used ({reason}); expected a certificate and its key; "
        "make them with `sparring keys`, or copy both from the machine on which they were made"
    )
