"""Tasks from rows of a data set."""
