"""Tests of replay through the real training loop, with rollouts, all schedules, checkpoints and a pool on disk."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.config.settings import ReplaySettings, ScheduleSettings
from gleanrl.curriculum.orders import TaskStream
from gleanrl.experience.replay.curriculum import ReplayCurriculum
from gleanrl.simulate import virtual_time
from gleanrl.train import Run, train
from gleanrl.types import Group, GroupSpec, Task, Trajectory
from tests.experience.replay_world import group, make_replay_run
from tests.loop_world import tasks
from tests.strategies import examples

PRESETS = ["sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async"]
REPLAY = ReplaySettings(enabled=True, per_group=2, probe_fraction=0)


def run_to_end(run: Run) -> None:
    asyncio.run(asyncio.wait_for(train(run), 60))


def fill(curriculum: ReplayCurriculum, count: int) -> None:
    """Store half-solved groups of the first ``count`` tasks, as if they had been played before."""
    curriculum.pool.observe([group(f"task-{i}", 4, 8, first=1) for i in range(count)], 0)


def record_plans(curriculum: ReplayCurriculum) -> list[list[GroupSpec]]:
    plans: list[list[GroupSpec]] = []
    propose = curriculum.propose

    async def recorded(count: int) -> list[GroupSpec]:
        plans.append(await propose(count))
        assert len(plans[-1]) == count
        return plans[-1]

    curriculum.propose = recorded
    return plans


def groups_of(run: Run) -> list[tuple[Group, ...]]:
    return [groups for _, groups, _ in run.observer.steps]


def exact(trajectory: Trajectory) -> list[Any]:
    return [
        (turn.tokens.tobytes(), turn.logprobs.tobytes() if turn.logprobs is not None else None, turn.version)
        for turn in trajectory.turns()
    ]


def fingerprint(run: Run) -> list[Any]:
    """Everything that the run consumed, in order and bit for bit."""
    return [
        (step, [(g.ticket, g.spec.task.id, len(g.fresh), [exact(t) for t in g.trajectories]) for g in groups])
        for step, groups, _ in run.observer.steps
    ]


def jitter() -> Any:
    rng, delays = np.random.default_rng(3), {}
    return lambda seed, turn: delays.setdefault((seed, turn), float(rng.exponential(0.002)))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("placement", "fresh"), [("replace", 6), ("add", 8)])
def test_plans_and_batches_have_the_expected_counts_on_every_schedule(
    tmp_path: Path, preset: str, placement: Any, fresh: int
) -> None:
    schedule = ScheduleSettings(preset=preset, batch=8, group=8, chunks=2, staleness=2)
    replay = REPLAY.model_copy(update={"placement": placement})
    run, curriculum = make_replay_run(
        tmp_path, schedule, replay, steps=4, problems=tasks(40), learner_delay=0.002, sample_delay=jitter()
    )
    fill(curriculum, 40)
    plans = record_plans(curriculum)
    run_to_end(run)
    assert [len(plan) for plan in plans] == [8] * 4
    expected = Counter({(8, 0): 4, (fresh, 2): 4})
    for plan in plans:
        assert Counter((spec.fresh, len(spec.replayed)) for spec in plan) == expected
        assert len({spec.task.id for spec in plan}) == 8
    consumed = groups_of(run)
    assert [len(groups) for groups in consumed] == [8] * 4
    shapes = [Counter((len(g.fresh), len(g.trajectories) - len(g.fresh)) for g in groups) for groups in consumed]
    assert sum(shapes, Counter()) == Counter({shape: 4 * count for shape, count in expected.items()})
    if run.controller.schedule.ordered:
        assert shapes == [expected] * 4
    assert Counter(g.ticket for groups in consumed for g in groups) == Counter(range(32))


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.integers(2, 6))
    placement = draw(st.sampled_from(["add", "replace"]))
    return {
        "schedule": ScheduleSettings(
            preset=draw(st.sampled_from(PRESETS)),
            batch=2 * draw(st.integers(1, 4)),
            group=size,
            chunks=2,
            staleness=draw(st.integers(1, 2)),
            min_valid=1,
        ),
        "replay": ReplaySettings(
            enabled=True,
            per_group=draw(st.integers(0, 3 if placement == "add" else min(3, size - 1))),
            placement=placement,
            task_ratio=draw(st.sampled_from([0.0, 0.29, 0.5, 0.75, 1.0])),
            start_progress=draw(st.sampled_from([0.0, 0.5])),
            tasks=draw(st.sampled_from(["gaussian", "uniform", "uniform_buckets"])),
            probe_fraction=0,
            retire_after=99,
        ),
        "stored": draw(st.lists(st.integers(1, 3), max_size=12)),  # successes of each task in the pool
        "steps": draw(st.integers(1, 4)),
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=examples(30))
@given(worlds())
def test_plans_and_batches_have_the_expected_counts_for_any_settings(world: dict[str, Any]) -> None:
    """This holds for plans and consumed batches under every schedule; the stream has 40 tasks and repeats none."""
    schedule, replay, steps = world["schedule"], world["replay"], world["steps"]
    delays = np.random.default_rng(world["seed"]).exponential(0.01, 97)
    with TemporaryDirectory() as folder:
        run, curriculum = make_replay_run(
            *(Path(folder), schedule, replay),
            steps=steps,
            problems=tasks(40),
            learner_delay=0.01,
            sample_delay=lambda seed, turn: delays[(seed + turn) % 97],
        )
        pool, names = curriculum.pool, [f"{kind}-{i}" for kind in ("task", "old") for i in range(40)]
        pool.observe([group(f"old-{i}", count, 4, first=1) for i, count in enumerate(world["stored"])], 0)
        plans: list[list[GroupSpec]] = []
        propose = curriculum.propose

        async def watched(count: int) -> list[GroupSpec]:
            live = {name: len(own) for name, own in pool.stored(names).items() if own}
            target = int(count * replay.task_ratio + 1e-9) if len(plans) >= steps * replay.start_progress else 0
            plans.append(await propose(count))
            check_plan(plans[-1], schedule, replay, live, target)
            return plans[-1]

        curriculum.propose = watched
        virtual_time.run(train(run))
        pool.close()
    assert len(plans) == steps
    shapes = [shapes_of([(spec.task.id, spec.fresh, len(spec.replayed)) for spec in plan]) for plan in plans]
    consumed = [
        shapes_of([(g.spec.task.id, len(g.fresh), len(g.trajectories) - len(g.fresh)) for g in groups])
        for groups in groups_of(run)
    ]
    assert [sum(found.values()) for found in consumed] == [schedule.batch] * steps
    assert consumed == shapes if run.controller.schedule.ordered else sum(consumed, Counter()) == sum(shapes, Counter())
    fresh = [spec.task.id for plan in plans for spec in plan if spec.task.id.startswith("task") and not spec.replayed]
    stream = asyncio.run(TaskStream(tasks(40), schedule.group, seed=1).propose(40))
    if not replay.per_group:  # then a task of the pool cannot be told from one of the stream
        fresh = list(dict.fromkeys(fresh))
    assert fresh == [spec.task.id for spec in stream[: len(fresh)]]  # displaced tasks come next


def shapes_of(found: Sequence[tuple[str, int, int]]) -> Counter[tuple[str, int, int]]:
    return Counter(found)


def check_plan(
    plan: Sequence[GroupSpec], schedule: ScheduleSettings, replay: ReplaySettings, live: Mapping[str, int], target: int
) -> None:
    """Check a plan. ``live``: number of replayable trajectories by task; ``target``: number of tasks to replay."""
    names = [spec.task.id for spec in plan]
    assert len(plan) == len(set(names)) == schedule.batch  # no task in both halves, or twice in one
    mixed = [spec for spec in plan if spec.replayed]
    for spec in mixed:
        assert len({t.id for t in spec.replayed}) == len(spec.replayed) == min(replay.per_group, live[spec.task.id])
        assert spec.fresh == schedule.group - (len(spec.replayed) if replay.placement == "replace" else 0)
    assert all(spec.fresh == schedule.group for spec in plan if not spec.replayed)
    if replay.per_group:
        assert len(mixed) == min(target, len(live))


def test_displaced_tasks_come_back_in_the_order_of_the_stream(tmp_path: Path) -> None:
    run, curriculum = make_replay_run(tmp_path, ScheduleSettings(batch=8, group=4), REPLAY, steps=8, problems=tasks(40))
    curriculum.pool.observe([group(f"old-{i}", 4, 8, first=1) for i in range(40)], 0)
    run_to_end(run)
    fresh = [g.spec.task.id for groups in groups_of(run) for g in groups if not g.spec.replayed]
    stream = asyncio.run(TaskStream(tasks(40), 4, seed=1).propose(32))
    assert fresh == [spec.task.id for spec in stream]


def test_missing_replayed_tasks_are_filled_with_fresh_tasks(tmp_path: Path) -> None:
    """The pool fills during the run; as many tasks are replayed as it holds, up to the target."""
    run, curriculum = make_replay_run(tmp_path, ScheduleSettings(batch=8, group=2), REPLAY, steps=6, problems=tasks(30))
    plans = record_plans(curriculum)
    run_to_end(run)
    mixed = [sum(bool(spec.replayed) for spec in plan) for plan in plans]
    assert mixed[0] == 0
    assert mixed[-1] == 4
    assert all(len(groups) == 8 for groups in groups_of(run))
    metrics = [m for _, _, m in run.observer.steps]
    assert [m["replay/planned"] for m in metrics] == mixed
    assert [m["replay/planned"] + m["replay/wanting"] for m in metrics] == [4] * 6
    assert [m["replay/trajectories"] for m in metrics] == [sum(len(spec.replayed) for spec in plan) for plan in plans]


@pytest.mark.parametrize("preset", PRESETS)
def test_replayed_tokens_and_logprobs_are_those_that_were_sampled(tmp_path: Path, preset: str) -> None:
    schedule = ScheduleSettings(preset=preset, batch=4, group=6, chunks=2, staleness=2)
    run, _ = make_replay_run(
        tmp_path, schedule, REPLAY, steps=8, problems=tasks(9), learner_delay=0.002, sample_delay=jitter()
    )
    run_to_end(run)
    sampled: dict[str, Trajectory] = {}
    count = 0
    for groups in groups_of(run):
        for old in (t for g in groups for t in g.spec.replayed):
            assert exact(old) == exact(sampled[old.id])
            assert sum(turn.sampled for turn in old.turns()) == 2
            assert old.score.value == 1.0
            count += 1
        sampled |= {t.id: t for g in groups for t in g.fresh}
    assert count > 8
    assert len({turn.logprobs.tobytes() for t in sampled.values() for turn in t.sampled_turns()}) > 100


@pytest.mark.parametrize("preset", PRESETS)
def test_staleness_is_that_of_fresh_members_however_old_the_replayed_are(tmp_path: Path, preset: str) -> None:
    schedule = ScheduleSettings(preset=preset, batch=4, group=4, chunks=2, staleness=2)
    run, _ = make_replay_run(
        tmp_path, schedule, REPLAY, steps=9, problems=tasks(8), learner_delay=0.002, sample_delay=jitter()
    )
    run_to_end(run)
    oldest = 0.0
    for step, groups, metrics in run.observer.steps:
        ages = [step - 1 - g.version for g in groups]
        assert metrics["schedule/staleness_max"] == max(ages) <= run.controller.schedule.staleness
        assert "groups/dropped_stale" not in metrics
        replayed = [step - 1 - t.version for g in groups for t in g.spec.replayed]
        assert metrics.get("replay/age_max", 0) == max(replayed, default=0)
        oldest = max(oldest, metrics.get("replay/age_max", 0))
    assert oldest > run.controller.schedule.staleness


def test_broken_and_resampled_groups_do_not_reduce_the_batch(tmp_path: Path) -> None:
    problems = [*tasks(14), *(Task(f"bad-{i}", payload={"broken": "step"}) for i in range(2))]
    schedule = ScheduleSettings(batch=4, group=3, dynamic_sampling=True, max_resample=10)
    run, curriculum = make_replay_run(tmp_path, schedule, REPLAY, steps=8, problems=problems)
    plans = record_plans(curriculum)
    run_to_end(run)
    singles = [plan[0] for plan in plans if len(plan) == 1]
    assert singles
    assert any(spec.replayed for spec in singles)
    for groups in groups_of(run):
        assert len(groups) == 4
        assert not any(g.spec.task.id.startswith("bad") for g in groups)
        mixed = [g.spec.task.id for g in groups if g.spec.replayed]
        assert len(set(mixed)) == len(mixed)
        assert not set(mixed) & {g.spec.task.id for g in groups if not g.spec.replayed}
    stored = [s for own in curriculum.pool.stored([t.id for t in problems]).values() for s in own]
    assert stored
    assert all(s.trajectory.score.value == 1.0 for s in stored)


def test_replayed_members_of_dropped_groups_are_not_counted_in_the_metrics(tmp_path: Path) -> None:
    schedule = ScheduleSettings(batch=4, group=3, dynamic_sampling=True, max_resample=10)
    run, curriculum = make_replay_run(tmp_path, schedule, REPLAY, steps=8, problems=tasks(14))
    observe, dropped = curriculum.observe, []

    def watched(groups: Sequence[Group], training: Mapping[str, float]) -> Mapping[str, float]:
        dropped.extend(group for group in groups if group.dropped)
        return observe(groups, training)

    curriculum.observe = watched
    run_to_end(run)
    assert any(group.spec.replayed for group in dropped)
    for step, groups, metrics in run.observer.steps:
        assert not any(group.dropped for group in groups)
        replayed = [t for group in groups for t in group.spec.replayed]
        assert metrics["replay/tasks"] == sum(bool(group.spec.replayed) for group in groups)
        assert metrics["replay/trajectories"] == len(replayed)
        assert metrics["replay/tokens"] == sum(t.sampled_tokens for t in replayed)
        ages = [step - 1 - t.version for t in replayed]
        assert metrics.get("replay/age_mean", 0) == pytest.approx(np.mean(ages) if ages else 0)
        assert metrics.get("replay/age_max", 0) == max(ages, default=0)


@pytest.mark.parametrize("preset", ["sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async"])
@pytest.mark.parametrize("earlier", [False, True])
def test_no_replayed_trajectory_is_older_than_max_age_when_it_is_trained(
    tmp_path: Path, preset: Any, earlier: bool
) -> None:
    """``earlier``: the pool has trajectories of another run, which are as old as they may be in the first steps."""
    schedule = ScheduleSettings(preset=preset, batch=4, group=6, chunks=2, staleness=2)
    oldest = 4 if preset == "bounded_async" else 2
    replay = REPLAY.model_copy(update={"max_age": oldest})
    run, curriculum = make_replay_run(
        tmp_path, schedule, replay, steps=10, problems=tasks(9), learner_delay=0.002, sample_delay=jitter()
    )
    if earlier:
        curriculum.pool.observe([group(f"task-{i}", 2, 4, first=1, version=-oldest) for i in range(9)], -1)
    virtual_time.run(train(run))
    ages = [m["replay/age_max"] for _, _, m in run.observer.steps if "replay/age_max" in m]
    assert max(ages) == oldest if schedule.preset != "bounded_async" else 0 < max(ages) <= oldest


def test_trajectories_of_a_sampler_with_altered_sampling_are_not_stored(tmp_path: Path) -> None:
    run, curriculum = make_replay_run(tmp_path, ScheduleSettings(batch=4, group=4), REPLAY, steps=2)
    run.player.sampler.altered = "top_p=0.9"
    run_to_end(run)
    played = [t for groups in groups_of(run) for g in groups for t in g.fresh]
    assert {t.info["altered_sampling"] for t in played} == {"top_p=0.9"}
    assert curriculum.pool.stats()["trajectories"] == 0
    assert sum(m.get("pool/refused/altered", 0) for _, _, m in run.observer.steps) > 0
    other, _ = make_replay_run(tmp_path / "as the policy", ScheduleSettings(batch=4, group=4), REPLAY, steps=1)
    run_to_end(other)
    assert not any("altered_sampling" in t.info for groups in groups_of(other) for g in groups for t in g.fresh)


def settings_of_resume(preset: str) -> tuple[ScheduleSettings, ReplaySettings]:
    return ScheduleSettings(preset=preset, batch=4, group=3), REPLAY.model_copy(update={"probe_fraction": 0.1})


def test_an_interrupted_run_continues_like_an_uninterrupted_one(tmp_path: Path) -> None:
    schedule, replay = settings_of_resume("sync")
    whole, _ = make_replay_run(tmp_path / "whole", schedule, replay, steps=9)
    run_to_end(whole)
    first, curriculum = make_replay_run(tmp_path / "cut", schedule, replay, steps=9, sample_delay=0.001)

    async def interrupted() -> None:
        job = asyncio.create_task(train(first))
        while first.step < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        first.interruption.interrupt()
        await asyncio.wait_for(job, 30)

    asyncio.run(interrupted())
    curriculum.pool.close()
    second, _ = make_replay_run(tmp_path / "cut", schedule, replay, steps=9, resume=True)
    assert 4 <= second.step < 9
    run_to_end(second)
    assert fingerprint(first) + fingerprint(second) == fingerprint(whole)
    assert sum(len(g.spec.replayed) for groups in groups_of(second) for g in groups) > 4


@pytest.mark.parametrize("preset", ["sync", "one_step_off"])
def test_after_a_crash_the_run_and_the_pool_return_to_the_checkpoint(tmp_path: Path, preset: str) -> None:
    """What the lost steps stored is removed. With the sync preset, the run then equals one that never crashed."""
    schedule, replay = settings_of_resume(preset)
    whole, full = make_replay_run(tmp_path / "whole", schedule, replay, steps=9)
    run_to_end(whole)
    first, curriculum = make_replay_run(
        tmp_path / "cut", schedule, replay, steps=9, sample_delay=0.001, checkpoint_every=3
    )

    async def crashed() -> None:
        job = asyncio.create_task(train(first))
        while first.step < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        job.cancel()
        with suppress(asyncio.CancelledError):
            await job

    asyncio.run(crashed())
    curriculum.pool.close()
    second, again = make_replay_run(tmp_path / "cut", schedule, replay, steps=9, resume=True)
    assert second.step == 3
    run_to_end(second)
    tickets = [g.ticket for groups in [*groups_of(first)[:3], *groups_of(second)] for g in groups]
    assert Counter(tickets) == Counter(range(36))
    if preset == "sync":
        assert fingerprint(first)[:3] + fingerprint(second) == fingerprint(whole)
        counts = ("tasks", "trajectories", "retired", "buckets")
        assert [again.pool.stats()[name] for name in counts] == [full.pool.stats()[name] for name in counts]


def test_until_replay_begins_the_run_equals_one_without_replay(tmp_path: Path) -> None:
    schedule = ScheduleSettings(batch=4, group=3)
    late = REPLAY.model_copy(update={"start_progress": 0.5, "retire_after": 99})
    plain, _ = make_replay_run(
        tmp_path / "a", schedule, REPLAY.model_copy(update={"task_ratio": 0.0, "retire_after": 99}), steps=8
    )
    run_to_end(plain)
    run, _ = make_replay_run(tmp_path / "b", schedule, late, steps=8)
    run_to_end(run)
    assert fingerprint(run)[:4] == fingerprint(plain)[:4]
    assert [m["replay/on"] for _, _, m in run.observer.steps] == [0] * 4 + [1] * 4
    assert [m["replay/tasks"] > 0 for _, _, m in run.observer.steps] == [False] * 4 + [True] * 4
