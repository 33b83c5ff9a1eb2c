"""Records that cross a process, and the one codec that turns bytes into records.

Evolution: a new field has a default; a field is never retyped; a tag is never used again; the
version is in the handshake.
"""
