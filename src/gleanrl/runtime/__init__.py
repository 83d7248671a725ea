"""Builds and connects the parts of a run: `local` in this process and its workers, `ray` in Ray actors."""
