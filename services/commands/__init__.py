"""The commands of `sparring`, a module each."""
