"""Actors and critics: from observations to action distributions and values."""
