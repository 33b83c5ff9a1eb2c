"""Implements the protocol of Godot RL Agents."""
