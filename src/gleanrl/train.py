"""The whole job: groups are produced, scored and learned from, on any schedule.

Rollouts, rewards and updates are concurrent; what may start when is the `StalenessController`'s business, what is
consumed when is `GroupQueue`'s. Nothing here knows which schedule, estimator, environment or curriculum
runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from gleanrl.config.settings import ScheduleSettings
from gleanrl.curriculum.curriculum import Plan
from gleanrl.protocols import Learner, Metrics, Reward
from gleanrl.rewards import EnvironmentReward
from gleanrl.rollout.player import Player
from gleanrl.runtime.checkpoints import Checkpoints
from gleanrl.runtime.evaluation import scored
from gleanrl.runtime.metrics import StepMetrics
from gleanrl.schedule.schedule import GroupQueue, Schedule, StalenessController, Ticket
from gleanrl.schedule.timeline import Timeline
from gleanrl.types import UNPROCESSED_SCORE, Group, GroupSpec, Trajectory
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive

if TYPE_CHECKING:
    from gleanrl.algorithms.batch import Batch

T = TypeVar("T")
log = logging.getLogger(__name__)

INSTANT_S = 1e-3
"""A reward that is there sooner, from the cache say, gets no span."""


class Observer(Protocol):
    """What a run tells the outside world."""

    def log(self, step: int, metrics: Metrics) -> None: ...
    def learning(self, groups: Sequence[Group], batch: Batch) -> None: ...
    def step(self, step: int, groups: Sequence[Group], metrics: Metrics) -> None: ...


@runtime_checkable
class Undoing(Protocol):
    """A learner that can forget the groups of a step under way, as long as they have not changed its weights."""

    def undo_step(self) -> bool: ...


class Evaluator(Protocol):
    """Evaluates beside training: ``start`` takes a snapshot of the weights and returns at once."""

    async def start(self, step: int) -> None: ...  # waits for an earlier one first
    async def finish(self) -> None: ...
    async def cancel(self) -> None: ...


@dataclass
class Run:
    """The parts of a run and where it stands."""

    seed: int
    total_steps: int
    schedule: Schedule
    settings: ScheduleSettings
    player: Player
    rewards: Reward
    learner: Learner
    plan: Plan
    batch: Callable[[Sequence[Group]], Awaitable[Batch]]  # with credit; may ask the learner's models first
    evaluator: Evaluator
    checkpoints: Checkpoints
    checkpoint_every: int
    evaluate_every: int
    observer: Observer
    timeline: Timeline
    controller: StalenessController
    interrupted: bool = False
    between_steps: bool = True  # nothing of the next step is learned from, all of the last one is told
    between_chunks: bool = False  # of a step: the next one is waited for
    clock: Callable[[], float] = perf_counter  # seconds; the timeline's
    _waiting: asyncio.Future[Any] | None = field(default=None, repr=False)

    @property
    def step(self) -> int:
        """Steps whose groups are consumed and whose weights are published; the next step's index."""
        return self.controller.version

    def interrupt(self) -> None:
        """Stop at the next step boundary: at once if the running step has not been learned from yet.

        An evaluation that the run waits for is given up.
        """
        self.interrupted = True
        if self._waiting is not None:
            self._waiting.cancel()

    def scoring(self, **tags: Any) -> AbstractContextManager[None]:
        """Records the span of a training reward that has to be waited for."""
        if type(self.rewards) is EnvironmentReward:  # one derived from it may take its time
            return nullcontext()
        return self.timeline.span("score", least_s=INSTANT_S, **tags)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds beside the learner, between two steps; JSON-ready."""
        return {"controller": self.controller.state_dict(), "plan": self.plan.state_dict()}

    async def checkpoint(self, state: dict[str, Any] | None = None) -> None:
        """Save where the run stands, or ``state`` of this step; the files are written on a thread, while groups go on
        being produced."""
        with self.timeline.span("checkpoint", step=self.step):
            state = self.state_dict() if state is None else state
            await asyncio.to_thread(self.checkpoints.save, self.step, state, self.learner.save)


def restore(
    checkpoints: Checkpoints, learner: Learner, plan: Plan, schedule: Schedule, total_steps: int
) -> StalenessController:
    """Put learner and plan back to the newest good checkpoint; the controller that goes on from there.

    Without any checkpoint nothing changes and the controller starts at step 0. Raises `UserError` if every
    checkpoint is damaged.
    """
    found = checkpoints.latest()
    if found is None:
        return StalenessController(schedule, total_steps)
    folder, state = found
    learner.load(folder)
    plan.load_state_dict(state["plan"])
    return StalenessController.resume(schedule, total_steps, state["controller"])


# --- producing groups ---------------------------------------------------------------------------
async def make_group(run: Run, ticket: Ticket, spec: GroupSpec) -> Group:
    """Play and score the fresh members of a group, each on its own, and put the replayed ones beside them."""

    left = spec.fresh + spec.greedy  # to be played

    async def member(index: int, temperature: float | None = None) -> Trajectory:
        nonlocal left
        seed = derive(run.seed, "rollout", ticket.number, ticket.attempt, index)
        name = f"{ticket.number:06d}.{ticket.attempt}.{index}"
        played = await run.player.play(spec.task, trajectory_id=name, seed=seed, temperature=temperature)
        left -= 1
        if not left:
            run.controller.sampled(ticket)
        with run.scoring(ticket=ticket.number, member=index):
            return await scored(run.rewards, spec.task, played)

    temperatures = [None] * spec.fresh + [0.0] * spec.greedy
    async with asyncio.TaskGroup() as members:
        tasks = [members.create_task(member(*indexed)) for indexed in enumerate(temperatures)]
    played = [task.result() for task in tasks]
    with run.scoring(ticket=ticket.number, what="finish"):
        scores = await run.rewards.finish(spec.task, [trajectory.score for trajectory in played])
    played = [t.rescored(score, UNPROCESSED_SCORE) for t, score in zip(played, scores, strict=True)]
    greedy = played[spec.fresh] if spec.greedy else None
    return Group(spec, (*played[: spec.fresh], *spec.replayed), ticket.number, greedy)


RESAMPLED, STALE = "resampled_zero_variance", "dropped_stale"
UNSCORED_WINDOWS = 4  # times as many episodes without any score, applicable or not, end a run that would never learn


class Admission:
    """Decides whether a finished group may be learned from, and stops a run that only fails."""

    def __init__(self, settings: ScheduleSettings, plan: Plan) -> None:
        self.settings, self.plan = settings, plan
        window = max(32, settings.batch * settings.group)
        self._failed: deque[bool] = deque(maxlen=window)  # of those that a score was to be had for
        self._scored: deque[bool] = deque(maxlen=UNSCORED_WINDOWS * window)

    def refusal(self, group: Group) -> str | None:
        """Why the group is dropped; None if it is learned from. Raises `UserError` once most episodes fail."""
        self._watch(group)
        valid = group.valid_fresh
        if group.spec.fresh and len(valid) < min(self.settings.min_valid, group.spec.fresh):
            return "dropped_invalid"
        if group.greedy is not None and not group.greedy.score.valid:
            return "dropped_invalid"  # there is nothing to compare its members with
        settings = self.settings
        compared = (*group.trajectories, *filter(None, [group.greedy]))
        values = {t.score.value for t in compared if t.score.valid}
        if settings.dynamic_sampling and len(values) < 2:
            may_resample = self.plan.dropped(RESAMPLED) < (settings.max_resample - 1) * settings.batch
            return RESAMPLED if may_resample else None
        return None

    def _watch(self, group: Group) -> None:
        self._scored.extend(t.score.valid for t in group.fresh)
        if len(self._scored) == self._scored.maxlen and not any(self._scored):
            why = next((t.score.explanation for t in reversed(group.fresh)), None)
            raise UserError(f"none of the last {len(self._scored)} episodes got a score; the last one: {why}")
        self._failed.extend(not t.score.valid for t in group.fresh if t.score.applicable)
        share = sum(self._failed) / len(self._failed) if self._failed else 0.0
        if len(self._failed) >= 32 and share > self.settings.max_failed_fraction:
            last = next((t for t in reversed(group.fresh) if not t.score.valid and t.score.applicable), None)
            why = f"; the last one: {last.score.explanation}" if last else ""
            raise UserError(
                f"{share:.0%} of the last {len(self._failed)} episodes failed, more than "
                f"schedule.max_failed_fraction = {self.settings.max_failed_fraction}{why}"
            )


async def produce(run: Run, ready: GroupQueue) -> None:
    """Start every ticket as soon as the schedule lets it, and deliver or refund it."""
    admission = Admission(run.settings, run.plan)

    async def one(ticket: Ticket, spec: GroupSpec) -> None:
        group = await make_group(run, ticket, spec)
        reason = admission.refusal(group)
        if reason is None:
            ready.put(ticket, group)
        else:
            run.plan.drop(group, reason)
            run.controller.refund(ticket)

    async with asyncio.TaskGroup() as groups:
        while (ticket := await run.controller.ticket()) is not None:
            groups.create_task(one(ticket, await run.plan.next(ticket)))


@asynccontextmanager
async def producing(run: Run) -> AsyncIterator[GroupQueue]:
    """Groups are produced while the block runs; an error of the producer is raised by the consumer."""

    def too_old(group: Group) -> None:
        run.plan.drop(group, STALE)

    ready = GroupQueue(run.controller, timeline=run.timeline, clock=run.clock, on_drop=too_old)

    async def guarded() -> None:
        try:
            await produce(run, ready)
        except BaseExceptionGroup as group:
            ready.fail(_first(group))
        except Exception as error:
            ready.fail(error)

    producer = asyncio.create_task(guarded())
    try:
        yield ready
    finally:
        producer.cancel()
        with suppress(asyncio.CancelledError):
            await producer


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# --- learning from them -------------------------------------------------------------------------
async def train(run: Run) -> None:
    """Train to ``run.total_steps`` or until interrupted; leaves a checkpoint of the last step either way.

    It leaves one too where a `UserError` (an error budget, say) ends the run before a step was learned from.
    """
    try:
        if _evaluation_due(run):
            await _unless_interrupted(run, run.evaluator.start(run.step))
        async with producing(run) as ready:
            while run.step < run.total_steps and not run.interrupted and await _step(run, ready):
                await _checkpoint_and_evaluate(run)
        await _unless_interrupted(run, run.evaluator.finish())
        await run.checkpoint()
    except UserError:
        await _keep_finished_steps(run)
        raise
    finally:
        await run.evaluator.cancel()


async def _keep_finished_steps(run: Run) -> None:
    """Save them where an error ends the run, if there are any and no step has changed the weights in part."""
    if run.step == run.controller.first_step or not (run.between_steps or _undo_step(run)):
        return
    try:
        await run.checkpoint()
    except Exception as error:  # what ended the run is to be told, not this
        log.warning("the run's last state could not be saved: %s", error)


def _undo_step(run: Run) -> bool:
    """Go back to the step's beginning, if it only waits for its next chunk and its learner can."""
    if not (run.between_chunks and isinstance(run.learner, Undoing) and run.learner.undo_step()):
        return False
    run.controller.undo_step()
    return True


async def _step(run: Run, ready: GroupQueue) -> bool:
    """Learn from one batch and publish the weights; False if interrupted before anything was learned."""
    started = run.clock()
    consumed: list[Group] = []
    totals = StepMetrics()
    chunks = ready.chunks(run.step, adaptive=run.settings.adaptive)
    while (groups := await _next_chunk(run, chunks, interruptible=not consumed)) is not None:
        run.between_steps = run.between_chunks = False
        batch = await run.batch(groups)
        run.observer.learning(groups, batch)
        totals.add(await run.learner.update(batch), weight=len(groups))
        consumed += groups
        run.between_chunks = True
    run.between_chunks = False
    if not consumed:
        return False
    metrics = {**totals.result(consumed), **ready.metrics(), **run.plan.observe(consumed)}
    with run.timeline.span("publish", step=run.step):
        weights = await asyncio.to_thread(run.learner.weights)  # they may wait for an appraisal, as that for the loop
        await run.player.sampler.publish(weights, run.step + 1)
    run.controller.published(run.step + 1)
    run.observer.step(run.step, consumed, {**metrics, "time/step_s": run.clock() - started})
    run.between_steps = True
    return True


async def _next_chunk(run: Run, chunks: AsyncIterator[list[Group]], *, interruptible: bool) -> list[Group] | None:
    """The next chunk of this step, None at its end or when an interrupt came before its first."""
    chunk = anext(chunks, None)
    return await (_unless_interrupted(run, chunk) if interruptible else chunk)


async def _unless_interrupted(run: Run, work: Awaitable[T]) -> T | None:
    """The result of ``work``, or None where an interrupt cancelled it."""
    waiting = run._waiting = asyncio.ensure_future(work)
    if run.interrupted:
        waiting.cancel()
    try:
        return await waiting
    except asyncio.CancelledError:
        if run.interrupted and waiting.cancelled() and not _being_cancelled():
            return None
        raise
    finally:
        run._waiting = None


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _checkpoint_and_evaluate(run: Run) -> None:
    due = run.checkpoint_every and run.step % run.checkpoint_every == 0
    if due and run.step < run.total_steps:  # the last one is saved once its evaluation is in
        state = run.state_dict()  # of now: what is sampled during the wait is sampled again, in the same company
        # a resumed run goes on from here, and cannot make up for an evaluation of older weights
        await _unless_interrupted(run, run.evaluator.finish())
        await run.checkpoint(state)
    if _evaluation_due(run):
        await _unless_interrupted(run, run.evaluator.start(run.step))


def _evaluation_due(run: Run) -> bool:
    """Before and after training, and every few steps between."""
    return run.step in (0, run.total_steps) or bool(run.evaluate_every and run.step % run.evaluate_every == 0)
