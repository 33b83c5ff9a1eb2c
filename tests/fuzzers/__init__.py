"""Malformed inputs for every reader of bytes from unauthenticated peers or damaged links.

`scripts/fuzz TARGET` runs one; `python -m tests.fuzzers --help` says how.
"""
