"""Reads the folder of keys for simulators on other machines, and makes TLS contexts from it.

    DIR/                          mode 700, its files 600
        allowed.yaml              names of the simulators whose certificates are accepted
        tls/authority.pem, .key   the authority that signs the certificates of this folder
        tls/server.pem, .key      of the endpoint for simulators
        tls/NAME.pem, .key        of one simulator each
        token                     for simulators that cannot present a certificate

A machine needs only the files of its own services and simulators: `docs/security.md` lists them. Reading requires the
standard library only (and PyYAML for `allowed`), so that a simulator's machine can do it; `making` requires more. Files
that others could read or change are rejected, and no message contains a key.
"""

import os
import re
import ssl
from pathlib import Path
from typing import Final

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.files import DAMAGE, regular

KEY_FILE: Final = "services.key"
"""File in the folder of a run with the CURVE key that its services share; each run makes one for itself."""

_KEY: Final = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85
_TOKEN: Final = re.compile(r".{32,}", re.DOTALL)


def secret_key(directory: Path) -> str:
    """Returns the key of the services, in Z85.

    Raises:
        SettingsError: the file is missing, holds no key, or is readable by others.
    """
    return _secret(directory / KEY_FILE, _KEY, "a CURVE key of 40 characters")


def allowed(directory: Path) -> frozenset[str]:
    """Returns the names of the simulators that may connect with a certificate.

    Args:
        directory: folder of the keys.

    Raises:
        SettingsError: the list is missing, is no list of names, or is writable by others.
    """
    import yaml  # a simulator's machine may lack it, but reads no list

    path = directory / "allowed.yaml"
    try:
        lists = yaml.safe_load(read_text(path, secret=False))
    except (yaml.YAMLError, *DAMAGE):  # such as a date that does not exist, or brackets without end
        lists = None
    names = lists.get("simulators") if isinstance(lists, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SettingsError(
            f"got {path}, which has no list of names of simulators; expected the names that may connect; "
            "write `simulators: [...]`, or make new keys with `sparring keys`"
        )
    return frozenset(names)


def token(directory: Path) -> str:
    """Returns the token of simulators without a certificate. Raises as `secret_key`."""
    return _secret(directory / "token", _TOKEN, "a token of at least 32 characters")


def _secret(path: Path, form: re.Pattern[str], expected: str) -> str:
    text = read_text(path, secret=True).strip()
    if not form.fullmatch(text):
        raise _no_key(path, expected)
    return text


def read_text(path: Path, *, secret: bool) -> str:
    """Returns the text of a file of keys, and checks the permissions of the opened file.

    Args:
        path: path of the file.
        secret: whether others must not read it.

    Raises:
        SettingsError: the file is missing, or others can read or change it.
    """
    try:
        with regular(path).open("rb") as file:
            refuse_open(path, os.fstat(file.fileno()).st_mode, secret=secret)
            return file.read(2**20).decode("ascii")
    except OSError as error:
        raise SettingsError(
            f"got {path}, which cannot be read ({error.strerror}); expected a file of keys; "
            "make them with `sparring keys`, or copy this one from the machine on which they were made"
        ) from None
    except UnicodeDecodeError:
        raise _no_key(path, "text in ASCII") from None


def refuse_open(path: Path, mode: int, *, secret: bool) -> None:
    """Rejects a file that others than its owner can change, or read if it is secret.

    Raises:
        SettingsError: others can do so.
    """
    others = 0o077 if secret else 0o022
    if os.name == "posix" and mode & others:
        can = "read" if secret else "change"
        raise SettingsError(
            f"got {path} with mode {mode & 0o777:o}, which others can {can}; expected mode 600; "
            f"run `chmod 600 {path}`, and make new keys if another user may have done so"
        )


def _no_key(path: Path, expected: str) -> SettingsError:
    return SettingsError(
        f"got {path}, whose content is something else; expected {expected}; make new keys with `sparring keys`"
    )


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
    _load(context, directory, "server")
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
    _load(context, directory, name)
    return context


def _load(context: ssl.SSLContext, directory: Path, name: str) -> None:
    """Makes a context trust the folder's authority and, with a name, present its certificate."""
    path = directory / "tls" / "authority.pem"
    try:
        refuse_open(path, regular(path).stat().st_mode, secret=False)
        context.load_verify_locations(cafile=path)
        if name:
            path = path.with_name(f"{name}.pem")
            key = path.with_suffix(".key")
            refuse_open(path, regular(path).stat().st_mode, secret=False)
            refuse_open(key, regular(key).stat().st_mode, secret=True)
            context.load_cert_chain(path, key, password=_refuse_password)
    except OSError as error:  # SSLError too
        reason = getattr(error, "reason", None) or error.strerror
        raise SettingsError(
            f"got {path} or its key, which cannot be used ({reason}); expected a certificate and its key; "
            "make them with `sparring keys`, or copy both from the machine on which they were made"
        ) from None


def _refuse_password() -> str:
    raise SettingsError("got a key with a password; expected one without; make new keys with `sparring keys`")
