"""sparring: trains teams of agents that live in simulators it does not own.

The packages `sparring.pipeline` (the logic of each stage) and `sparring.services` (the processes of a run) are the
folders `pipeline/` and `services/` of the repository. Nothing is imported here, so that a simulator loads only what it
uses.
"""

__version__ = "0.1.0"
