"""Evaluation plays without learning: it selects the episodes that count, records them and computes statistics."""
