"""The environment ``dataset``: makes tasks from the rows of a data set."""
