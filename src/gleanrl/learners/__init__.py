"""Learners: what turns batches into weights. `gleanrl.learners.torch` is the one for a single process."""
