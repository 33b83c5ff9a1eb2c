"""Learning: returns, losses, updates and checkpoints of one behavior name."""
