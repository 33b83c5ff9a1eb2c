"""Makes certificates for simulators and their endpoint, signed by the folder's authority (X.509, P-256, SHA-256)."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = dt.timedelta(days=5 * 365)
_SKEW = dt.timedelta(days=1)
"""Certificates are valid from a day before their making, because clocks of machines differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Holds a certificate with its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        """Returns the certificate in PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """Returns the private key in PEM, not encrypted."""
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def load(pem: bytes, key_pem: bytes) -> Identity:
    """Returns an identity from its files.

    Raises:
        ValueError: the files hold something else.
    """
    key = serialization.load_pem_private_key(key_pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is of another kind")  # noqa: TRY004 - the same class for every error in the files
    return Identity(certificate=x509.load_pem_x509_certificate(pem), key=key)


def authority() -> Identity:
    """Makes an authority, which signs the other certificates but no further authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("sparring keys")
    usage = _usage(key_cert_sign=True, crl_sign=True)
    builder = (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return Identity(certificate=builder.sign(key, hashes.SHA256()), key=key)


def server(signer: Identity, hosts: Sequence[str]) -> Identity:
    """Makes the identity of the simulators' endpoint.

    Args:
        signer: the authority.
        hosts: names and addresses at which simulators reach it.
    """
    return _signed(signer, "server", ExtendedKeyUsageOID.SERVER_AUTH, [_general_name(host) for host in hosts])


def client(signer: Identity, name: str) -> Identity:
    """Makes the identity of the simulator `name`."""
    return _signed(signer, name, ExtendedKeyUsageOID.CLIENT_AUTH, [x509.DNSName(name)])


def _signed(signer: Identity, name: str, purpose: x509.ObjectIdentifier, names: Sequence[x509.GeneralName]) -> Identity:
    key = ec.generate_private_key(ec.SECP256R1())
    public = signer.key.public_key()
    builder = (
        _builder(_name(name), signer.certificate.subject, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
    )
    return Identity(certificate=builder.sign(signer.key, hashes.SHA256()), key=key)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
