"""Learning computes returns, losses, updates and checkpoints for one behavior name."""
