"""Builds and connects the parts of a run: `local` in this process and its worker processes, `ray` in Ray actors."""
