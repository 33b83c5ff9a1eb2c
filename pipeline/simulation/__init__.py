"""The public interface for authors of simulators needs numpy and msgpack, nothing else.

An author writes a `Game`, and `run` plays it for the trainer. `Client` serves authors who own their main loop.
`sparring.pipeline.games.registry.make` makes the built-in games.
"""

from sparring.pipeline.messages.simulator import (
    BehaviorActions,
    BehaviorReport,
    Bye,
    Decisions,
    Ends,
    Reset,
    Sampler,
    Statistic,
)
from sparring.pipeline.simulation.client import Result, run
from sparring.pipeline.simulation.connection import Client
from sparring.pipeline.simulation.game import Game, decisions, ends
from sparring.pipeline.simulation.link import LinkLost
from sparring.pipeline.simulation.parameters import Parameters
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

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
