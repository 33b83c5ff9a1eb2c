"""The table of faults: each row injects one fault into a run and judges the result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.faults.bench import ABSENCE_S, PAUSE_S, Bench, Outcome
from tests.faults.disk_faults import fill_disk
from tests.faults.link_faults import LINKS, link, network_down, reset_services, services_down
from tests.faults.process_faults import (
    exhaust_restarts,
    hang,
    hang_simulator,
    kill,
    kill_and_stop,
    kill_supervisor,
    pause,
)
from tests.faults.trial import SERVICES

ROWS: dict[str, Callable[[Bench], Outcome]] = {
    **{f"{part} killed": partial(kill, part) for part in ("simulator-0", "watcher-0", *SERVICES)},
    **{f"{part} killed, then Ctrl-C": partial(kill_and_stop, part) for part in SERVICES},
    **{f"{part} stopped {PAUSE_S:g} s": partial(pause, part) for part in ("simulator-0", *SERVICES)},
    **{f"{part} hangs": partial(hang, part) for part in SERVICES},
    "simulator-0 hangs": hang_simulator,
    **{f"link {kind}": partial(link, kind) for kind in LINKS},
    f"network down {PAUSE_S:g} s": partial(network_down, PAUSE_S, "briefly-down"),
    f"network down {ABSENCE_S:g} s": partial(network_down, ABSENCE_S, "down-beyond-deadline"),
    "links of services reset": reset_services,
    f"links of services down {PAUSE_S:g} s": services_down,
    "supervisor killed": kill_supervisor,
    "disk full, then freed": partial(fill_disk, freed=True),
    "disk full": partial(fill_disk, freed=False),
    **{f"{part} killed too often": partial(exhaust_restarts, part) for part in ("simulator-0", *SERVICES)},
}


__all__ = ["ROWS", "Bench", "Outcome"]
