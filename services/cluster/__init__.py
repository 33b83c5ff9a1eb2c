"""Runs the parts of a run on the nodes of a Ray cluster; only this package imports ray."""
