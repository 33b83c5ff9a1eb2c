"""Selects gRPC's polling of Unity's package, whose C core is older than the event engine.

There the calling thread polls the socket itself; with the event engine each call wakes other threads three times. The
C core reads this variable when it is imported.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")

import grpc

__all__ = ["grpc"]
