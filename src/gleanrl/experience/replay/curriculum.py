"""A curriculum that takes some tasks of each batch from the experience pool and replays stored successes of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from gleanrl.config.settings import ReplaySettings
from gleanrl.config.validate import check_replay
from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.experience.replay.fresh import FreshPicks
from gleanrl.experience.replay.recall import COUNTS, EstimatePolicy, Recall, Reverify
from gleanrl.experience.replay.restarts import Restarts
from gleanrl.experience.replay.selection import whole
from gleanrl.protocols import Curriculum, Metrics
from gleanrl.types import Group, GroupSpec, Trajectory
from gleanrl.utils import serialize
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive

log = logging.getLogger(__name__)

_COUNTED = ("planned", "wanting", "retrieved", "probes", "retired_passed_over", *COUNTS)
_STARTS = ("progress", "solve_rate")  # conditions that can start replay
# Key in the info of a replayed trajectory that another run has sampled. The trajectory's own version counts the updates
# of that run. The value under this key is the version of this run from which the pool counts the trajectory's age.
_VERSION = "pool_version"
_MEMORY = 0.9  # with each further step, the weight of earlier steps in the running solve rate shrinks by this factor


@dataclass
class _State:
    """The state of a `ReplayCurriculum`. A checkpoint contains every field."""

    on: bool = False  # whether replay has begun
    began: str | None = None  # the condition that started replay, one of `_STARTS`; None = replay has not begun
    proposals: int = 0  # number of calls of `propose`
    batches: int = 0  # number of whole batches proposed
    batch: int = 0  # number of groups in a whole batch, which is the largest proposal so far
    # ids of the tasks in the latest whole batch, and in the proposals that replaced dropped groups since then
    in_batch: list[str] = field(default_factory=list)
    # How many replayed tasks (below 1) are still due. With ``task_ratio`` 0.3, each proposal of one group adds 0.3.
    # Once the sum is at least 1, the proposal has a replayed task and 1 is subtracted.
    owed: float = 0.0
    # How many probes (groups that play a retired task, at most 1) are still due, by the same rule for every proposal.
    probes_owed: float = 0.0
    # How many restarted groups (at most 1) are still due, by the same rule.
    restarts_owed: float = 0.0
    steps: int = 0  # number of calls of `observe`, which is the number of finished steps
    solved: float = 0.0  # number of solved fresh rollouts; earlier steps have less weight (`_MEMORY`)
    tried: float = 0.0  # number of all valid fresh rollouts, weighted in the same way
    ess: float = 1.0  # running effective sample size of replayed tokens, as a share of them
    reported_empty: bool = False  # whether the run has logged that the pool had no task to replay
    planned: dict[str, int] = field(default_factory=dict)  # counts of the proposals since the last step, for metrics


class ReplayCurriculum:
    """Wraps another curriculum and adds replay. It also updates the pool with the groups of each step.

    Satisfies `gleanrl.protocols.Curriculum`. Once replay has begun, ``int(count * task_ratio)`` groups of a proposal of
    ``count`` are replayed tasks, drawn from the pool, or fewer if the pool has fewer. The other groups are fresh tasks,
    proposed by the inner curriculum, in its order. Proposals of the inner curriculum that a batch does not use come
    first in the next batch.

    A task occurs twice in a proposal, be it fresh twice or once fresh and once replayed, only if the inner curriculum
    has no other task. Retired tasks are skipped, except for the share ``probe_fraction`` of a batch that samples
    retired tasks again (probes), and except if no other task is left.

    A proposal smaller than a batch replaces groups that were dropped. It counts as a part of the latest batch and
    repeats no task of that batch. In such proposals, in batches of one group, and with ``min_task_ratio``, the part of
    ``count * task_ratio`` after the decimal point is carried over to the next one. So with ``task_ratio`` 0.5, every
    second proposal of one group has a replayed task.

    Replay begins once the fraction ``start_progress`` of ``total_batches`` is planned. If ``start_solve_rate`` is set,
    replay begins when the running success rate of fresh rollouts (over about ten steps) reaches it, or at
    ``start_progress`` if that is above 0 and comes first. Once begun, replay does not end.

    Random draws depend only on the seed, the number of the proposal and the content of the pool. `state_dict` sets a
    mark in the pool, and `load_state_dict` rewinds the pool to it. So a resumed run makes the same draws again.

    Args:
        inner: proposes the fresh tasks. The value of ``greedy`` in its specs also applies to replayed tasks.
        pool: the pool to draw from. `observe` stores successes in it, and `propose` counts uses and evicts
            trajectories.
        total_batches: number of steps of the run.
        group: number of fresh members in a group.
        seed: seed of all random draws.
        temperature: sampling temperature of the run, stored with admitted trajectories.
        staleness: how many steps ahead of training a batch may be planned. Needed because ``max_age`` applies at the
            step that trains on the batch.
        ordered: whether step n learns from batch n (`Schedule.ordered`), unless groups are dropped.
        estimate: returns the mean entropy and log-ratio of trajectories under the weights that the learner has during
            `propose` (see `EstimatePolicy`). If it is None or raises, trajectories are ranked by their recorded
            entropy, and ``max_ratio`` is not applied.
        reverify: scores a trajectory again. Called only if ``settings.reverify`` is on.
        keep_marks: number of checkpointed steps whose marks stay in the pool. It must be one more than the number of
            checkpoints kept, because a mark is set before its checkpoint replaces the oldest one.
        kept_steps: returns the steps of checkpoints that are kept for longer, whose marks stay too.
        first_step: number of steps that the run has finished, if it was started without replay and is resumed with it.

    Raises:
        UserError: the settings leave a group without fresh members, never replay anything, or need scores of stored
            trajectories although ``reverify`` is None.
    """

    def __init__(
        self,
        inner: Curriculum,
        pool: ExperiencePool,
        settings: ReplaySettings,
        *,
        total_batches: int,
        group: int,
        seed: int,
        temperature: float = 1.0,
        staleness: int = 0,
        ordered: bool = True,
        estimate: EstimatePolicy | None = None,
        reverify: Reverify | None = None,
        keep_marks: int = 3,
        kept_steps: Callable[[], Collection[int]] = tuple,
        first_step: int = 0,
    ) -> None:
        check_replay(settings, group)
        if settings.reverify and reverify is None:
            raise UserError("replay.reverify is on, but the reward cannot score a stored trajectory; turn it off")
        self.inner, self.pool, self.settings = inner, pool, settings
        self._total_batches, self._group, self._seed = max(total_batches, 1), group, seed
        self._temperature, self._staleness, self._ordered = temperature, staleness, ordered
        self._keep_marks, self._kept_steps = keep_marks, kept_steps
        self._recall = Recall(
            pool, settings, group=group, estimate=estimate, reverify=reverify if settings.reverify else None
        )
        self._restarts = Restarts(pool, settings, group)
        self._waiting: list[GroupSpec] = []  # specs that `inner` proposed and no batch has used yet, oldest first
        self._first_step = first_step
        # (finished steps, mark) of the start and of each checkpoint, oldest first
        self._marks = [(first_step, pool.mark())]
        # A run that is resumed with replay may have planned up to ``staleness`` batches ahead of its steps.
        self._state = _State(steps=first_step, batches=first_step + (staleness if first_step else 0))
        self._plan_seconds = 0.0  # seconds spent in `propose` since the last step, without those in ``_recall.seconds``

    @property
    def on(self) -> bool:
        """Whether replay has begun."""
        return self._state.on

    @property
    def solve_rate(self) -> float:
        """Running share of valid fresh rollouts that succeed, over about ten steps; 0 before the first step."""
        return self._state.solved / self._state.tried if self._state.tried else 0.0

    @property
    def task_ratio(self) -> float:
        """Share of a batch's groups whose tasks are replayed.

        With ``min_task_ratio``, the share falls with the running effective sample size of replayed tokens.
        """
        settings = self.settings
        if settings.min_task_ratio is None:
            return settings.task_ratio
        return settings.min_task_ratio + self._state.ess * (settings.task_ratio - settings.min_task_ratio)

    async def propose(self, count: int) -> list[GroupSpec]:
        """Plan ``count`` groups and return their specs.

        A checkpoint may be saved while this call waits. A run that resumes from it then plans the same groups.
        """
        started, selecting = perf_counter(), self._recall.seconds
        state, settings = self._state, self.settings
        self._begin_if_due()
        random = np.random.default_rng(derive(self._seed, "replay", state.proposals))
        part = count < state.batch  # whether the groups replace dropped groups of a batch that was planned before
        # Estimate the step that will learn from these groups. In ordered schedules, step n usually learns from batch n.
        # But if groups are dropped, groups of a later batch can replace them. Batches are then planned early, and their
        # number is higher than that of the step. Therefore limit the step to what the staleness bound allows.
        latest = state.steps + self._staleness
        step = max(state.steps, min(state.batches - part, latest)) if self._ordered else latest
        taken = set(state.in_batch) if part else set()
        # With an adaptive share, too. Else a share below one group would end replay: the effective sample size, which
        # sets the share, would never be measured again.
        carries = part or count == 1 or settings.min_task_ratio is not None
        due = count * self.task_ratio + (state.owed if carries else 0.0)
        target = whole(due) if state.on else 0
        probes_due = count * settings.probe_fraction + state.probes_owed
        restarts_due = count * settings.restart_share + state.restarts_owed if state.on else 0.0

        picks = FreshPicks(self.inner, self.pool, self._waiting, count)
        if count > len(self._waiting):
            await picks.ask(count - len(self._waiting))
        greedy = self._waiting[0].greedy
        # Tasks to replay are drawn before fresh ones are picked, which would leave none of a few tasks for replay.
        # `recall` gets a copy of ``taken``, because tasks that it draws but does not return may still be fresh.
        replayed = await self._recall.recall(target, random, set(taken), step=step) if target else []
        taken.update(found.task.id for found in replayed)
        probe_count = min(whole(probes_due), count - len(replayed))
        probes = [found.task for found in self.pool.draw(None, probe_count, random, taken)] if probe_count else []
        taken.update(task.id for task in probes)
        wanted = min(whole(restarts_due), count - len(probes) - len(replayed))
        restarted = self._restarts.draw(wanted, random, set(taken), greedy=greedy) if wanted > 0 else []
        taken.update(spec.task.id for spec, _ in restarted)
        await picks.fill(count - len(probes) - len(replayed) - len(restarted), taken)

        fresh = [*picks.specs, *(GroupSpec(task, self._group, greedy=greedy) for task in probes)]
        mixed: list[GroupSpec] = []
        for found in replayed:
            members = []
            for stored in found.stored:
                trajectory = stored.trajectory
                if trajectory.version != stored.version:  # another run sampled it, see `_VERSION`
                    trajectory = replace(trajectory, info={**trajectory.info, _VERSION: stored.version})
                members.append(trajectory)
            fresh_members = self._group - (len(members) if settings.placement == "replace" else 0)
            mixed.append(GroupSpec(found.task, fresh_members, tuple(members), greedy))
        mixed += [spec for spec, _ in restarted]
        specs = _interleave(fresh, mixed, random)

        # There must be no await from here to the end, so that a checkpoint contains all of these changes or none.
        self._recall.settle()
        self.pool.used([stored.key for found in replayed for stored in found.stored])
        self._restarts.commit(restarted)
        picks.commit({spec.task.id for spec in mixed})
        state.proposals += 1
        state.batches += not part
        state.batch = max(state.batch, count)
        state.in_batch = [*(state.in_batch if part else ()), *(spec.task.id for spec in specs)]
        if carries:
            state.owed = due - whole(due) if state.on else 0.0
        # At most 1, so that a long time without retired tasks is not followed by many probes at once.
        state.probes_owed = min(max(probes_due - len(probes), 0.0), 1.0)
        state.restarts_owed = min(max(restarts_due - len(restarted), 0.0), 1.0)
        if target and not replayed and not state.reported_empty:
            state.reported_empty = True
            log.info("replay is on, but the pool has no task for it yet: training is plainly on-policy until it has")
        planned = Counter(state.planned)
        planned.update(planned=len(replayed), wanting=target - len(replayed), probes=len(probes))
        planned.update(retrieved=sum(len(found.stored) for found in replayed), retired_passed_over=picks.passed_over)
        planned.update(f"source/{stored.source}" for found in replayed for stored in found.stored)
        planned.update(self._recall.counts)
        state.planned = dict(planned)
        self._recall.counts.clear()
        self._plan_seconds += perf_counter() - started - (self._recall.seconds - selecting)
        return specs

    def _progress(self, steps: int) -> float:
        """Return the share of the batches that is planned, no more than those of ``steps`` and the staleness bound.

        In batches of one group, ``batches`` counts the groups that replace dropped ones too.
        """
        return min(self._state.batches, steps + self._staleness) / self._total_batches

    def _begin_if_due(self) -> None:
        state, settings = self._state, self.settings
        if state.on:
            return
        progress, rate = self._progress(state.steps), settings.start_solve_rate
        if rate is not None and state.tried and self.solve_rate >= rate:
            state.on, state.began = True, "solve_rate"
            log.info("replay begins: fresh rollouts solve %.0f%% of late", 100 * self.solve_rate)
        elif (rate is None or settings.start_progress > 0) and progress >= settings.start_progress:
            state.on, state.began = True, "progress"
            log.info("replay begins: %.0f%% of the batches are planned", 100 * progress)
        elif not state.proposals:
            conditions = [] if rate is None else [f"fresh rollouts solve {100 * rate:g}% of late"]
            if rate is None or settings.start_progress > 0:
                conditions.append(f"{100 * settings.start_progress:g}% of the batches are planned")
            log.info("replay waits until %s", " or ".join(conditions))

    def observe(self, groups: Sequence[Group], training: Metrics) -> Metrics:
        """Update the pool and the inner curriculum with the groups of a step, dropped groups included. Returns metrics.

        Besides the metrics of the inner curriculum these are ``pool/...``, ``replay/...`` and ``time/replay_...``; all
        are listed in docs/concepts/replay.md. Counts of planning (such as ``replay/planned`` and ``replay/missing``)
        and the times of planning cover the proposals since the last step. Numbers, ages and entropies of replayed
        trajectories cover the groups that the step learned from. The solve rates cover dropped groups too.
        """
        state, started = self._state, perf_counter()
        # Restarted groups say nothing of how hard a task is from its beginning, and their successes are incomplete.
        restarts = self._restarts.observe(groups) if self.settings.restart_share else {}
        groups = [group for group in groups if not group.spec.start]
        metrics = dict(self.pool.observe(groups, state.steps, temperature=self._temperature)) | restarts
        metrics["time/replay_store_s"] = perf_counter() - started
        metrics |= self.inner.observe(groups, training)

        successes = [t.score.reaches(self.settings.success_threshold) for g in groups for t in g.valid_fresh]
        state.solved = _MEMORY * state.solved + sum(successes)
        state.tried = _MEMORY * state.tried + len(successes)
        if "loss/replayed/ess" in training:
            state.ess = _MEMORY * state.ess + (1 - _MEMORY) * training["loss/replayed/ess"]
        metrics["replay/task_ratio"] = self.task_ratio
        metrics["replay/on"] = float(state.on)
        for start in _STARTS:
            metrics[f"replay/on_by_{start}"] = float(state.began == start)
        metrics["replay/progress"] = self._progress(state.steps + 1)
        metrics["replay/solve_rate"] = sum(successes) / len(successes) if successes else 0.0
        metrics["replay/solve_rate_running"] = self.solve_rate

        learned = [group for group in groups if not group.dropped]
        replayed = [t for group in learned for t in group.spec.replayed]
        metrics["replay/tasks"] = float(sum(bool(group.spec.replayed) for group in learned))
        metrics["replay/trajectories"] = float(len(replayed))
        metrics["replay/tokens"] = float(sum(t.sampled_tokens for t in replayed))
        if replayed:
            # The version may be that of another run, and higher than the steps of this run. The age is then 0.
            ages = [max(state.steps - t.info.get(_VERSION, t.version), 0) for t in replayed]
            metrics["replay/age_mean"] = float(np.mean(ages))
            metrics["replay/age_max"] = float(max(ages))
            metrics["replay/recorded_entropy"] = _recorded_entropy(replayed)
        if fresh := [t for group in learned for t in group.valid_fresh]:
            metrics["replay/fresh_entropy"] = _recorded_entropy(fresh)

        for name in _COUNTED:
            metrics[f"replay/{name}"] = float(state.planned.get(name, 0))
        for name in sorted(name for name in state.planned if name.startswith("source/")):
            metrics[f"replay/{name}"] = float(state.planned[name])
        metrics["replay/displaced"] = float(len(self._waiting))
        metrics["time/replay_plan_s"] = self._plan_seconds
        metrics["time/replay_select_s"] = self._recall.seconds
        state.planned = {}
        self._plan_seconds = self._recall.seconds = 0.0
        state.steps += 1
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Set a mark in the pool, and return the JSON-serialisable state, which contains the mark.

        Marks of earlier steps are removed from the pool if no checkpoint that is kept needs them.
        """
        self._marks.append((self._state.steps, self.pool.mark()))
        marked = sorted({step for step, _ in self._marks})
        oldest = min([*marked[-self._keep_marks :], *(step for step in self._kept_steps() if step in marked)])
        self._marks = [(step, mark) for step, mark in self._marks if step >= oldest]
        # While the mark of the first step is kept, forget nothing: a run that is killed before its first checkpoint is
        # complete starts again, and rewinds the pool to the mark that was set before the run.
        if oldest != self._first_step:
            self.pool.forget(self._marks[0][1])
        own = {
            "mark": self._marks[-1][1],
            "marks": [list(entry) for entry in self._marks],
            "waiting": serialize.to_builtins(self._waiting),
            "state": asdict(self._state),
            "cuts": {task: list(cut) for task, cut in self._restarts.cuts.items()},
        }
        return {**self.inner.state_dict(), "replay": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``, and rewind the pool to its mark.

        If ``state`` was saved without replay, only the inner curriculum is restored, and replay starts now.
        """
        own = state.get("replay")
        self.inner.load_state_dict({name: value for name, value in state.items() if name != "replay"})
        if own is None:
            log.info("replay is turned on at step %d; the run was without it before", self._first_step)
            return
        self.pool.rewind(own["mark"])  # deletes all later marks, also the one that `__init__` has set
        self._marks = [(step, mark) for step, mark in own["marks"]]
        self._waiting = serialize.from_builtins(own["waiting"], list[GroupSpec])
        self._state = _State(**own["state"])
        self._restarts.cuts = dict(own["cuts"])


def _interleave(fresh: list[GroupSpec], replayed: list[GroupSpec], random: np.random.Generator) -> list[GroupSpec]:
    """Mix both lists at random, keeping the order within each, so that each mini-batch is likely to contain both."""
    if not replayed:
        return fresh
    count = len(fresh) + len(replayed)
    places = set(random.choice(count, len(replayed), replace=False).tolist())
    halves = iter(fresh), iter(replayed)
    return [next(halves[place in places]) for place in range(count)]


def _recorded_entropy(trajectories: Sequence[Trajectory]) -> float:
    """Return minus the mean recorded log-prob of all sampled tokens, in nats; 0 if there are none."""
    logprobs = [turn.logprobs for t in trajectories for turn in t.sampled_turns() if turn.logprobs is not None]
    return -float(np.mean(np.concatenate(logprobs), dtype=np.float64)) if logprobs else 0.0
