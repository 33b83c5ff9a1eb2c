"""Plays PettingZoo environments as games.

make            finds a module and makes its environments
teams           behaviors, teams and groups of the agents
agents          agents and spaces of an environment, with clear errors
game            what both forms share: episodes, ids, and the columns of a frame
parallel        environments whose agents act at once
turns           environments whose agents act in turn
"""

from sparring.pipeline.bridges.pettingzoo.make import make_pettingzoo

__all__ = ["make_pettingzoo"]
