"""Stepping chooses the actions of all agents of all simulators, in batches, with the current weights."""
