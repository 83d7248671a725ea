"""Experience replay: past successes of partly solved tasks, kept token-exact, teach again."""

from __future__ import annotations

from gleanrl.experience.beside import with_stored
from gleanrl.experience.curriculum import ReplayCurriculum
from gleanrl.experience.pool import ExperiencePool

__all__ = ["ExperiencePool", "ReplayCurriculum", "with_stored"]
