"""Demonstrations: recorded episodes that are learned from; their files, and those of others."""
