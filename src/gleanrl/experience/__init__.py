"""Reuse of past experience: experience replay, guidance with texts about past successes, and exchange formats.

`ExperiencePool` stores successful trajectories of tasks that the policy solves only sometimes, with the token ids and
log-probs that were sampled. `ReplayCurriculum` adds them to the groups of a run, and `attach_replayed` adds them to
groups that another trainer's loop has sampled.
"""

from __future__ import annotations

from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.experience.replay.attach import attach_replayed
from gleanrl.experience.replay.curriculum import ReplayCurriculum

__all__ = ["ExperiencePool", "ReplayCurriculum", "attach_replayed"]
