"""The endpoint of stepping accepts simulators and Unity players, checks their credentials and limits their traffic."""
