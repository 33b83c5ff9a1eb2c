"""Shows runs in a browser: their curves, the pipeline, the league of checkpoints, and matches, from their files."""
