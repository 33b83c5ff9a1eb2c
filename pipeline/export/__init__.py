"""Export writes trained policies to files that games and other programs run."""
