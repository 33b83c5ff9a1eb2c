"""Coordination: routes segments, keeps the books, and bounds how old data can be."""
