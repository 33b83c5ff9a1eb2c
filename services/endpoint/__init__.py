"""The endpoint of stepping: sockets of simulators and Unity players, their admission, limits and credentials."""
