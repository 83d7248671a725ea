"""Other libraries' environments."""
