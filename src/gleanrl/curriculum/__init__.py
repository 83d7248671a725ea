"""Decides which tasks a run plays next.

`orders` chooses the tasks. `plan` assigns the planned groups to the run's tickets (the numbers of its groups).
"""
