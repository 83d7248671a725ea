"""In-context experience: retrieved texts in the prompt."""
