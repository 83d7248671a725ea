"""Replay: stored trajectories join later groups.

A trajectory is *stored* in the pool, *replayed* as a member of a group, and its samples are *off-policy* in the batch.
It is trained on again in one of three ways:

* `curriculum`: a run's curriculum puts stored trajectories into ``GroupSpec.replayed``. `recall` reads them,
  `selection` chooses, `reverify` scores them again, and `fresh` picks the tasks of groups without stored ones.
* `updates`: further optimizer updates at the end of a step (``replay.pool_updates``).
* `attach`: stored trajectories join the batches of another trainer's loop, such as TRL's.
"""
