"""Inputs that nobody would send, for every reader of bytes that strangers or damaged links can reach.

`scripts/fuzz TARGET` runs one; `python -m tests.fuzzers --help` says how.
"""
