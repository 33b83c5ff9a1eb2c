"""The package holds the records that pass between processes, and the one codec that turns bytes into records.

Records evolve by four rules: a new field has a default, a field never changes its type, a tag is never reused, and the
handshake carries the version.
"""
