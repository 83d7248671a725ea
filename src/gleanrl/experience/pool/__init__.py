"""The pool of past successes: one SQLite file."""
