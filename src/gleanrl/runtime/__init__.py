"""Runtimes: they build the parts of a run (sampler, learner, environments, rewards), connect them, and run the job.

`gleanrl.runtime.local` runs a job in this process and its worker processes. `gleanrl.runtime.ray` puts the parts into
Ray actors. `gleanrl.runtime.embodied` runs jobs that train control policies.
"""
