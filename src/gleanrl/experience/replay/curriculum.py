"""Replay as a curriculum: some tasks of each batch come from the pool, with stored successes in their groups."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from gleanrl.config.settings import ReplaySettings
from gleanrl.config.validate import check_replay
from gleanrl.experience.replay.fresh import FreshStream
from gleanrl.experience.replay.recall import EstimatePolicy, Recall, Recalled, Reverify
from gleanrl.experience.replay.selection import whole
from gleanrl.protocols import Curriculum, Metrics
from gleanrl.types import Group, GroupSpec, Task, Trajectory
from gleanrl.utils import serialize
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive

if TYPE_CHECKING:
    from gleanrl.experience.pool.pool import ExperiencePool, Stored

log = logging.getLogger(__name__)

_COUNTED = (
    *("planned", "wanting", "retrieved", "probes", "retired_passed_over"),
    *("missing", "too_old", "rejected", "reverified", "reverify_failed", "estimate_failed"),  # by `Recall`
)
_STARTS = ("progress", "solve_rate")  # what replay can begin by
_VERSION = "pool_version"  # in the info of what is replayed
_MEMORY = 0.9  # weight of a step in the running solve rate, a step later: about the last ten count


class ReplayCurriculum:
    """Wraps a curriculum: plans its tasks, and tasks from the pool in the place of some; learns from all.

    Satisfies `gleanrl.protocols.Curriculum`. A proposal of ``count`` groups holds ``int(count * task_ratio)`` tasks
    from the pool once replay has begun, or as many as the pool has; the others are the inner curriculum's, in its
    order. Those that replay displaces come first in the next proposal. No task comes twice in a proposal unless the
    inner curriculum has no other, and none is in both halves. Retired tasks are passed over, but for a share that
    tries them again, and where nothing else is left.

    A proposal of one, for a refunded ticket, belongs to the latest whole batch: it repeats no task of it, and its
    share of pool tasks adds up from one to the next (at ratio 0.5 every second one is from the pool).

    Replay begins when the share ``start_progress`` of ``total_batches`` is planned. Where ``start_solve_rate`` is set
    it begins when the running mean success of fresh rollouts reaches that (over about ten steps), or at
    ``start_progress`` if that is set too and comes first. It never ends.

    Random draws depend on the seed, the number of the proposal and the pool. `state_dict` marks the pool, and
    `load_state_dict` rewinds it to there.

    Args:
        inner: proposes fresh groups. `greedy` of its specs also holds for tasks from the pool.
        pool: is written to by `observe`, and when trajectories are used.
        total_batches: steps of the run.
        group: fresh members of a group.
        temperature: of sampling, recorded with what is admitted.
        staleness: steps that a batch may be planned ahead of the one learned from; ``max_age`` holds in its own step.
        estimate: the current policy's view of trajectories. Without it, or where it raises, recorded entropy decides
            and no ratio is bounded.
        reverify: scores a trajectory again; called where ``settings.reverify`` is on.
        keep_marks: steps with a checkpoint whose marks stay in the pool: one more than checkpoints are kept.

    Raises:
        UserError: settings that leave a group without fresh members, never replay anything, or ask for a score that
            the reward cannot give.
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
        estimate: EstimatePolicy | None = None,
        reverify: Reverify | None = None,
        keep_marks: int = 3,
    ) -> None:
        check_replay(settings, group)
        if settings.reverify and reverify is None:
            raise UserError("replay.reverify is on, but the reward cannot score a stored trajectory; turn it off")
        self.inner, self.pool, self.settings = inner, pool, settings
        self._total_batches, self._group, self._seed, self._temperature = total_batches, group, seed, temperature
        self._fresh = FreshStream(inner, pool)
        self._recall = Recall(
            pool, settings, group=group, estimate=estimate, reverify=reverify if settings.reverify else None
        )
        self._staleness, self._keep_marks = staleness, keep_marks
        self._marks = [(0, pool.mark())]  # (steps observed, mark) of the start and of checkpoints, oldest first
        self._on = False
        self._began: str | None = None  # one of `_STARTS`, once replay is on
        self._proposals = 0
        self._batches = 0  # proposals of a whole batch
        self._batch = 0  # the largest proposal: a whole batch
        self._in_batch: list[str] = []  # tasks of the latest whole batch and of what replaced some of it
        self._owed, self._probes_owed = 0.0, 0.0  # pool tasks and probes: fractions not placed yet
        self._steps = 0  # observed
        self._solved, self._tried = 0.0, 0.0  # fresh rollouts, old ones counting less
        self._reported_empty = False
        self._planned: Counter[str] = Counter()  # since the last step, for its metrics
        self._seconds = 0.0

    @property
    def on(self) -> bool:
        """Whether replay has begun."""
        return self._on

    @property
    def solve_rate(self) -> float:
        """Running mean success of valid fresh rollouts; 0 before the first step."""
        return self._solved / self._tried if self._tried else 0.0

    # --- planning -------------------------------------------------------------------------------
    async def propose(self, count: int) -> list[GroupSpec]:
        """``count`` groups. Until it returns, nothing has changed that a checkpoint taken meanwhile would miss."""
        started, selecting = perf_counter(), self._recall.seconds
        self._begin()
        random = np.random.default_rng(derive(self._seed, "replay", self._proposals))
        part = count < self._batch  # of a batch planned before
        step = self._due(part)
        taken = set(self._in_batch) if part else set()
        single = part or count == 1
        due = count * self.settings.task_ratio + (self._owed if single else 0.0)
        target = whole(due) if self._on else 0
        probes_due = count * self.settings.probe_fraction + self._probes_owed

        picks = await self._fresh.open(count)
        greedy = self._fresh.waiting[0].greedy
        probes = self._probes(min(whole(probes_due), count - target), random, taken)
        await picks.take(count - target - len(probes), taken)
        fresh_tasks = set(taken)
        replayed = await self._recall.recall(target, random, taken, step=step) if target else []
        wanting = count - len(picks.specs) - len(probes) - len(replayed)
        if unfilled := await picks.fill(wanting, taken, barred={found.task.id for found in replayed}):
            replayed = []  # there are no other tasks: none may be in both halves
            taken = fresh_tasks
            await picks.fill(count - len(picks.specs) - len(probes), taken)
            log.warning("replay: no fresh task is left for %d places of a batch; the replayed tasks give way", unfilled)
        fresh = [*picks.specs, *(GroupSpec(task, self._group, greedy=greedy) for task in probes)]
        specs = _interleaved(fresh, [self._mixed(found, greedy) for found in replayed], random)

        # from here to the end nothing waits: a checkpoint sees all of it or nothing
        self._recall.settle()
        self.pool.used([stored.key for found in replayed for stored in found.stored])
        picks.commit()
        self._proposals += 1
        self._batches += not part
        self._batch = max(self._batch, count)
        self._in_batch = [*(self._in_batch if part else ()), *(spec.task.id for spec in specs)]
        if single:
            self._owed = due - whole(due) if self._on else 0.0
        self._probes_owed = min(max(probes_due - len(probes), 0.0), 1.0)  # with none retired, nothing is saved up
        self._account(target, replayed, len(probes), picks.passed_over)
        choosing = self._recall.seconds - selecting
        self._seconds += perf_counter() - started - choosing
        return specs

    def _begin(self) -> None:
        """Turn replay on if it is time."""
        if self._on:
            return
        settings = self.settings
        progress = self._batches / max(self._total_batches, 1)
        rate = settings.start_solve_rate
        if rate is not None and self._tried and self.solve_rate >= rate:
            self._on, self._began = True, "solve_rate"
            log.info("replay begins: fresh rollouts solve %.0f%% of late", 100 * self.solve_rate)
        elif (rate is None or settings.start_progress > 0) and progress >= settings.start_progress:
            self._on, self._began = True, "progress"
            log.info("replay begins: %.0f%% of the batches are planned", 100 * progress)

    def _due(self, part: bool) -> int:
        """The step that learns from what is planned now; ``part``: it belongs to the batch planned last.

        Where refunded tickets took places of a batch, the batches after it are planned sooner than they are due.
        """
        return max(self._steps, min(self._batches - part, self._steps + self._staleness))

    def _probes(self, count: int, random: np.random.Generator, taken: set[str]) -> list[Task]:
        """Retired tasks to be tried again."""
        tasks = [found.task for found in self.pool.draw(None, count, random, exclude=taken)] if count > 0 else []
        taken.update(task.id for task in tasks)
        return tasks

    def _mixed(self, found: Recalled, greedy: bool) -> GroupSpec:
        """A group of a pool task: `placement` decides how many fresh members join what was really retrieved."""
        fresh = self._group - (len(found.stored) if self.settings.placement == "replace" else 0)
        return GroupSpec(found.task, fresh, tuple(map(_dated, found.stored)), greedy)

    def _account(self, target: int, replayed: Sequence[Recalled], probes: int, passed_over: int) -> None:
        if target and not replayed and not self._reported_empty:
            self._reported_empty = True
            log.info("replay is on, but the pool has no task for it yet: training is plainly on-policy until it has")
        self._planned["planned"] += len(replayed)
        self._planned["wanting"] += target - len(replayed)
        self._planned["retrieved"] += sum(len(found.stored) for found in replayed)
        self._planned["probes"] += probes
        self._planned["retired_passed_over"] += passed_over
        self._planned.update(self._recall.counts)
        self._recall.counts.clear()

    # --- learning -------------------------------------------------------------------------------
    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Admit what a step brought into the pool; dropped groups count too. Metrics ``replay/...`` and ``pool/...``.

        ``planned wanting retrieved missing rejected probes`` and ``time/replay_...`` are of proposals since the last
        step; what is replayed, how old it is and the entropies are of the groups that were learned from; the others of
        all groups given.
        """
        started = perf_counter()
        observed = self.pool.observe(groups, self._steps, temperature=self._temperature)
        storing = perf_counter() - started
        observed = {**observed, **self.inner.observe(groups)}
        scores = [t.score.value >= self.settings.success_threshold for g in groups for t in g.valid_fresh]
        self._solved = _MEMORY * self._solved + sum(scores)
        self._tried = _MEMORY * self._tried + len(scores)
        metrics = {
            "replay/on": float(self._on),
            **{f"replay/on_by_{start}": float(self._began == start) for start in _STARTS},
            "replay/progress": self._batches / max(self._total_batches, 1),
            "replay/solve_rate": sum(scores) / len(scores) if scores else 0.0,
            "replay/solve_rate_running": self.solve_rate,
            **_replayed([group for group in groups if not group.dropped], self._steps),
            **self._drain(),
            "time/replay_store_s": storing,
        }
        self._steps += 1
        return {**observed, **metrics}

    def _drain(self) -> dict[str, float]:
        """What was planned since the last step."""
        metrics = {f"replay/{name}": float(self._planned[name]) for name in _COUNTED}
        metrics["replay/displaced"] = float(len(self._fresh.waiting))
        metrics["time/replay_plan_s"] = self._seconds
        metrics["time/replay_select_s"] = self._recall.seconds
        self._planned.clear()
        self._seconds = self._recall.seconds = 0.0
        return metrics

    # --- checkpoints ----------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """JSON-ready. Sets a mark in the pool, and lets it forget marks of steps too long ago to be resumed from."""
        self._marks.append((self._steps, self.pool.mark()))
        kept = sorted({step for step, _ in self._marks})[-self._keep_marks :]
        self._marks = [(step, mark) for step, mark in self._marks if step >= kept[0]]
        if kept[0]:  # before the first checkpoint is on disk, the run's start may be gone back to, and marked earlier
            self.pool.forget(self._marks[0][1])
        return {
            "inner": self.inner.state_dict(),
            "mark": self._marks[-1][1],
            "marks": [list(entry) for entry in self._marks],
            "waiting": serialize.to_builtins(self._fresh.waiting),
            "on": self._on,
            "began": self._began,
            "proposals": self._proposals,
            "batches": self._batches,
            "batch": self._batch,
            "in_batch": list(self._in_batch),
            "owed": [self._owed, self._probes_owed],
            "steps": self._steps,
            "solved": [self._solved, self._tried],
            "reported_empty": self._reported_empty,
            "planned": dict(self._planned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, with the pool as it was. Raises `UserError` if the state was saved without replay."""
        if "mark" not in state:
            raise UserError("the checkpoint was saved without replay; resume it with replay.enabled = false")
        self.inner.load_state_dict(state["inner"])
        self.pool.rewind(state["mark"])  # the mark of the start made above is gone with it
        self._marks = [(step, mark) for step, mark in state["marks"]]
        self._fresh.waiting = serialize.from_builtins(state["waiting"], list[GroupSpec])
        self._on, self._began = state["on"], state.get("began")  # older checkpoints do not say
        self._proposals, self._batches, self._batch = state["proposals"], state["batches"], state["batch"]
        self._in_batch = list(state["in_batch"])
        self._owed, self._probes_owed = state["owed"]
        self._steps = state["steps"]
        self._solved, self._tried = state["solved"]
        self._reported_empty = state["reported_empty"]
        self._planned = Counter(state["planned"])


def _interleaved(fresh: list[GroupSpec], replayed: list[GroupSpec], random: np.random.Generator) -> list[GroupSpec]:
    """Both in their order, mixed at random, so that chunks and mini-batches of a step hold some of each."""
    if not replayed:
        return fresh
    count = len(fresh) + len(replayed)
    places = set(random.choice(count, len(replayed), replace=False).tolist())
    halves = iter(fresh), iter(replayed)
    return [next(halves[place in places]) for place in range(count)]


def _dated(stored: Stored) -> Trajectory:
    """It tells the version that the pool counts its age from, where its own is of another run."""
    trajectory = stored.trajectory
    if trajectory.version == stored.version:
        return trajectory
    return replace(trajectory, info={**trajectory.info, _VERSION: stored.version})


def _replayed(groups: Sequence[Group], step: int) -> dict[str, float]:
    """What the groups replay, how old that is in versions, and the recorded entropy (minus mean log-prob) of each kind.

    A trajectory of another run may count more versions than this one has had: it is 0 old.
    """
    replayed = [t for group in groups for t in group.spec.replayed]
    ages = [max(step - t.info.get(_VERSION, t.version), 0) for t in replayed]
    metrics = {
        "replay/tasks": float(sum(bool(group.spec.replayed) for group in groups)),
        "replay/trajectories": float(len(replayed)),
        "replay/tokens": float(sum(t.sampled_tokens for t in replayed)),
    }
    if replayed:
        metrics |= {
            "replay/age_mean": float(np.mean(ages)),
            "replay/age_max": float(max(ages)),
            "replay/recorded_entropy": _recorded_entropy(replayed),
        }
    fresh = [t for group in groups for t in group.valid_fresh]
    return metrics | ({"replay/fresh_entropy": _recorded_entropy(fresh)} if fresh else {})


def _recorded_entropy(trajectories: Sequence[Trajectory]) -> float:
    logprobs = [turn.logprobs for t in trajectories for turn in t.sampled_turns() if turn.logprobs is not None]
    return -float(np.mean(np.concatenate(logprobs), dtype=np.float64)) if logprobs else 0.0
