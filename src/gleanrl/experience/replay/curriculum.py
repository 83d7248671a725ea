"""A curriculum with replay: some tasks of each batch come from the pool, with stored successes in their groups."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from gleanrl.config.settings import ReplaySettings
from gleanrl.config.validate import check_replay
from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.experience.replay.fresh import FreshPicks
from gleanrl.experience.replay.recall import COUNTS, EstimatePolicy, Recall, Reverify
from gleanrl.experience.replay.selection import whole
from gleanrl.protocols import Curriculum, Metrics
from gleanrl.types import Group, GroupSpec, Trajectory
from gleanrl.utils import serialize
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive

log = logging.getLogger(__name__)

_COUNTED = ("planned", "wanting", "retrieved", "probes", "retired_passed_over", *COUNTS)
_STARTS = ("progress", "solve_rate")  # conditions that can start replay
_VERSION = "pool_version"  # key in a replayed trajectory's info: the version from which the pool counts its age
_MEMORY = 0.9  # factor by which a step's weight in the running solve rate shrinks at each later step


@dataclass
class _State:
    """The state of a `ReplayCurriculum`. A checkpoint holds every field."""

    on: bool = False
    began: str | None = None  # one of `_STARTS`, once replay is on
    proposals: int = 0
    batches: int = 0  # number of proposals of a whole batch
    batch: int = 0  # size of the largest proposal, which is a whole batch
    in_batch: list[str] = field(default_factory=list)  # ids of the tasks in the latest whole batch, replacements too
    owed: float = 0.0  # fraction of a pool task that single proposals have added up to
    probes_owed: float = 0.0  # the same for retired tasks that are tried again
    steps: int = 0  # steps observed
    solved: float = 0.0  # number of solved fresh rollouts, older ones with less weight
    tried: float = 0.0  # number of all fresh rollouts, weighted in the same way
    reported_empty: bool = False  # whether the log says that the pool had no task
    planned: dict[str, int] = field(default_factory=dict)  # counts since the last step, for its metrics


class ReplayCurriculum:
    """Wraps a curriculum and replaces some of its tasks by tasks from the pool. The pool learns from all groups.

    Satisfies `gleanrl.protocols.Curriculum`. Once replay has begun, a proposal of ``count`` groups holds
    ``int(count * task_ratio)`` tasks from the pool, or fewer if the pool has fewer. The others come from the inner
    curriculum, in its order. Tasks of the inner curriculum that were displaced by replay come first in the next
    proposal. A task occurs twice in a proposal only if the inner curriculum has no other task, and it is never both a
    fresh task and a task from the pool. Retired tasks are skipped, except for a share that is tried again. They are
    also used if no other task is left.

    A proposal of one group, for a refunded ticket, belongs to the latest whole batch: it repeats no task of that batch.
    Its share of pool tasks is carried over to the next such proposal (at ratio 0.5 every second one is from the pool).

    Replay begins once the fraction ``start_progress`` of ``total_batches`` is planned. If ``start_solve_rate`` is set,
    replay begins when the running mean success of fresh rollouts (over about ten steps) reaches that rate, or at
    ``start_progress`` if that is set too and comes first. Once begun, replay does not end.

    Random draws depend on the seed, the number of the proposal and the pool. `state_dict` sets a mark in the pool, and
    `load_state_dict` rewinds the pool to that mark.

    Args:
        inner: proposes fresh groups. `greedy` of its specs also applies to tasks from the pool.
        pool: the pool to draw from. It is updated by `observe`, and by `propose` when trajectories are used.
        total_batches: number of steps of the run.
        group: number of fresh members in a group.
        temperature: sampling temperature, recorded with admitted trajectories.
        staleness: how many steps ahead of training a batch may be planned; ``max_age`` holds at the step that trains on
            the batch.
        estimate: returns entropy and log-ratio of trajectories under the current policy. If it is None or raises, the
            recorded entropy is used instead, and the bound on the ratio is not applied.
        reverify: scores a trajectory again; called if ``settings.reverify`` is on.
        keep_marks: number of checkpointed steps whose marks stay in the pool; one more than the number of checkpoints
            kept.

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
        self._total_batches, self._group, self._seed = max(total_batches, 1), group, seed
        self._temperature, self._staleness, self._keep_marks = temperature, staleness, keep_marks
        self._recall = Recall(
            pool, settings, group=group, estimate=estimate, reverify=reverify if settings.reverify else None
        )
        self._waiting: list[GroupSpec] = []  # specs that `inner` proposed and no batch has used yet, oldest first
        self._marks = [(0, pool.mark())]  # (steps observed, mark) of the start and of checkpoints, oldest first
        self._state = _State()
        self._plan_seconds = 0.0  # planning time since the last step, without that counted by `_recall`

    @property
    def on(self) -> bool:
        """Whether replay has begun."""
        return self._state.on

    @property
    def solve_rate(self) -> float:
        """Running mean success of valid fresh rollouts; 0 before the first step."""
        return self._state.solved / self._state.tried if self._state.tried else 0.0

    async def propose(self, count: int) -> list[GroupSpec]:
        """Return ``count`` groups.

        A checkpoint may be saved while this call waits; a run that resumes from it proposes the same groups.
        """
        started, selecting = perf_counter(), self._recall.seconds
        state, settings = self._state, self.settings
        self._begin_if_due()
        random = np.random.default_rng(derive(self._seed, "replay", state.proposals))
        part = count < state.batch  # whether this belongs to a batch planned before
        # If refunded tickets took places of a batch, the batches after it are planned earlier than they are due.
        step = max(state.steps, min(state.batches - part, state.steps + self._staleness))
        taken = set(state.in_batch) if part else set()
        single = part or count == 1
        due = count * settings.task_ratio + (state.owed if single else 0.0)
        target = whole(due) if state.on else 0
        probes_due = count * settings.probe_fraction + state.probes_owed

        picks = FreshPicks(self.inner, self.pool, self._waiting, count)
        if count > len(self._waiting):
            await picks.ask(count - len(self._waiting))
        greedy = self._waiting[0].greedy
        probe_count = min(whole(probes_due), count - target)
        probes = [found.task for found in self.pool.draw(None, probe_count, random, taken)] if probe_count else []
        taken.update(task.id for task in probes)
        await picks.take(count - target - len(probes), taken)
        fresh_tasks = set(taken)
        replayed = await self._recall.recall(target, random, taken, step=step) if target else []
        wanting = count - len(picks.specs) - len(probes) - len(replayed)
        if unfilled := await picks.fill(wanting, taken, barred={found.task.id for found in replayed}):
            replayed = []  # no other task is left, and none may be both fresh and replayed
            taken = fresh_tasks
            await picks.fill(count - len(picks.specs) - len(probes), taken)
            log.warning("replay: no fresh task is left for %d places of a batch; the replayed tasks give way", unfilled)

        fresh = [*picks.specs, *(GroupSpec(task, self._group, greedy=greedy) for task in probes)]
        mixed: list[GroupSpec] = []
        for found in replayed:
            members = []
            for stored in found.stored:
                trajectory = stored.trajectory
                if trajectory.version != stored.version:  # sampled by another run, whose versions say nothing here
                    trajectory = replace(trajectory, info={**trajectory.info, _VERSION: stored.version})
                members.append(trajectory)
            fresh_members = self._group - (len(members) if settings.placement == "replace" else 0)
            mixed.append(GroupSpec(found.task, fresh_members, tuple(members), greedy))
        specs = _interleave(fresh, mixed, random)

        # there is no await from here to the end, so that a checkpoint contains all of these changes or none
        self._recall.settle()
        self.pool.used([stored.key for found in replayed for stored in found.stored])
        picks.commit()
        state.proposals += 1
        state.batches += not part
        state.batch = max(state.batch, count)
        state.in_batch = [*(state.in_batch if part else ()), *(spec.task.id for spec in specs)]
        if single:
            state.owed = due - whole(due) if state.on else 0.0
        state.probes_owed = min(max(probes_due - len(probes), 0.0), 1.0)  # does not add up while no task is retired
        if target and not replayed and not state.reported_empty:
            state.reported_empty = True
            log.info("replay is on, but the pool has no task for it yet: training is plainly on-policy until it has")
        planned = Counter(state.planned)
        planned.update(planned=len(replayed), wanting=target - len(replayed), probes=len(probes))
        planned.update(retrieved=sum(len(found.stored) for found in replayed), retired_passed_over=picks.passed_over)
        planned.update(self._recall.counts)
        state.planned = dict(planned)
        self._recall.counts.clear()
        self._plan_seconds += perf_counter() - started - (self._recall.seconds - selecting)
        return specs

    def _begin_if_due(self) -> None:
        state, settings = self._state, self.settings
        if state.on:
            return
        progress, rate = state.batches / self._total_batches, settings.start_solve_rate
        if rate is not None and state.tried and self.solve_rate >= rate:
            state.on, state.began = True, "solve_rate"
            log.info("replay begins: fresh rollouts solve %.0f%% of late", 100 * self.solve_rate)
        elif (rate is None or settings.start_progress > 0) and progress >= settings.start_progress:
            state.on, state.began = True, "progress"
            log.info("replay begins: %.0f%% of the batches are planned", 100 * progress)

    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Update the pool with the groups of a step, dropped ones included. Returns ``replay/...`` and ``pool/...``.

        The counts ``planned``, ``wanting``, ``retrieved``, ``missing``, ``rejected`` and ``probes`` and the times
        ``time/replay_...`` cover the proposals since the last step. Metrics of replayed trajectories, their ages and
        the entropies cover the groups that were learned from. All others cover all groups given.
        """
        state, started = self._state, perf_counter()
        metrics = dict(self.pool.observe(groups, state.steps, temperature=self._temperature))
        metrics["time/replay_store_s"] = perf_counter() - started
        metrics |= self.inner.observe(groups)

        successes = [t.score.value >= self.settings.success_threshold for g in groups for t in g.valid_fresh]
        state.solved = _MEMORY * state.solved + sum(successes)
        state.tried = _MEMORY * state.tried + len(successes)
        metrics["replay/on"] = float(state.on)
        for start in _STARTS:
            metrics[f"replay/on_by_{start}"] = float(state.began == start)
        metrics["replay/progress"] = state.batches / self._total_batches
        metrics["replay/solve_rate"] = sum(successes) / len(successes) if successes else 0.0
        metrics["replay/solve_rate_running"] = self.solve_rate

        learned = [group for group in groups if not group.dropped]
        replayed = [t for group in learned for t in group.spec.replayed]
        metrics["replay/tasks"] = float(sum(bool(group.spec.replayed) for group in learned))
        metrics["replay/trajectories"] = float(len(replayed))
        metrics["replay/tokens"] = float(sum(t.sampled_tokens for t in replayed))
        if replayed:
            # the version of another run's trajectory may be higher than this run's: its age is then 0
            ages = [max(state.steps - t.info.get(_VERSION, t.version), 0) for t in replayed]
            metrics["replay/age_mean"] = float(np.mean(ages))
            metrics["replay/age_max"] = float(max(ages))
            metrics["replay/recorded_entropy"] = _recorded_entropy(replayed)
        if fresh := [t for group in learned for t in group.valid_fresh]:
            metrics["replay/fresh_entropy"] = _recorded_entropy(fresh)

        for name in _COUNTED:
            metrics[f"replay/{name}"] = float(state.planned.get(name, 0))
        metrics["replay/displaced"] = float(len(self._waiting))
        metrics["time/replay_plan_s"] = self._plan_seconds
        metrics["time/replay_select_s"] = self._recall.seconds
        state.planned = {}
        self._plan_seconds = self._recall.seconds = 0.0
        state.steps += 1
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Set a mark in the pool and return the JSON-serialisable state.

        Marks of steps from which no kept checkpoint resumes are dropped.
        """
        self._marks.append((self._state.steps, self.pool.mark()))
        kept = sorted({step for step, _ in self._marks})[-self._keep_marks :]
        self._marks = [(step, mark) for step, mark in self._marks if step >= kept[0]]
        if kept[0]:  # until the first checkpoint is on disk, a rewind to the run's start must be possible
            self.pool.forget(self._marks[0][1])
        return {
            "inner": self.inner.state_dict(),
            "mark": self._marks[-1][1],
            "marks": [list(entry) for entry in self._marks],
            "waiting": serialize.to_builtins(self._waiting),
            "replay": asdict(self._state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, and rewind the pool to it. Raises `UserError` if it was saved without replay."""
        if "mark" not in state:
            raise UserError("the checkpoint was saved without replay; resume it with replay.enabled = false")
        self.inner.load_state_dict(state["inner"])
        self.pool.rewind(state["mark"])  # this also deletes the mark of the start, made in `__init__`
        self._marks = [(step, mark) for step, mark in state["marks"]]
        self._waiting = serialize.from_builtins(state["waiting"], list[GroupSpec])
        self._state = _State(**state["replay"])


def _interleave(fresh: list[GroupSpec], replayed: list[GroupSpec], random: np.random.Generator) -> list[GroupSpec]:
    """Mix both lists at random, keeping the order of each, so that every chunk of a step holds some of both."""
    if not replayed:
        return fresh
    count = len(fresh) + len(replayed)
    places = set(random.choice(count, len(replayed), replace=False).tolist())
    halves = iter(fresh), iter(replayed)
    return [next(halves[place in places]) for place in range(count)]


def _recorded_entropy(trajectories: Sequence[Trajectory]) -> float:
    """Return minus the mean recorded log-prob of all sampled tokens."""
    logprobs = [turn.logprobs for t in trajectories for turn in t.sampled_turns() if turn.logprobs is not None]
    return -float(np.mean(np.concatenate(logprobs), dtype=np.float64)) if logprobs else 0.0
