"""The training loop: groups are sampled and scored, the learner learns from them, and its new weights are published.

`gleanrl.runtime.local` builds a `Run` from a configuration and calls `train`. The data flow is the same on every
schedule:

    what happens                                                          where
    produce_groups
        controller.ticket: waits until a group may start                  schedule/controller.py
        plan.next: the group's task; with replay, its stored members      curriculum/, experience/replay/curriculum.py
        make_group
            player.play: sampler and environment in turn                  rollout/player.py
            reward.score each trajectory, reward.finish the group         rewards/agent.py
        check.refusal: the group is refused if too few members have a
            valid score or if all scores are equal                        schedule/group_check.py
        queue.put: the group is refused if older than the bound           schedule/controller.py
    run_step
        queue.chunks: the groups of this step; those that became too
            old while they waited are refused                             schedule/controller.py
        make_batch: guidance is removed; members with an invalid score
            are left out; samples, advantages, loss weights               runtime/local.py, algorithms/batch.py
        learner.update for each chunk: the loss, and an optimizer update
            for each complete mini-batch                                  learners/, algorithms/loss.py
        plan.observe: the curriculum and the pool see the groups          curriculum/, experience/
        sampler.publish: new weights                                      samplers/

Each group is sampled under a numbered *ticket*, which `StalenessController` hands out. A group that is refused goes to
`Plan.drop`, and its ticket is handed out again, for another group. A *chunk* is a part of a step's batch that the
learner receives in one call.

Producing groups and learning from them run concurrently. `StalenessController` starts a group only if the group can be
learned from before it is older than the schedule's staleness bound. `GroupQueue` then checks the bound against the
versions of the weights that really sampled the group. The bound applies to fresh members; the age of stored members is
limited by ``replay.max_age`` alone.

The code in this module is the same for every schedule, estimator, environment, curriculum and learner. With experience
replay the curriculum is a `ReplayCurriculum`, which adds stored trajectories to groups. With ``replay.pool_updates``
the learner is a `ReplayUpdateLearner`: the last ``update`` call of each step also makes further optimizer updates on
successful trajectories.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from time import perf_counter
from typing import TYPE_CHECKING, Any

from gleanrl.config.settings import ScheduleSettings
from gleanrl.curriculum.plan import Plan
from gleanrl.protocols import CheckpointStore, Evaluator, Learner, Observer, Reward
from gleanrl.rollout.player import Player
from gleanrl.schedule.collapse import CollapseWatch
from gleanrl.schedule.controller import STALE, GroupQueue, StalenessController, Ticket
from gleanrl.schedule.group_check import RESAMPLED, GroupCheck
from gleanrl.schedule.step_metrics import StepMetrics
from gleanrl.schedule.timeline import Timeline
from gleanrl.types import (
    ENVIRONMENT_SCORE,
    GROUP_SIZE,
    GROUP_UID,
    SUCCESS,
    UNPROCESSED_SCORE,
    Group,
    GroupSpec,
    StopReason,
    Task,
    Trajectory,
)
from gleanrl.utils.errors import UserError
from gleanrl.utils.interruption import Interruption
from gleanrl.utils.seeding import derive

if TYPE_CHECKING:
    from gleanrl.algorithms.batch import Batch

log = logging.getLogger(__name__)

INSTANT_S = 1e-3  # seconds; a reward that takes less time, such as one from the cache, gets no span in the timeline
FAILED = frozenset({StopReason.ERROR, StopReason.TIMEOUT})  # of an episode whose environment failed


class StepState(Enum):
    """Progress of the current step, which decides whether the run can be saved when an error ends it."""

    BOUNDARY = auto()  # the learner has not received any chunk (part of the batch) of the step
    WAITING = auto()  # the learner has consumed at least one chunk, and the run waits for the next chunk
    LEARNING = auto()  # the learner works on a chunk, or the weights are being published


@dataclass
class Run:
    """The parts of a run and its current state."""

    seed: int
    total_steps: int
    settings: ScheduleSettings
    plan: Plan
    player: Player
    rewards: Reward
    make_batch: Callable[[Sequence[Group]], Awaitable[Batch]]  # for some settings, runs a critic or a reference policy
    learner: Learner
    controller: StalenessController
    evaluator: Evaluator
    evaluate_every: int  # number of steps between evaluations; 0 = evaluate only before and after training
    checkpoints: CheckpointStore
    checkpoint_every: int  # number of steps between checkpoints; 0 = save only at the end
    observer: Observer
    timeline: Timeline
    watch: CollapseWatch = field(default_factory=CollapseWatch)
    return_on_collapse: bool = False  # whether the learner goes back to a good checkpoint after a collapse of success
    success_threshold: float = SUCCESS  # minimum score of a solved task, in the metrics of a step
    clock: Callable[[], float] = perf_counter  # returns seconds; must be the clock of ``timeline``
    interruption: Interruption = field(default_factory=Interruption)
    step_state: StepState = StepState.BOUNDARY
    evaluation_error: BaseException | None = None  # the error of an evaluation that failed in the background

    @property
    def step(self) -> int:
        """Index of the current step, counted from 0; equal to the number of finished steps."""
        return self.controller.version

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serialisable part of a checkpoint: all state except the learner's. Call it between steps."""
        return {
            "controller": self.controller.state_dict(),
            "plan": self.plan.state_dict(),
            "watch": self.watch.state_dict(),
        }

    def evaluation_failed(self, error: BaseException) -> None:
        """Let the run end with ``error`` before its next step. A step that has begun is finished first."""
        self.evaluation_error = self.evaluation_error or error
        self.interruption.cancel_waiting()

    async def save(self, state: dict[str, Any] | None = None) -> None:
        """Write a checkpoint of the last finished step. ``state`` is the result of an earlier call of `state_dict`.

        Without ``state``, the present state is saved. A thread writes the files, so that groups continue to be produced
        meanwhile.
        """
        with self.timeline.span("checkpoint", step=self.step):
            state = self.state_dict() if state is None else state
            kept = self.watch.kept_steps if self.return_on_collapse else []
            await asyncio.to_thread(self.checkpoints.save, self.step, state, self.learner.save, kept)


# --- producing groups -----------------------------------------------------------------------------
async def score_trajectory(
    reward: Reward, task: Task, trajectory: Trajectory, group: Mapping[str, Any] | None = None
) -> Trajectory:
    """Return the trajectory with the score that the reward gives it.

    ``group`` are entries that describe the trajectory's group. The reward sees them in ``info``; they are not kept.

    If the environment failed, the trajectory is not sent to the reward and keeps the invalid score (`Score.failed`)
    that the player has set. If the reward replaces a score of the environment, ``info`` keeps the value of that score.
    """
    if trajectory.stop in FAILED:
        return trajectory
    seen = trajectory if group is None else replace(trajectory, info={**trajectory.info, **group})
    return trajectory.rescored(await reward.score(task, seen), ENVIRONMENT_SCORE)


async def make_group(run: Run, ticket: Ticket, spec: GroupSpec) -> Group:
    """Sample and score the fresh members of a group concurrently, and add the replayed ones."""
    temperatures = [None] * spec.fresh + [0.0] * spec.greedy  # None = the run's temperature
    to_be_played = len(temperatures)
    uid = f"{ticket.number:06d}.{ticket.attempt}"

    async def play_member(index: int, temperature: float | None) -> Trajectory:
        nonlocal to_be_played
        seed = derive(run.seed, "rollout", ticket.number, ticket.attempt, index)
        played = await run.player.play(
            spec.task, trajectory_id=f"{uid}.{index}", seed=seed, temperature=temperature, start=spec.start
        )
        to_be_played -= 1
        if to_be_played == 0:  # the group needs the device no longer, so the schedule may now prefer other work
            run.controller.sampled(ticket)
        group = {GROUP_UID: uid, GROUP_SIZE: spec.fresh} if index < spec.fresh else None  # None = the greedy attempt
        with run.timeline.span("score", least_s=INSTANT_S, ticket=ticket.number, member=index):
            return await score_trajectory(run.rewards, spec.task, played, group)

    async with asyncio.TaskGroup() as members:
        tasks = [members.create_task(play_member(index, t)) for index, t in enumerate(temperatures)]
    played = [task.result() for task in tasks]

    with run.timeline.span("score", least_s=INSTANT_S, ticket=ticket.number, what="finish"):
        scores = await run.rewards.finish(spec.task, [trajectory.score for trajectory in played])
    played = [
        t if t.stop in FAILED else t.rescored(score, UNPROCESSED_SCORE) for t, score in zip(played, scores, strict=True)
    ]
    greedy = played[spec.fresh] if spec.greedy else None
    return Group(spec, (*played[: spec.fresh], *spec.replayed), ticket.number, greedy)


@asynccontextmanager
async def produce_groups(run: Run) -> AsyncIterator[GroupQueue]:
    """Yield a queue, and put finished groups into it while the block runs.

    If producing a group fails, `GroupQueue.chunks` raises the error.
    """
    queue = GroupQueue(
        run.controller,
        timeline=run.timeline,
        clock=run.clock,
        on_drop=lambda group: run.plan.drop(group, STALE),
    )
    check = GroupCheck(run.settings)

    async def produce_one(ticket: Ticket, spec: GroupSpec) -> None:
        try:
            group = await make_group(run, ticket, spec)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Such a cancellation is no error for the task group, which would wait for the ticket forever.
            raise RuntimeError(
                f"task {spec.task.id!r}: an episode was cancelled by code that it calls, such as the environment"
            ) from None
        reason = check.refusal(group, resampled=run.plan.dropped(RESAMPLED))
        if reason is None:
            queue.put(ticket, group)
        else:
            run.plan.drop(group, reason)
            run.controller.refund(ticket)

    async def produce_all() -> None:
        try:
            async with asyncio.TaskGroup() as groups:
                while (ticket := await run.controller.ticket()) is not None:
                    groups.create_task(produce_one(ticket, await run.plan.next(ticket)))
        except BaseExceptionGroup as errors:
            error: BaseException = errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            queue.fail(error)
        except asyncio.CancelledError:
            if producer.cancelling():
                raise
            queue.fail(RuntimeError("the production of groups was cancelled by code that it calls: the curriculum"))
        except Exception as error:
            queue.fail(error)

    producer = asyncio.create_task(produce_all())
    try:
        yield queue
    finally:
        producer.cancel()
        with suppress(asyncio.CancelledError):
            await producer


# --- learning from groups -------------------------------------------------------------------------
async def train(run: Run) -> None:
    """Train until ``run.total_steps`` steps are done or the run is interrupted, then write a checkpoint.

    A `UserError`, such as the error for too many failed episodes, also ends the run. Then the finished steps are saved
    before the error is raised, unless the current step has already changed the weights. Any error of an evaluation ends
    the run between two steps, and the finished steps are saved.

    An interruption cancels an evaluation that is running, because waiting for its rewards could take minutes. A resumed
    run no longer has the weights of that step, so it does not repeat the evaluation.
    """
    try:
        await start_evaluation_if_due(run)
        async with produce_groups(run) as queue:
            while (
                run.step < run.total_steps
                and not run.interruption.interrupted
                and run.evaluation_error is None
                and await run_step(run, queue)
            ):
                await save_and_evaluate_if_due(run)
        await run.interruption.unless_interrupted(run.evaluator.finish())
        if run.evaluation_error is not None:
            raise run.evaluation_error
        await run.save()
    except BaseException as error:
        if isinstance(error, UserError) or error is run.evaluation_error:
            await save_finished_steps(run)
        raise
    finally:
        await run.evaluator.cancel()


async def run_step(run: Run, queue: GroupQueue) -> bool:
    """Learn from the groups of one step and publish the new weights.

    Returns True if the step is finished, False if an interruption or the failure of an evaluation came before the
    step's first chunk.
    """
    started = run.clock()
    consumed: list[Group] = []
    totals = StepMetrics(run.success_threshold)
    chunks = queue.chunks(run.step, adaptive=run.settings.adaptive)
    while True:
        next_chunk = anext(chunks, None)
        # A step that has consumed a chunk is always finished, so only the wait for its first chunk can be interrupted.
        groups = await (next_chunk if consumed else run.interruption.unless_interrupted(next_chunk))
        if groups is None:
            break
        run.step_state = StepState.LEARNING
        if run.controller.schedule.in_waves:
            await finish_shared_evaluation(run)
            await run.player.sampler.rest()
        batch = await run.make_batch(groups)
        run.observer.on_batch(groups, batch)
        totals.add(await run.learner.update(batch), weight=len(groups))
        consumed += groups
        run.step_state = StepState.WAITING
    if not consumed:
        return False

    run.step_state = StepState.LEARNING
    metrics = {**totals.result(consumed), **queue.metrics()}
    metrics |= run.plan.observe(consumed, metrics)
    if (collapse := run.watch.observe(metrics)) is not None:
        await report_collapse(run, collapse)
    if run.watch.noticed:
        metrics |= {"collapse/noticed": float(run.watch.noticed), "collapse/returns": float(run.watch.returns)}
    await finish_shared_evaluation(run)
    with run.timeline.span("publish", step=run.step):
        # in a thread, because the learner may wait for a forward pass that needs the event loop
        weights = await asyncio.to_thread(run.learner.weights)
        await run.player.sampler.publish(weights, run.step + 1)
    run.controller.published(run.step + 1)
    run.observer.on_step(run.step, consumed, {**metrics, "time/step_s": run.clock() - started}, run.plan.refused)
    run.step_state = StepState.BOUNDARY
    return True


async def report_collapse(run: Run, collapse: str) -> None:
    """Log a collapse of success. If the run is set to return, restore the learner from the last good checkpoint."""
    if not run.return_on_collapse:
        log.warning("step %d: %s; checkpoint.return_on_collapse would go back", run.step + 1, collapse)
        return
    # in a thread, because all files of the checkpoint are read
    good = None if run.watch.good is None else await asyncio.to_thread(run.checkpoints.find, run.watch.good)
    if good is None:
        log.warning("step %d: %s; no checkpoint is known to be good, so the weights stay", run.step + 1, collapse)
    else:
        await asyncio.to_thread(run.learner.return_to, good)
        run.watch.returned()
        message = "step %d: %s; the weights are those of %s again, and the learning rate is halved"
        log.warning(message, run.step + 1, collapse, good.name)


async def finish_shared_evaluation(run: Run) -> None:
    """Wait for the running evaluation if it uses training's sampler, which is to lose its weights.

    An interruption cancels the evaluation, also one that came while the learner worked: the result of two versions of
    the weights would be reported as the result of one.
    """
    if run.evaluator.shares_sampler:
        await run.interruption.unless_interrupted(run.evaluator.finish())
        if run.interruption.interrupted:
            await run.evaluator.cancel()


async def save_and_evaluate_if_due(run: Run) -> None:
    last = run.step == run.total_steps
    due = run.checkpoint_every and run.step % run.checkpoint_every == 0
    # A checkpoint that is written because of an interruption or an error does not count. A resumed run then goes back
    # to the same checkpoint as a run that was never interrupted.
    if due or last:
        run.watch.saved(run.step)
    if due and not last:  # the last checkpoint is written after the last evaluation
        # The running evaluation must finish before the checkpoint is written, because a run that resumes from this
        # checkpoint cannot evaluate older weights again. The state is captured before this wait, at the end of the
        # step: groups that are sampled during the wait are not in it, and a resumed run samples them again, with the
        # same result.
        state = run.state_dict()
        await run.interruption.unless_interrupted(run.evaluator.finish())
        await run.save(state)
    await start_evaluation_if_due(run)


async def start_evaluation_if_due(run: Run) -> None:
    """Start an evaluation before the first step, after the last step, and after every ``evaluate_every`` steps.

    Training continues while the evaluation runs. No evaluation is started if one has failed.
    """
    if run.evaluation_error is not None:
        return
    if run.step in (0, run.total_steps) or (run.evaluate_every and run.step % run.evaluate_every == 0):
        await run.interruption.unless_interrupted(run.evaluator.start(run.step, run.evaluation_failed))


async def save_finished_steps(run: Run) -> None:
    """Write a checkpoint after an error, so that the steps finished since the run's start are not lost.

    Does nothing if this process has finished no step, or if the current step cannot be undone.
    """
    if run.step == run.controller.first_step:
        return
    if run.step_state is StepState.WAITING and run.learner.undo_step():
        run.controller.undo_step()
    elif run.step_state is not StepState.BOUNDARY:
        return
    try:
        await run.save()
    except Exception as error:  # the error that ends the run matters more
        log.warning("the run's last state could not be saved: %s", error)
