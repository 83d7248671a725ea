"""Decides which finished groups the learner may train on, and stops a run in which too many episodes fail.

The age of a group is checked elsewhere: by `StalenessController` before the group starts, and by `GroupQueue` when it
is complete.
"""

from __future__ import annotations

from collections import deque

from gleanrl.config.settings import ScheduleSettings
from gleanrl.types import Group
from gleanrl.utils.errors import UserError

RESAMPLED, INVALID = "resampled_zero_variance", "dropped_invalid"
"""Reasons for dropping a group: all its scores are equal, or too few of its members have a valid score.

The metrics ``groups/REASON`` count the groups that were dropped for each reason.
"""

MIN_EPISODES = 32  # the share of failed episodes is checked only once this many episodes have ended
# A run stops if no episode of this many windows got a score, or if no group of them had enough members with a score. A
# window is as many episodes as a batch has, or `MIN_EPISODES` if that is more.
UNSCORED_WINDOWS = 4


class GroupCheck:
    """Rejects groups that have too few valid members or no variance. Created by `train.produce_groups`."""

    def __init__(self, settings: ScheduleSettings) -> None:
        self._settings = settings
        window = max(MIN_EPISODES, settings.batch * settings.group)
        # For the latest episodes to which the reward applies: whether each of them failed.
        self._failed: deque[bool] = deque(maxlen=window)
        # For the latest episodes: whether each of them got a score.
        self._scored: deque[bool] = deque(maxlen=UNSCORED_WINDOWS * window)
        self._most_invalid = UNSCORED_WINDOWS * window
        self._invalid = 0  # number of episodes of the latest groups, all of which were refused as `INVALID`

    def refusal(self, group: Group, *, resampled: int) -> str | None:
        """Return the reason for dropping the group, or None if the learner may train on it.

        ``resampled``: number of groups that were dropped since the last step because they had no variance.

        Raises:
            UserError: more than ``schedule.max_failed_fraction`` failed in the latest window of episodes to which the
                reward applies; no episode of the latest `UNSCORED_WINDOWS` windows got a score; or all groups of these
                windows had too few members with a score.
        """
        settings = self._settings
        self._scored.extend(t.score.valid for t in group.fresh)
        if len(self._scored) == self._scored.maxlen and not any(self._scored):
            why = next((t.score.explanation for t in reversed(group.fresh)), None)
            raise UserError(f"none of the last {len(self._scored)} episodes got a score; the last one: {why}")
        applicable = [t for t in group.fresh if t.score.applicable]
        self._failed.extend(not t.score.valid for t in applicable)
        share = sum(self._failed) / max(len(self._failed), 1)
        if len(self._failed) >= MIN_EPISODES and share > settings.max_failed_fraction:
            last = next((t for t in reversed(applicable) if not t.score.valid), None)
            why = f"; the last one: {last.score.explanation}" if last else ""
            raise UserError(
                f"{share:.0%} of the last {len(self._failed)} episodes failed, more than "
                f"schedule.max_failed_fraction = {settings.max_failed_fraction}{why}"
            )

        # The score of the greedy episode is the baseline of all members.
        greedy = [] if group.greedy is None else [group.greedy]
        too_few = group.spec.fresh and len(group.valid_fresh) < min(settings.min_valid, group.spec.fresh)
        if too_few or not all(t.score.valid for t in greedy):
            played = [*group.fresh, *greedy]
            self._invalid += len(played)
            if self._invalid >= self._most_invalid:
                last = next(t for t in reversed(played) if not t.score.valid)
                needs = f"schedule.min_valid = {settings.min_valid} members with a score"
                if greedy:
                    needs += " and a score of the greedy episode"
                raise UserError(
                    f"no group of the last {self._invalid} episodes can be trained on, because a group needs {needs}; "
                    f"the last episode without a score: {last.score.explanation}"
                )
            return INVALID
        self._invalid = 0
        members = [*group.trajectories, *greedy]
        has_variance = len({t.score.value for t in members if t.score.valid}) > 1
        may_resample = settings.dynamic_sampling and resampled < (settings.max_resample - 1) * settings.batch
        return RESAMPLED if may_resample and not has_variance else None
