"""Coordination decides who may step and who plays whom, and accounts for every step."""
