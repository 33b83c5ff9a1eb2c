"""Demonstrations are recorded episodes to learn from; this package reads and writes their files, and reads Unity's."""
