"""Services protect their queue ends with keys from the folder of keys."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sparring.pipeline.queues.curve import Curve, Protection
from sparring.pipeline.security import allowed, endpoint_role, owner, public_key, secret_key
from sparring.pipeline.settings.hosts import machines, place
from sparring.services.process.runtime import Run


def curve(folder: Path, role: str, names: Iterable[str]) -> Curve:
    """Returns the keys of a service.

    Args:
        folder: of keys.
        role: of the service.
        names: of all queues and topics ("topic:NAME") of the run.

    Raises:
        SettingsError: a key or the list is missing, or others can read or change it.
    """
    kinds = {name: endpoint_role(name) for name in names}
    lists = {kind: allowed(folder, kind) for kind in set(kinds.values())}
    known = {one: public_key(folder, one) for one in {*map(owner, lists), *frozenset[str]().union(*lists.values())}}
    return Curve(
        public=public_key(folder, role),
        secret=secret_key(folder, role),
        servers={name: known[owner(kind)] for name, kind in kinds.items()},
        clients={name: frozenset(known[one] for one in lists[kind]) for name, kind in kinds.items()},
    )


def protection(run: Run, names: Iterable[str], service: str, host: str | None = None) -> Protection:
    """Returns the protection of the queue ends of a service.

    Args:
        run: run of the service.
        names: of all queues and topics ("topic:NAME") of the run.
        service: such as "learning-Ball", or "supervisor".
        host: host that it runs on; None for the one in the run's settings.

    Raises:
        SettingsError: as `curve`.
    """
    here = place(run.hosts, service) if host is None else host
    keys = None if run.keys is None else curve(run.keys, service.partition("-")[0], names)
    return Protection(curve=keys, insecure=run.insecure, machines=machines(run.hosts, here))
