"""Bridges connect simulators of other protocols (Unity, Godot) and Python interfaces (Gymnasium, PettingZoo)."""
