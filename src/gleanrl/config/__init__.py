"""Settings of a run: their sections, reading them from files and the command line, and checking them."""
