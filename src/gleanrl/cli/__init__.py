"""The command line. Each verb has a file of its own."""
