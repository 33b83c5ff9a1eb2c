"""Godot RL Agents' protocol."""
