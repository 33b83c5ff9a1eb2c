"""Compliance: checks a foreign simulator against the protocol."""
