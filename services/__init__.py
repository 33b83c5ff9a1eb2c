"""Processes of a run: each feeds one stage of `pipeline` and moves its records."""
