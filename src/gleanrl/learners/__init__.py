"""Learners train a model on batches of samples. `gleanrl.learners.torch` has the learner of a run."""
