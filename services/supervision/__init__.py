"""Supervision: plans the processes of a run, starts, watches, restarts and stops them, on one machine or several."""
