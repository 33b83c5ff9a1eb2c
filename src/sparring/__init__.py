"""sparring: trains teams of agents that live in simulators it does not own.

    import sparring

    result = sparring.train("configs/balance.yaml", {"behaviors.Balance.max_steps": 50_000})
    policy = sparring.load(result.folder)
    actions, memory = policy.act(observations)

The packages `sparring.pipeline` (the logic of each stage) and `sparring.services` (the processes of a run) are the
folders `pipeline/` and `services/` of the repository. Nothing of them is imported before it is used, so that a
simulator loads only what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparring.pipeline.errors import SettingsError, SparringError
    from sparring.pipeline.monitoring.events import Event
    from sparring.services.api.measuring import evaluate, record, tournament
    from sparring.services.api.policies import Acted, Chosen, Policy, load
    from sparring.services.api.runs import Run, RunFailed, RunResult, start, train

__version__ = "0.1.0"

__all__ = [
    "Acted",
    "Chosen",
    "Event",
    "Policy",
    "Run",
    "RunFailed",
    "RunResult",
    "SettingsError",
    "SparringError",
    "evaluate",
    "load",
    "record",
    "start",
    "tournament",
    "train",
]

_MODULES = {
    "sparring.pipeline.errors": ("SettingsError", "SparringError"),
    "sparring.services.api.measuring": ("evaluate", "record", "tournament"),
    "sparring.services.api.policies": ("Acted", "Chosen", "Policy", "load"),
    "sparring.pipeline.monitoring.events": ("Event",),
    "sparring.services.api.runs": ("Run", "RunFailed", "RunResult", "start", "train"),
}


def __getattr__(name: str) -> object:
    """Imports a name of the interface when it is first used."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'sparring' has no attribute {name!r}")
