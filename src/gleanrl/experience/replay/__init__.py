"""Experience replay: trains again on trajectories that are stored in the experience pool.

A trajectory in the pool is called *stored*. It is called *replayed* once it is a member of a later group, where it is
an *off-policy* member, because older weights sampled it. There are three ways to replay, one per module:

* `curriculum` adds stored trajectories to the groups of a run, as ``GroupSpec.replayed``. It uses `recall` to draw
  tasks and trajectories from the pool by the rules in `selection`, `reverify` to score trajectories again, and `fresh`
  to pick the tasks of the groups without replayed members.
* `updates` makes extra optimizer updates on successes at the end of a step (``replay.pool_updates``).
* `attach` adds stored trajectories to groups that another trainer's loop, such as TRL's, has sampled.
"""
