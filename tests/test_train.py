"""The training loop (`gleanrl.train`) with the real scheduler, rollouts and batches.

The sampler, environment and learner are those of `tests.loop_world`, so that every step can be checked exactly.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gleanrl.config.settings import ScheduleSettings
from gleanrl.curriculum.orders import TaskStream
from gleanrl.curriculum.plan import Plan
from gleanrl.protocols import Observation
from gleanrl.rewards import Fatal, NotApplicable, Request, RewardAgent
from gleanrl.runtime.checkpoints import restore
from gleanrl.schedule.controller import Ticket
from gleanrl.schedule.timeline import Timeline, read_timeline
from gleanrl.simulate import virtual_time
from gleanrl.train import Run, StepState, train
from gleanrl.types import Group, Message, Score, StopReason, Task, Trajectory
from gleanrl.utils.errors import UserError
from tests.loop_world import GuessEnvironment, RecordingEvaluator, alter_answers, make_run, renderer, tasks

PRESETS = ["sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async"]


def run_to_end(run) -> None:
    asyncio.run(asyncio.wait_for(train(run), 60))


def fingerprint(run) -> list:
    """Return all groups that each step consumed: their tickets, tasks and tokens."""
    return [
        (
            step,
            [
                (g.ticket, g.spec.task.id, [[t.tokens.tolist() for t in x.turns()] for x in g.trajectories])
                for g in groups
            ],
        )
        for step, groups, _ in run.observer.steps
    ]


@pytest.mark.parametrize("preset", PRESETS)
def test_each_step_consumes_one_batch_of_groups_within_the_staleness_bound(tmp_path: Path, preset: str) -> None:
    settings = ScheduleSettings(preset=preset, batch=4, group=3, chunks=2, staleness=2, min_valid=1)
    rng = np.random.default_rng(3)
    delays = {}
    run = make_run(
        tmp_path,
        settings,
        steps=6,
        learner_delay=0.002,
        sample_delay=lambda seed, turn: delays.setdefault((seed, turn), float(rng.exponential(0.003))),
    )
    run_to_end(run)
    bound = run.controller.schedule.staleness
    tickets = Counter()
    for step, groups, metrics in run.observer.steps:
        assert len(groups) == 4
        assert all(len(g.trajectories) == 3 for g in groups)
        tickets.update(g.ticket for g in groups)
        oldest = min(t.version for g in groups for t in g.trajectories)
        assert 0 <= (step - 1) - oldest <= bound
        assert metrics["schedule/staleness_max"] <= bound
    assert tickets == Counter(range(24))
    assert [step for step, _, _ in run.observer.steps] == [1, 2, 3, 4, 5, 6]
    assert [version for version, _ in run.player.sampler.published] == [1, 2, 3, 4, 5, 6]
    assert sum(len(chunk) for chunk in run.learner.consumed) == 24
    chunk = 4 if preset in ("sync", "one_step_off") else 2
    assert {len(c) for c in run.learner.consumed} == {chunk}
    assert run.evaluator.started == [0, 2, 4, 6]
    assert run.checkpoints.latest()[1]["step"] == 6


@pytest.mark.parametrize("preset", ["sync", "one_step_off", "pipelined", "bounded_async"])
def test_the_sampler_rests_while_the_learner_learns_if_nothing_is_sampled_meanwhile(
    tmp_path: Path, preset: str
) -> None:
    run = make_run(tmp_path, ScheduleSettings(preset=preset, batch=4, chunks=2, group=2), steps=3)
    calls: list[str] = []
    sampler, learner = run.player.sampler, run.learner
    rest, publish, update = sampler.rest, sampler.publish, learner.update

    async def noted(name: str, call: Any, *args: Any) -> Any:
        assert name != "rest" or not sampler.open_sessions
        calls.append(name)
        return await call(*args)

    sampler.rest, sampler.publish = partial(noted, "rest", rest), partial(noted, "publish", publish)
    learner.update = partial(noted, "update", update)
    run_to_end(run)
    if preset == "sync":
        assert calls == ["rest", "update", "publish"] * 3
    else:
        assert "rest" not in calls


def test_every_task_is_consumed_once_per_epoch(tmp_path: Path) -> None:
    run = make_run(tmp_path, ScheduleSettings(batch=4, group=2), steps=6)
    run_to_end(run)
    seen = [g.spec.task.id for _, groups, _ in run.observer.steps for g in groups]
    assert Counter(seen[:12]) == Counter(seen[12:]) == Counter(f"task-{i}" for i in range(12))
    assert seen[:12] != seen[12:]


def test_groups_of_broken_environments_are_dropped_and_the_run_continues(tmp_path: Path) -> None:
    problems = [*tasks(9), Task("bad-1", payload={"broken": "step"}), Task("bad-2", payload={"broken": "reset"})]
    run = make_run(tmp_path, ScheduleSettings(batch=4, group=2), steps=5, problems=problems)
    run_to_end(run)
    consumed = [g for _, groups, _ in run.observer.steps for g in groups]
    assert len(consumed) == 20
    assert not any(g.spec.task.id.startswith("bad") for g in consumed)
    assert sum(metrics.get("groups/dropped_invalid", 0) for _, _, metrics in run.observer.steps) >= 2


def make_run_with_failures(folder: Path) -> Run:
    """Make a run of two steps in which every fourth episode fails."""
    run = make_run(folder, ScheduleSettings(batch=2, group=4, min_valid=1), steps=2)
    play, count = run.player.environment, iter(range(1000))

    def sometimes_broken(task: Task):
        payload = {**task.payload, "broken": "step"} if next(count) % 4 == 3 else task.payload
        return play(Task(task.id, payload=payload))

    object.__setattr__(run.player, "environment", sometimes_broken)
    return run


def test_a_group_with_invalid_members_is_trained_on_its_valid_members(tmp_path: Path) -> None:
    run = make_run_with_failures(tmp_path)
    run_to_end(run)
    for _, groups, metrics in run.observer.steps:
        for group in groups:
            broken = [t for t in group.trajectories if not t.score.valid]
            assert len(broken) == 1
            assert broken[0].stop is StopReason.ERROR
            assert "this task is broken" in (broken[0].score.explanation or "")
        assert metrics["reward/valid"] == 0.75
        trained = sum(t.sampled_tokens for g in groups for t in g.valid_fresh)
        assert metrics["tokens/trained"] == trained


def test_post_processing_may_replace_a_missing_reward_but_not_the_score_of_a_failed_episode(tmp_path: Path) -> None:
    sizes: dict[str, list[int]] = {}

    class Filling:
        async def compute_score(self, request: Request) -> float:
            sizes.setdefault(request.info["group_uid"], []).append(request.info["group_size"])
            if request.trajectory_id.endswith(".0"):
                raise Fatal("unreadable")
            return 1.0

        def post_process_scores(self, scores: list[Score]) -> list[Score]:
            return [score if score.valid else Score(0.5) for score in scores]

    async def main() -> Run:
        run = make_run_with_failures(tmp_path)
        async with RewardAgent(Filling(), cache=0) as run.rewards:
            await train(run)
        return run

    run = asyncio.run(asyncio.wait_for(main(), 60))
    members = [t for _, groups, _ in run.observer.steps for group in groups for t in group.trajectories]
    assert [t.score.valid for t in members] == [t.stop is not StopReason.ERROR for t in members]
    assert sum(not t.score.valid for t in members) == 4
    assert {t.score.value for t in members if t.score.valid and t.id.endswith(".0")} == {0.5}
    assert all(found == [4] * 3 for found in sizes.values())  # the fourth member failed and was not scored
    assert not any("group_uid" in t.info for t in members)


def test_a_run_whose_episodes_all_fail_stops_with_the_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path, ScheduleSettings(batch=8, group=4), steps=5, problems=tasks(4, broken="step"))
    with pytest.raises(UserError, match=r"100% of the last 32 episodes failed.*this task is broken"):
        run_to_end(run)


def picky(applies: Callable[[str], bool]) -> Callable[[Request], Any]:
    async def reward(request: Request) -> float:
        if not applies(request.task.id):
            raise NotApplicable
        return request.own.value

    return reward


def train_picky(folder: Path, applies: Callable[[str], bool]) -> Run:
    async def main() -> Run:
        run = make_run(folder, ScheduleSettings(batch=8, group=4), steps=4, problems=tasks(10))
        async with RewardAgent(picky(applies)) as run.rewards:
            await train(run)
        return run

    return virtual_time.run(main())


def test_tasks_to_which_the_reward_does_not_apply_are_dropped_without_failing(tmp_path: Path) -> None:
    run = train_picky(tmp_path, lambda task: task in ("task-0", "task-1", "task-2"))
    consumed = [group.spec.task.id for _, groups, _ in run.observer.steps for group in groups]
    assert len(consumed) == 32
    assert set(consumed) == {"task-0", "task-1", "task-2"}
    assert sum(metrics["groups/dropped_invalid"] for _, _, metrics in run.observer.steps) > 32


def test_a_reward_that_never_applies_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^none of the last 128 episodes got a score; the last one: .*not apply"):
        train_picky(tmp_path, lambda task: False)


@pytest.mark.parametrize("greedy", [False, True])
def test_a_run_none_of_whose_groups_can_be_trained_on_ends(tmp_path: Path, greedy: bool) -> None:
    """Only one member of each group has a score, or the greedy episode, which is the baseline, has none."""

    class Partial(Outage):
        async def score(self, task: Task, trajectory: Trajectory) -> Score:
            index = int(trajectory.id.rpartition(".")[2])
            return Score.failed("it cannot be judged") if (index == 4 if greedy else index > 0) else Score(1.0)

    settings = ScheduleSettings(preset="one_step_off", batch=4, group=4, max_failed_fraction=1.0)
    run = make_run(tmp_path, settings, steps=5)
    run.plan = Plan(TaskStream(tasks(12), 4, seed=1, greedy=greedy), 4)
    run.rewards = Partial(math.inf)
    needs = "and a score of the greedy episode" if greedy else "members with a score; the last"
    with pytest.raises(UserError, match=rf"no group of the last 1\d\d episodes.*min_valid = 2 .*{needs}.*be judged$"):
        run_to_end(run)


def test_a_run_with_a_usable_group_now_and_then_goes_on(tmp_path: Path) -> None:
    calls = 0

    class Rare(Outage):
        async def score(self, task: Task, trajectory: Trajectory) -> Score:
            nonlocal calls
            group, index = calls // 4, int(trajectory.id.rpartition(".")[2])
            calls += 1
            return Score.failed("it cannot be judged") if index > 0 and group % 20 else Score(1.0)

    run = make_run(tmp_path, ScheduleSettings(batch=4, group=4, max_failed_fraction=1.0), steps=4)
    run.rewards = Rare(math.inf)
    run_to_end(run)
    assert run.step == 4
    assert sum(metrics["groups/dropped_invalid"] for _, _, metrics in run.observer.steps) > 128 / 4


@pytest.mark.parametrize("preset", ["sync", "one_step_off"])
def test_a_cancellation_by_an_environment_itself_ends_the_run_with_an_error(tmp_path: Path, preset: Any) -> None:
    """A client library may cancel its pending calls when its connection breaks."""

    class Disconnected(GuessEnvironment):
        async def step(self, message: Message) -> Observation:
            if self.task.id == "task-3":
                answer = asyncio.get_running_loop().create_future()
                answer.cancel()
                await answer
            return await super().step(message)

    run = make_run(tmp_path, ScheduleSettings(preset=preset, batch=4, group=2), steps=5)
    run.player = replace(run.player, environment=Disconnected)
    with pytest.raises(RuntimeError, match="task 'task-3': an episode was cancelled by code that it calls"):
        run_to_end(run)


def test_a_cancellation_by_the_curriculum_itself_ends_the_run_with_an_error(tmp_path: Path) -> None:
    run = make_run(tmp_path, ScheduleSettings(batch=2, group=2), steps=3)
    chosen = run.plan.next

    async def disconnected(ticket: Ticket) -> Any:
        if ticket.number == 3:
            raise asyncio.CancelledError
        return await chosen(ticket)

    run.plan.next = disconnected
    with pytest.raises(RuntimeError, match="cancelled by code that it calls: the curriculum"):
        run_to_end(run)


def test_an_error_in_the_sampler_stops_the_run_and_is_raised(tmp_path: Path) -> None:
    run = make_run(tmp_path, ScheduleSettings(batch=2, group=2), steps=2)

    def script(prompt, seed):
        raise ZeroDivisionError("the engine died")

    run.player.sampler._script = script
    with pytest.raises(ZeroDivisionError, match="the engine died"):
        run_to_end(run)


def test_dynamic_sampling_replaces_groups_without_variance(tmp_path: Path) -> None:
    settings = ScheduleSettings(batch=4, group=2, dynamic_sampling=True, max_resample=20)
    run = make_run(tmp_path, settings, steps=4)
    run_to_end(run)
    for _, groups, metrics in run.observer.steps:
        assert len(groups) == 4
        assert metrics["groups/zero_variance"] == 0
    assert sum(metrics.get("groups/resampled_zero_variance", 0) for _, _, metrics in run.observer.steps) > 0


def test_dynamic_sampling_consumes_groups_without_variance_after_max_resample(tmp_path: Path) -> None:
    """No group of this run has variance, and each step still consumes a batch."""
    settings = ScheduleSettings(batch=2, group=1, min_valid=1, dynamic_sampling=True, max_resample=2)
    run = make_run(tmp_path, settings, steps=3)
    run_to_end(run)
    assert [metrics["groups/resampled_zero_variance"] for _, _, metrics in run.observer.steps] == [2, 2, 2]


@pytest.mark.parametrize("preset", ["sync", "one_step_off"])
def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, preset: str) -> None:
    settings = ScheduleSettings(preset=preset, batch=3, group=2)
    whole = make_run(tmp_path / "whole", settings, steps=8)
    run_to_end(whole)

    first = make_run(tmp_path / "cut", settings, steps=8, sample_delay=0.001)

    async def interrupted() -> None:
        job = asyncio.create_task(train(first))
        while first.step < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        first.interruption.interrupt()
        await asyncio.wait_for(job, 30)

    asyncio.run(interrupted())
    assert first.interruption.interrupted
    assert isinstance(first.evaluator, RecordingEvaluator)
    assert first.evaluator.cancelled
    assert 3 <= first.step < 8
    second = make_run(tmp_path / "cut", settings, steps=8, resume=True)
    assert second.step == first.step
    run_to_end(second)
    if preset == "sync":
        assert fingerprint(first) + fingerprint(second) == fingerprint(whole)
    tickets = [g.ticket for run in (first, second) for _, groups, _ in run.observer.steps for g in groups]
    assert Counter(tickets) == Counter(range(24))
    assert second.learner.consumed[: len(first.learner.consumed)] == first.learner.consumed


def test_an_interrupt_before_the_first_step_saves_step_zero(tmp_path: Path) -> None:
    run = make_run(tmp_path, ScheduleSettings(batch=2, group=2), steps=4, sample_delay=0.05)

    async def interrupted() -> None:
        job = asyncio.create_task(train(run))
        await asyncio.sleep(0.02)
        run.interruption.interrupt()
        await asyncio.wait_for(job, 5)

    asyncio.run(interrupted())
    assert run.step == 0
    assert run.checkpoints.latest()[1]["step"] == 0


def test_a_run_resumed_with_more_steps_consumes_every_ticket_once(tmp_path: Path) -> None:
    settings = ScheduleSettings(preset="bounded_async", batch=2, chunks=2, staleness=3, group=2)
    first = make_run(tmp_path, settings, steps=4, checkpoint_every=1, learner_delay=0.01)
    run_to_end(first)
    state = first.checkpoints.latest()[1]
    assert state["plan"]["waiting"] == []
    second = make_run(tmp_path, settings, steps=8, resume=True)
    run_to_end(second)
    tickets = [g.ticket for run in (first, second) for _, groups, _ in run.observer.steps for g in groups]
    assert Counter(tickets) == Counter(range(16))


# --- errors that end a run --------------------------------------------------------------------------
class Outage:
    """A reward that takes 1 s per score, and raises for every request after the first ``start`` ones."""

    def __init__(self, start: float) -> None:
        self.start, self.asked = start, 0

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        self.asked += 1
        out = self.asked > self.start
        await asyncio.sleep(1.0)
        if out:
            raise UserError("the reward service is down; resume the run once it answers")
        return trajectory.score

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        return scores


def rewarded_run(folder: Path, preset: Any, start: float = math.inf, *, resume: bool = False) -> Run:
    settings = ScheduleSettings(preset=preset, batch=2, group=2, chunks=2)
    run = make_run(folder, settings, steps=6, sample_delay=0.1, learner_delay=0.1, resume=resume)
    run.rewards = Outage(start)
    return run


@pytest.mark.parametrize("preset", PRESETS)
def test_after_a_reward_outage_the_resumed_run_keeps_all_finished_steps(tmp_path: Path, preset: Any) -> None:
    """The run makes no regular checkpoints, so that the finished steps are saved when the error ends it."""
    whole = rewarded_run(tmp_path / "whole", preset)
    virtual_time.run(train(whole))
    first = rewarded_run(tmp_path / "cut", preset, start=4 * 4)
    with pytest.raises(UserError, match="is down"):
        virtual_time.run(train(first))
    assert 2 <= first.step < 6
    assert isinstance(first.evaluator, RecordingEvaluator)
    assert first.evaluator.cancelled
    second = rewarded_run(tmp_path / "cut", preset, resume=True)
    kept = second.step
    # With chunks, the learner may have been updated with a part of the current step. Then nothing is saved, and the
    # resumed run begins at the last checkpoint.
    assert kept == first.step if first.step_state is StepState.BOUNDARY else kept == 0
    virtual_time.run(train(second))
    if preset == "sync":
        assert fingerprint(first) + fingerprint(second) == fingerprint(whole)
        assert second.learner.consumed == whole.learner.consumed
    if kept:
        tickets = [g.ticket for run in (first, second) for _, groups, _ in run.observer.steps for g in groups]
        assert Counter(tickets) == Counter(range(12))


def test_an_outage_between_the_chunks_of_a_step_saves_no_checkpoint(tmp_path: Path) -> None:
    run = rewarded_run(tmp_path, "pipelined", start=2 * 4 + 2)
    with pytest.raises(UserError, match="is down"):
        virtual_time.run(train(run))
    assert run.step_state is not StepState.BOUNDARY
    assert run.checkpoints.latest() is None


def test_an_error_in_the_learners_update_saves_no_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, ScheduleSettings(batch=2, group=2), steps=4)
    update = run.learner.update

    async def giving_up(batch: Any) -> Any:
        if run.step == 2:
            raise UserError("the gradient was not finite")
        return await update(batch)

    run.learner.update = giving_up
    with pytest.raises(UserError, match="not finite"):
        run_to_end(run)
    assert run.checkpoints.latest() is None


def test_a_run_that_fails_in_its_first_step_saves_no_checkpoint(tmp_path: Path) -> None:
    run = rewarded_run(tmp_path, "sync", start=3)
    with pytest.raises(UserError, match="is down"):
        virtual_time.run(train(run))
    assert run.checkpoints.latest() is None


def test_an_error_in_an_evaluation_ends_the_run_with_a_checkpoint_of_the_last_step(tmp_path: Path) -> None:
    class Failing(RecordingEvaluator):
        async def finish(self) -> None:
            raise UserError("the reward service is down")

    run = make_run(tmp_path, ScheduleSettings(batch=2, group=2), steps=4, checkpoint_every=3)
    run.evaluator = Failing()
    with pytest.raises(UserError, match="is down"):
        run_to_end(run)
    assert run.checkpoints.latest()[1]["step"] == 3


def test_an_error_while_saving_does_not_hide_the_error_that_ended_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = rewarded_run(tmp_path, "sync", start=3 * 4)

    def full(*_: Any) -> Any:
        raise UserError("no space left")

    run.checkpoints.save = full
    with pytest.raises(UserError, match="is down"):
        virtual_time.run(train(run))
    assert "no space left" in caplog.text


# --- the timeline -------------------------------------------------------------------------------------
def test_scores_and_publications_are_recorded_on_the_timeline(tmp_path: Path) -> None:
    run = rewarded_run(tmp_path, "sync")

    async def timed() -> None:
        run.clock = asyncio.get_running_loop().time
        run.timeline = Timeline(tmp_path / "timeline.jsonl", clock=run.clock)
        await train(run)
        run.timeline.close()

    virtual_time.run(timed())
    spans = list(read_timeline(tmp_path / "timeline.jsonl"))
    scores = [(s["ticket"], s["member"]) for s in spans if s["kind"] == "score"]
    assert sorted(scores) == [(ticket, member) for ticket in range(12) for member in range(2)]
    assert all(s["end"] - s["start"] == pytest.approx(1.0) for s in spans if s["kind"] == "score")
    assert [s["step"] for s in spans if s["kind"] == "publish"] == list(range(6))


@pytest.mark.parametrize(("seconds", "spans"), [(None, 0), (0.0, 0), (0.002, 3 * 2 * 2)])
def test_scores_that_take_no_time_are_not_recorded_on_the_timeline(
    tmp_path: Path, seconds: float | None, spans: int
) -> None:
    run = make_run(tmp_path, ScheduleSettings(batch=2, group=2), steps=3)

    async def score(task: Task, trajectory: Trajectory) -> Score:
        await asyncio.sleep(seconds or 0.0)
        return trajectory.score

    async def timed() -> None:
        run.timeline = Timeline(clock=asyncio.get_running_loop().time)
        if seconds is not None:
            run.rewards = Outage(math.inf)
            run.rewards.score = score
        await train(run)

    virtual_time.run(timed())
    assert len(run.timeline.spans("publish")) == 3
    assert len(run.timeline.spans("score")) == spans


# --- dropped groups before a run ends and is resumed ------------------------------------------------
class RecordingTaskStream(TaskStream):
    """A task stream that records the groups that `observe` receives in each step."""

    def __init__(self, problems: list[Task], group: int) -> None:
        super().__init__(problems, group, seed=1)
        self.told: list[list[tuple[int, str, bool]]] = []

    def observe(self, groups: Sequence[Group], training: Mapping[str, float]) -> dict[str, float]:
        self.told.append([(group.ticket, group.spec.task.id, group.dropped) for group in groups])
        return {}


def dropping_run(folder: Path, *, resume: bool = False) -> tuple[Run, RecordingTaskStream]:
    """Make a run in which 6 of 14 tasks fail, so that their groups are dropped because they have no valid members."""
    problems = [*tasks(8), *(Task(f"bad-{n}", payload={"broken": "step"}) for n in range(6))]
    settings = ScheduleSettings(batch=4, group=3, max_failed_fraction=1.0)
    run = make_run(folder, settings, steps=6, problems=problems, checkpoint_every=2, sample_delay=0.1)
    told = RecordingTaskStream(problems, settings.group)
    run.plan = Plan(told, settings.batch)
    if resume:
        run.controller = restore(
            run.checkpoints.latest(), run.learner, run.plan, run.controller.schedule, run.total_steps
        )
        run.player.sampler._version = run.controller.version
    return run, told


def history(run: Run) -> list:
    """Return the trajectory ids and the metrics of each step, without times. An id contains the seed of its episode."""
    return [
        (
            step,
            [[trajectory.id for trajectory in group.trajectories] for group in groups],
            {name: value for name, value in metrics.items() if not name.endswith("_s")},
        )
        for step, groups, metrics in run.observer.steps
    ]


def drops(told: RecordingTaskStream) -> list[tuple[int, str, bool]]:
    return [group for groups in told.told for group in groups if group[2]]


def leave_after_a_drop(run: Run, at: int, leave: Callable[[], None]) -> None:
    """Call ``leave`` whenever a group is dropped after step ``at`` has ended."""
    refund = run.controller.refund

    def noticed(ticket: Ticket) -> None:
        refund(ticket)
        if run.step >= at:
            leave()

    run.controller.refund = noticed


def killed_in_an_evaluation(run: Run) -> None:
    """End the run as if its process were killed, directly after it saved the checkpoint of step 2.

    The checkpoint waits for an evaluation, which ends only after a group was dropped.
    """

    class Slow(RecordingEvaluator):
        dropped = asyncio.Event()

        async def finish(self) -> None:
            if run.step == 2:
                await self.dropped.wait()

    run.evaluator = Slow()
    leave_after_a_drop(run, 2, Slow.dropped.set)

    async def dying() -> None:
        training = asyncio.create_task(train(run))
        save = run.checkpoints.save

        def die(step: int, *rest: Any) -> Any:
            training.cancel()
            return save(step, *rest)

        run.checkpoints.save = die
        await asyncio.wait([training])
        assert training.cancelled()

    virtual_time.run(dying())


def interrupted_in_a_step(run: Run) -> None:
    """Interrupt the run after a group was dropped, in a step in which the learner has not been updated yet."""
    # Without regular checkpoints, the run is resumed from the state that the interrupt saved.
    run.checkpoint_every = 0
    leave_after_a_drop(run, 3, run.interruption.interrupt)
    virtual_time.run(train(run))
    assert run.interruption.interrupted
    assert 3 <= run.step < run.total_steps


@pytest.mark.parametrize("left", [killed_in_an_evaluation, interrupted_in_a_step])
def test_a_resumed_run_observes_groups_that_were_dropped_before_it_ended(
    tmp_path: Path, left: Callable[[Run], None]
) -> None:
    whole, all_told = dropping_run(tmp_path / "whole")
    virtual_time.run(train(whole))
    first, told_first = dropping_run(tmp_path / "left")
    left(first)
    second, told = dropping_run(tmp_path / "left", resume=True)
    virtual_time.run(train(second))
    assert len(drops(all_told)) >= 6
    assert told_first.told + told.told == all_told.told
    assert history(first) + history(second) == history(whole)
    assert second.learner.consumed == whole.learner.consumed


def test_max_resample_counts_groups_that_were_dropped_before_an_interrupt(tmp_path: Path) -> None:
    """No group of this run has variance, so that each step drops as many groups as ``max_resample`` allows."""
    settings = ScheduleSettings(batch=4, group=3, dynamic_sampling=True, max_resample=2.0)
    refunded: list[Ticket] = []

    def run_of(*, resume: bool = False) -> Run:
        run = make_run(tmp_path, settings, steps=6, sample_delay=0.1, resume=resume)
        run.player.sampler._script = lambda prompt, seed: [renderer().end_of_turn]
        refund = run.controller.refund
        run.controller.refund = lambda ticket: (refunded.append(ticket), refund(ticket))
        return run

    first = run_of()
    interrupted_in_a_step(first)
    second = run_of(resume=True)
    virtual_time.run(train(second))
    assert len(refunded) == 6 * 4
    steps = [metrics for run in (first, second) for _, _, metrics in run.observer.steps]
    assert [metrics["groups/resampled_zero_variance"] for metrics in steps] == [4] * 6


def test_learner_weights_is_called_in_another_thread(tmp_path: Path) -> None:
    """A sharded learner blocks the caller while another of its calls runs, so the event loop must not be the caller."""
    run = make_run(tmp_path, ScheduleSettings(preset="sync", batch=2, group=2, min_valid=1), steps=2)
    weights, asked = run.learner.weights, list[bool]()

    def recorded() -> Any:
        asked.append(threading.current_thread() is threading.main_thread())
        return weights()

    run.learner.weights = recorded
    run_to_end(run)
    assert asked == [False, False]


def collapsing_run(folder: Path, *, resume: bool = False, returns: bool = True, solved_until: int = 20) -> Run:
    """A run of 40 steps that solves every task in the first ``solved_until``, and none then until it goes back."""
    settings = ScheduleSettings(preset="sync", batch=4, group=2, min_valid=1)
    run = make_run(folder, settings, steps=40, checkpoint_every=5, resume=resume)
    if resume:
        found = run.checkpoints.latest()
        assert found is not None
        run.watch.load_state_dict(found[1]["watch"])
    run.return_on_collapse, run.checkpoints.keep = returns, 1
    words = {w: renderer().tokenizer(w, add_special_tokens=False)["input_ids"] for w in ("left", "right")}

    def answer(completion: Any, seed: int, turn: int) -> Any:
        tokens = [
            *words["left" if run.step < solved_until or run.learner.returned else "right"],
            renderer().end_of_turn,
        ]
        return replace(completion, tokens=np.array(tokens, np.int32), logprobs=np.zeros(len(tokens), np.float32))

    alter_answers(run.player.sampler, answer)
    return run


def test_after_a_collapse_the_learner_returns_to_the_last_good_checkpoint(tmp_path: Path) -> None:
    run = collapsing_run(tmp_path)
    run_to_end(run)
    # The mean of ten steps is 0.5 after step 25. Checkpoint 15, after which all steps were good, is kept until then.
    assert run.learner.returned == ["step-15"]
    told = {
        step: metrics["collapse/returns"] for step, _, metrics in run.observer.steps if "collapse/returns" in metrics
    }
    assert told == dict.fromkeys(range(25, 41), 1.0)
    # Steps 36 to 40 are as good as the best.
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-35", "step-40"}


def test_without_the_setting_a_collapse_is_only_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = collapsing_run(tmp_path, returns=False)
    run_to_end(run)
    assert run.learner.returned == []
    assert "step 25: success has fallen from 1.00 to 0.50" in caplog.text
    assert run.observer.steps[-1][2]["collapse/noticed"] == 1


def test_a_resumed_run_returns_to_the_checkpoint_that_it_would_have_returned_to(tmp_path: Path) -> None:
    first = collapsing_run(tmp_path)
    first.total_steps = 22
    run_to_end(first)
    assert first.learner.returned == []
    second = collapsing_run(tmp_path, resume=True)
    run_to_end(second)
    assert second.learner.returned == ["step-15"]
    assert second.watch.returns == 1


@pytest.mark.parametrize(("interrupted", "good"), [(False, "step-15"), (True, "step-10")])
def test_a_resumed_run_knows_good_checkpoints_from_before(tmp_path: Path, interrupted: bool, good: str) -> None:
    """The last step of a run judges the checkpoint before it. That of an interruption does not, and keeps it."""
    first = collapsing_run(tmp_path)
    first.total_steps = 17
    if interrupted:
        first.total_steps = 40
        on_step = first.observer.on_step

        def stop(step: int, *rest: Any) -> None:
            on_step(step, *rest)
            if step == 17:
                first.interruption.interrupt()

        first.observer.on_step = stop
    run_to_end(first)
    assert first.step == 17
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {good, "step-15", "step-17"}
    second = collapsing_run(tmp_path, resume=True, solved_until=17)
    run_to_end(second)
    assert second.learner.returned == [good]
