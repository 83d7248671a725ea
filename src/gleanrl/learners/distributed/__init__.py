"""A learner spread over several ranks."""
