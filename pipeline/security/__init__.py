"""Reads the folder of keys of a run on several machines.

    DIR/                          mode 700, its files 600
        allowed.yaml              permitted clients of each endpoint
        curve/ROLE.secret         CURVE keys of the services, a pair for each role
        curve/ROLE.public
        tls/authority.pem, .key   the authority that signs the certificates of this folder
        tls/server.pem, .key      of the endpoint for simulators
        tls/NAME.pem, .key        of one simulator each
        token                     for simulators that cannot present a certificate

A machine needs only the files of its own services and simulators: `docs/security.md` lists them. Reading requires the
standard library only (and PyYAML for `allowed`), so that a simulator's machine can do it; `making` requires more.
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
