"""Bridges: simulators of another protocol (Unity, Godot) or another Python interface (Gymnasium, PettingZoo)."""
