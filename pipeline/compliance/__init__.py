"""Checks foreign simulators against the protocol."""
