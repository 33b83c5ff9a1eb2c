"""Playing without learning: which episodes count, how they are recorded, what they say of a policy."""
