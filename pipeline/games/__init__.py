"""Contains the simulators that come with sparring, and the registry of simulators by name."""
