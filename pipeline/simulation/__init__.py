"""What a simulator author uses: needs numpy and msgpack, nothing else.

`Game` is what an author writes, `run` plays it for the trainer, `Client` serves authors who own
their main loop. Built-in games are made by `pipeline.simulation.registry.make`.
"""

from pipeline.messages.simulator import (
    BehaviorActions,
    BehaviorReport,
    Bye,
    Decisions,
    Ends,
    Reset,
    Sampler,
    Statistic,
)
from pipeline.simulation.client import Client, Result, run
from pipeline.simulation.game import Game, decisions, ends
from pipeline.simulation.link import LinkLost
from pipeline.simulation.parameters import Parameters
from pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

__all__ = [
    "ActionSpec",
    "BehaviorActions",
    "BehaviorReport",
    "BehaviorSpec",
    "Bye",
    "Client",
    "Decisions",
    "Ends",
    "Game",
    "LinkLost",
    "ObservationSpec",
    "Parameters",
    "Reset",
    "Result",
    "Sampler",
    "Statistic",
    "decisions",
    "ends",
    "run",
]
