"""The training loop: groups are sampled and scored, the learner consumes them, new weights are published.

`gleanrl.runtime.local` builds a `Run` from a configuration and calls `train`. The data flow is the same on every
schedule:

    what happens                                                          where
    produce_groups
        controller.ticket: when a group may start                         schedule/controller.py
        plan.next: its task; with replay, stored members too              curriculum/, experience/replay/curriculum.py
        make_group
            player.play: sampler and environment in turn                  rollout/player.py
            reward.score each trajectory, reward.finish the group         rewards/agent.py
        check.refusal: too few members with a valid score, no variance    schedule/group_check.py
        queue.put: refused if older than the bound                        schedule/controller.py
    run_step
        queue.chunks: the groups of this step; those that became too
            old while they waited are refused                             schedule/controller.py
        make_batch: guidance is removed; members with an invalid score
            are left out; samples, advantages, loss weights               runtime/local.py, algorithms/batch.py
        learner.update for each chunk: the loss, and an optimizer update
            for each complete mini-batch                                  learners/, algorithms/loss.py
        plan.observe: the curriculum and the pool see the groups          curriculum/, experience/
        sampler.publish: new weights                                      samplers/

A group that is refused goes to `Plan.drop`, and its ticket is handed out again.

Producing groups and learning from them run concurrently. `StalenessController` starts a group only when it can be
learned from before it is older than the schedule's bound, and `GroupQueue` checks the bound against the versions that
really sampled the group. The bound is for fresh members; stored ones are limited by ``replay.max_age`` alone.

Nothing in this module depends on which schedule, estimator, environment, curriculum or learner runs. With experience
replay the curriculum is a `ReplayCurriculum`, which adds stored trajectories to groups. With ``replay.pool_updates``
the learner is a `ReplayUpdateLearner`, whose last update of a step makes further optimizer updates on successes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from time import perf_counter
from typing import TYPE_CHECKING, Any

from gleanrl.config.settings import ScheduleSettings
from gleanrl.curriculum.plan import Plan
from gleanrl.protocols import CheckpointStore, Evaluator, Learner, Observer, Reward
from gleanrl.rollout.player import Player
from gleanrl.schedule.controller import STALE, GroupQueue, StalenessController, Ticket
from gleanrl.schedule.group_check import RESAMPLED, GroupCheck
from gleanrl.schedule.step_metrics import StepMetrics
from gleanrl.schedule.timeline import Timeline
from gleanrl.types import ENVIRONMENT_SCORE, UNPROCESSED_SCORE, Group, GroupSpec, StopReason, Task, Trajectory
from gleanrl.utils.errors import UserError
from gleanrl.utils.interruption import Interruption
from gleanrl.utils.seeding import derive

if TYPE_CHECKING:
    from gleanrl.algorithms.batch import Batch

log = logging.getLogger(__name__)

INSTANT_S = 1e-3  # a reward that takes less time, such as one from the cache, gets no span in the timeline


class StepState(Enum):
    """Progress of the current step, which decides whether the run can be saved when an error ends it."""

    BOUNDARY = auto()  # the learner has consumed nothing of the step
    WAITING = auto()  # the learner has consumed some chunks and the next one is not complete
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
    make_batch: Callable[[Sequence[Group]], Awaitable[Batch]]  # may run a critic or a reference policy
    learner: Learner
    controller: StalenessController
    evaluator: Evaluator
    evaluate_every: int  # steps; 0 = only before and after training
    checkpoints: CheckpointStore
    checkpoint_every: int  # steps; 0 = only at the end
    observer: Observer
    timeline: Timeline
    clock: Callable[[], float] = perf_counter  # returns seconds; the same clock as the timeline's
    interruption: Interruption = field(default_factory=Interruption)
    step_state: StepState = StepState.BOUNDARY

    @property
    def step(self) -> int:
        """Index of the current step, which is the number of steps finished so far."""
        return self.controller.version

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint's state besides the learner's, JSON-serialisable. Call it between two steps."""
        return {"controller": self.controller.state_dict(), "plan": self.plan.state_dict()}

    async def save(self, state: dict[str, Any] | None = None) -> None:
        """Write a checkpoint of the last finished step, with ``state`` if it was captured earlier.

        Files are written in a thread, so groups continue to be produced.
        """
        with self.timeline.span("checkpoint", step=self.step):
            state = self.state_dict() if state is None else state
            await asyncio.to_thread(self.checkpoints.save, self.step, state, self.learner.save)


# --- producing groups -----------------------------------------------------------------------------
async def score_trajectory(reward: Reward, task: Task, trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with its reward.

    If the environment failed, the trajectory keeps the invalid score that the player has given (`Score.failed`) and is
    not sent to the reward. An environment's score that the reward replaces is kept in ``info``.
    """
    if trajectory.stop in (StopReason.ERROR, StopReason.TIMEOUT):
        return trajectory
    return trajectory.rescored(await reward.score(task, trajectory), ENVIRONMENT_SCORE)


async def make_group(run: Run, ticket: Ticket, spec: GroupSpec) -> Group:
    """Sample and score the fresh members of a group concurrently, and add the replayed ones."""
    temperatures = [None] * spec.fresh + [0.0] * spec.greedy  # None = the run's temperature
    to_be_played = len(temperatures)

    async def play_member(index: int, temperature: float | None) -> Trajectory:
        nonlocal to_be_played
        seed = derive(run.seed, "rollout", ticket.number, ticket.attempt, index)
        name = f"{ticket.number:06d}.{ticket.attempt}.{index}"
        played = await run.player.play(spec.task, trajectory_id=name, seed=seed, temperature=temperature)
        to_be_played -= 1
        if to_be_played == 0:  # scoring needs no device, so the schedule may give it to other work
            run.controller.sampled(ticket)
        with run.timeline.span("score", least_s=INSTANT_S, ticket=ticket.number, member=index):
            return await score_trajectory(run.rewards, spec.task, played)

    async with asyncio.TaskGroup() as members:
        tasks = [members.create_task(play_member(index, t)) for index, t in enumerate(temperatures)]
    played = [task.result() for task in tasks]

    with run.timeline.span("score", least_s=INSTANT_S, ticket=ticket.number, what="finish"):
        scores = await run.rewards.finish(spec.task, [trajectory.score for trajectory in played])
    played = [t.rescored(score, UNPROCESSED_SCORE) for t, score in zip(played, scores, strict=True)]
    greedy = played[spec.fresh] if spec.greedy else None
    return Group(spec, (*played[: spec.fresh], *spec.replayed), ticket.number, greedy)


@asynccontextmanager
async def produce_groups(run: Run) -> AsyncIterator[GroupQueue]:
    """Produce groups into the queue while the block runs. The consumer of the queue gets the producer's errors."""
    queue = GroupQueue(
        run.controller,
        timeline=run.timeline,
        clock=run.clock,
        on_drop=lambda group: run.plan.drop(group, STALE),
    )
    check = GroupCheck(run.settings)

    async def produce_one(ticket: Ticket, spec: GroupSpec) -> None:
        group = await make_group(run, ticket, spec)
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

    A `UserError` (for example too many failures) ends the run too. Finished steps are saved first, unless the current
    step has already changed the weights.
    """
    try:
        await start_evaluation_if_due(run)
        async with produce_groups(run) as queue:
            while run.step < run.total_steps and not run.interruption.interrupted and await run_step(run, queue):
                await save_and_evaluate_if_due(run)
        await run.interruption.unless_interrupted(run.evaluator.finish())
        await run.save()
    except UserError:
        await save_finished_steps(run)
        raise
    finally:
        await run.evaluator.cancel()


async def run_step(run: Run, queue: GroupQueue) -> bool:
    """Learn from one batch and publish the weights. Returns False if interrupted before anything was learned."""
    started = run.clock()
    consumed: list[Group] = []
    totals = StepMetrics()
    chunks = queue.chunks(run.step, adaptive=run.settings.adaptive)
    while True:
        next_chunk = anext(chunks, None)
        # a step that has begun is finished, so only the wait for its first chunk can be interrupted
        groups = await (next_chunk if consumed else run.interruption.unless_interrupted(next_chunk))
        if groups is None:
            break
        run.step_state = StepState.LEARNING
        batch = await run.make_batch(groups)
        run.observer.on_batch(groups, batch)
        totals.add(await run.learner.update(batch), weight=len(groups))
        consumed += groups
        run.step_state = StepState.WAITING
    if not consumed:
        return False

    run.step_state = StepState.LEARNING
    metrics = {**totals.result(consumed), **queue.metrics(), **run.plan.observe(consumed)}
    with run.timeline.span("publish", step=run.step):
        # in a thread, because the learner may wait for a forward pass that needs the event loop
        weights = await asyncio.to_thread(run.learner.weights)
        await run.player.sampler.publish(weights, run.step + 1)
    run.controller.published(run.step + 1)
    run.observer.on_step(run.step, consumed, {**metrics, "time/step_s": run.clock() - started})
    run.step_state = StepState.BOUNDARY
    return True


async def save_and_evaluate_if_due(run: Run) -> None:
    due = run.checkpoint_every and run.step % run.checkpoint_every == 0
    if due and run.step < run.total_steps:  # the last checkpoint is written after the last evaluation
        # The state is captured before the wait for the evaluation: a resumed run samples again what was sampled during
        # the wait, with the same result. The wait is needed because a resumed run cannot evaluate older weights again.
        state = run.state_dict()
        await run.interruption.unless_interrupted(run.evaluator.finish())
        await run.save(state)
    await start_evaluation_if_due(run)


async def start_evaluation_if_due(run: Run) -> None:
    """Evaluate before and after training, and every ``evaluate_every`` steps between, concurrently with training."""
    if run.step in (0, run.total_steps) or (run.evaluate_every and run.step % run.evaluate_every == 0):
        await run.interruption.unless_interrupted(run.evaluator.start(run.step))


async def save_finished_steps(run: Run) -> None:
    """Save the finished steps that an error would lose, if there are any and the current step can be undone."""
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
