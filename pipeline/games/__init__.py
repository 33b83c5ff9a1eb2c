"""Games: the simulators that come with sparring, and the names by which simulators are found."""
