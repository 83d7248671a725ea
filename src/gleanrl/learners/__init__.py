"""Learners, which train a model on batches of samples. A run uses `gleanrl.learners.torch.TorchLearner`."""
