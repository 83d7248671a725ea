"""The engine of a learner whose model is sharded over several processes (ranks)."""
