"""Decides which tasks a run plays next: `orders` chooses them, and `plan` assigns their groups to tickets."""
