"""The folder of keys of a run that other machines take part in.

    DIR/                          mode 700, its files 600
        allowed.yaml              who may connect to what
        curve/ROLE.secret         CURVE keys of the services, a pair for each role
        curve/ROLE.public
        tls/authority.pem, .key   what signs the certificates of this folder
        tls/server.pem, .key      of the endpoint for simulators
        tls/NAME.pem, .key        of one simulator each
        token                     for simulators that cannot show a certificate

A machine needs of it only what its services and simulators use: `docs/security.md` lists that. Reading
takes the standard library (and PyYAML for `allowed`), so that a simulator's machine can; `making` takes more.
"""

from sparring.pipeline.security.folder import (
    CONNECTIONS,
    ROLES,
    SIMULATORS,
    CurveKeys,
    allowed,
    endpoint_role,
    owner,
    public_key,
    read_curve,
    token,
)
from sparring.pipeline.security.tls import client_tls, server_tls

__all__ = [
    "CONNECTIONS",
    "ROLES",
    "SIMULATORS",
    "CurveKeys",
    "allowed",
    "client_tls",
    "endpoint_role",
    "owner",
    "public_key",
    "read_curve",
    "server_tls",
    "token",
]
