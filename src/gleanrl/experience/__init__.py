"""Experience replay: past successes of partly solved tasks are stored token-exact and trained on again."""

from __future__ import annotations

from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.experience.replay.attach import attach_replayed
from gleanrl.experience.replay.curriculum import ReplayCurriculum

__all__ = ["ExperiencePool", "ReplayCurriculum", "attach_replayed"]
