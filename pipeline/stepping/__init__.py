"""Stepping: acts for all agents of all simulators, in batches, with the current weights."""
