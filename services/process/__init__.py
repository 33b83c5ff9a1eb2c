"""What every process of a run has: its context, its place on a machine, its keys, and its end."""
