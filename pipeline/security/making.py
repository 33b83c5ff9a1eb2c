"""Makes the folder of keys, and adds simulators to one.

Certificates of simulators and their endpoint are signed by the folder's authority (X.509, P-256, SHA-256).
"""

import datetime as dt
import inspect
import ipaddress
import re
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.files import write_atomically
from sparring.pipeline.security import allowed, read_text

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_HOST: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?|::1")
_RESERVED: Final = ("authority", "server")
_HEAD: Final = b"""\
# Names of the simulators whose certificates are accepted.
# Remove a name to lock it out. Services read this file when they start.
"""

LIFETIME: Final = dt.timedelta(days=5 * 365)
_write: Final = partial(write_atomically, mode=0o600)
_SKEW: Final = dt.timedelta(days=1)
"""Certificates are valid from a day before their making, because clocks of machines differ."""

_USAGES: Final = tuple(inspect.signature(x509.KeyUsage).parameters)
"""Uses of a key that a certificate allows or forbids (RFC 5280, 4.2.1.3)."""


class Identity(NamedTuple):
    """Holds a certificate with its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make(directory: Path, simulators: Sequence[str], hosts: Sequence[str] = ()) -> None:
    """Makes a folder of keys, completely or not at all.

    Args:
        directory: a folder that does not exist or is empty.
        simulators: names of the simulators.
        hosts: names and addresses at which simulators reach the endpoint, other than loopback.

    Raises:
        SettingsError: the folder holds files, cannot be made, or a name is invalid.
    """
    _check_names(simulators)
    _check_hosts(hosts)
    directory = directory.absolute()
    try:
        if directory.exists() and any(directory.iterdir()):
            raise SettingsError(
                f"got {directory}, which holds files; expected a new folder: keys are never overwritten; "
                "name another, or add simulators to this one with --add"
            )
        directory.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))  # mode 700
        try:
            _fill(made, simulators, [*LOOPBACK, *hosts])
            made.replace(directory)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    except OSError as error:
        raise SettingsError(
            f"got the folder {directory}, which cannot be made ({error.strerror}); expected a place for keys; "
            "name another, or make its parent writable"
        ) from None


def add(directory: Path, simulators: Sequence[str]) -> None:
    """Makes certificates for more simulators, for all of them or for none.

    Args:
        directory: folder of the keys, with those of the authority.
        simulators: new names.

    Raises:
        SettingsError: a name exists or is invalid, or the authority is missing.
    """
    _check_names(simulators)
    tls, listed = directory / "tls", allowed(directory)
    known = listed | {path.stem for path in tls.glob("*")}
    if there := [name for name in simulators if name in known]:
        raise SettingsError(
            f"got the simulator {there[0]!r}, which has a certificate; expected new names: keys are never overwritten; "
            f"choose another, or delete its files in {tls} where an interrupted `keys --add` has left them"
        )
    try:
        _write_clients(tls, simulators, _signer(tls))
        _write_list(directory, [*sorted(listed), *simulators])
    except BaseException:
        for name in simulators:
            for suffix in (".key", ".pem"):
                (tls / f"{name}{suffix}").unlink(missing_ok=True)
        raise


def numbered(count: int, directory: Path | None = None) -> list[str]:
    """Returns `count` names, "simulator-0" and up, that the folder does not use."""
    used = set() if directory is None else {path.stem for path in (directory / "tls").glob("*.pem")}
    names = (f"simulator-{number}" for number in range(count + len(used)))
    return [name for name in names if name not in used][:count]


def _fill(directory: Path, simulators: Sequence[str], hosts: Sequence[str]) -> None:
    tls = directory / "tls"
    tls.mkdir(mode=0o700)
    alone = x509.BasicConstraints(ca=True, path_length=0)  # it signs no further authority
    signer = _issued(None, "sparring keys", alone, _usage("key_cert_sign", "crl_sign"))
    _write_identity(tls, "authority", signer)
    _write_identity(tls, "server", _signed(signer, "server", ExtendedKeyUsageOID.SERVER_AUTH, hosts))
    _write_clients(tls, simulators, signer)
    _write(directory / "token", f"{secrets.token_urlsafe(32)}\n".encode())
    _write_list(directory, simulators)


def _write_identity(folder: Path, name: str, identity: Identity) -> None:
    """Writes a certificate and its key, which is not encrypted, for their owner only."""
    pem = serialization.Encoding.PEM
    key = identity.key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write(folder / f"{name}.key", key)
    _write(folder / f"{name}.pem", identity.certificate.public_bytes(pem))


def _write_clients(folder: Path, names: Sequence[str], signer: Identity) -> None:
    """Writes an identity for each simulator."""
    for name in names:
        _write_identity(folder, name, _signed(signer, name, ExtendedKeyUsageOID.CLIENT_AUTH, [name]))


def _write_list(directory: Path, simulators: Sequence[str]) -> None:
    text = yaml.safe_dump({"simulators": list(simulators)}, default_flow_style=None)
    _write(directory / "allowed.yaml", _HEAD + text.encode())


def _signer(tls: Path) -> Identity:
    pem = read_text(tls / "authority.pem", secret=False).encode()
    key = read_text(tls / "authority.key", secret=True).encode()
    try:
        private = serialization.load_pem_private_key(key, password=None)
        certificate = x509.load_pem_x509_certificate(pem)
    except (ValueError, TypeError):  # or it has a password
        private = None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise SettingsError(
            f"got {tls / 'authority.pem'} or its key, which cannot be used; expected the authority of these keys; "
            "copy both from the machine on which they were made"
        )
    return Identity(certificate=certificate, key=private)


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name) or name in _RESERVED:
            raise SettingsError(
                f"got the simulator {name!r}; expected a name of letters, digits, - and _, not one of {_RESERVED}; "
                "choose another"
            )
    if len(set(names)) < len(names):
        raise SettingsError(f"got {list(names)}; expected each name once; remove the duplicate")


def _check_hosts(hosts: Sequence[str]) -> None:
    for host in hosts:
        if not _HOST.fullmatch(host) or host in ("0.0.0.0", "::"):  # noqa: S104 - refused here
            raise SettingsError(
                f"got the host {host!r}; expected a name or an address at which simulators connect; "
                "write it without a port"
            )


def _signed(signer: Identity, name: str, purpose: x509.ObjectIdentifier, hosts: Sequence[str]) -> Identity:
    """Makes an identity for one purpose, valid under the names and addresses of `hosts`."""
    return _issued(
        signer,
        name,
        x509.BasicConstraints(ca=False, path_length=None),
        _usage("digital_signature"),
        x509.ExtendedKeyUsage([purpose]),
        x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys(hosts)]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key()),
    )


def _issued(signer: Identity | None, name: str, *extensions: x509.ExtensionType) -> Identity:
    """Makes a key and its certificate, signed by `signer` or, without one, by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if signer is None else signer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    for extension in extensions:
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, critical=critical)
    return Identity(certificate=builder.sign(key if signer is None else signer.key, hashes.SHA256()), key=key)


def _usage(*names: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: name in names for name in _USAGES})


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
