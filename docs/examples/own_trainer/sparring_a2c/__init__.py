"""A2C as a trainer of sparring."""
