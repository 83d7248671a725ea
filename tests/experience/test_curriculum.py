"""Tests of `ReplayCurriculum` on a real pool and a stream of known tasks: how a batch is planned, when replay begins,
which trajectories are replayed, and what a checkpoint keeps."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.experience.pool.ranking import TaskTrajectories, ranking
from gleanrl.experience.replay.curriculum import ReplayCurriculum
from gleanrl.protocols import Curriculum
from gleanrl.types import Group, GroupSpec, Score, Task, Trajectory
from gleanrl.utils import serialize
from gleanrl.utils.errors import UserError
from tests.experience.replay_world import Stream, group, retire, trajectory
from tests.strategies import examples

NAMES = [f"t{i}" for i in range(40)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as made:
        yield Path(made)


def wrap(folder: Path, replay: ReplaySettings, inner: Curriculum, size: int = 8, **more: Any) -> ReplayCurriculum:
    pool = ExperiencePool(folder / "pool.sqlite", replay)
    return ReplayCurriculum(inner, pool, replay, **{"total_batches": 10, "group": size, "seed": 3, **more})


def propose(curriculum: ReplayCurriculum, count: int) -> list[GroupSpec]:
    return asyncio.run(curriculum.propose(count))


def names(specs: list[GroupSpec]) -> list[str]:
    return [spec.task.id for spec in specs]


def keys(specs: list[GroupSpec]) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(spec.task.id, spec.fresh, tuple(t.id for t in spec.replayed)) for spec in specs]


# --- the plan ---------------------------------------------------------------------------------------
@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    known = draw(st.integers(1, 14))
    return {
        "names": NAMES[:known],
        "stored": draw(st.dictionaries(st.sampled_from(NAMES[:16]), st.integers(1, 3), max_size=12)),
        "retired": draw(st.sets(st.sampled_from(NAMES[:16]), max_size=10)),
        "size": draw(st.integers(4, 8)),
        "batch": draw(st.integers(1, 9)),
        "replay": ReplaySettings(
            task_ratio=draw(st.sampled_from([0.0, 0.29, 0.5, 0.75, 1.0])),
            per_group=draw(st.integers(0, 3)),
            placement=draw(st.sampled_from(["add", "replace"])),
            tasks=draw(st.sampled_from(["gaussian", "uniform", "uniform_buckets", "rescue"])),
            select=draw(st.sampled_from(["least_used", "lowest_entropy", "highest_entropy", "random", "newest"])),
            probe_fraction=draw(st.sampled_from([0.0, 0.05, 0.3])),
        ),
        "counts": draw(st.lists(st.booleans(), min_size=3, max_size=8)),
    }


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.too_slow])
@given(worlds())
def test_every_plan_has_the_right_counts_for_any_pool_and_settings(world: dict[str, Any]) -> None:
    replay, size, batch = world["replay"], world["size"], world["batch"]
    with TemporaryDirectory() as folder:
        curriculum = wrap(Path(folder), replay, Stream(world["names"], size), size)
        pool = curriculum.pool
        pool.observe([group(name, count, 4) for name, count in world["stored"].items()], 0)
        retire(pool, sorted(world["retired"]))
        eligible = set(world["stored"]) - world["retired"]
        live = {name: len(own) for name, own in pool.stored(sorted(eligible)).items()}
        for number, whole in enumerate([True, *world["counts"]]):
            count = batch if whole else 1
            specs = propose(curriculum, count)
            assert len(specs) == count
            mixed = [spec for spec in specs if spec.replayed]
            target = int(count * replay.task_ratio + 1e-9) if count > 1 else 1
            assert len(mixed) <= min(target, len(eligible))
            for spec in mixed:
                assert spec.task.id in eligible
                assert len({t.id for t in spec.replayed}) == len(spec.replayed)
                assert len(spec.replayed) == min(replay.per_group, live[spec.task.id])
                assert spec.fresh == size - len(spec.replayed) * (replay.placement == "replace")
            plain = [spec for spec in specs if not spec.replayed]
            assert all(spec.fresh == size for spec in plain)
            halves = Counter(names(mixed)), Counter(names(plain))
            if whole and len(set(world["names"]) - set(halves[0])) >= len(plain):
                assert not halves[0].keys() & halves[1].keys()
            assert max(halves[0].values(), default=1) == 1
            others = set(world["names"]) - world["retired"] - set(halves[0])
            repeated = [name for name, times in halves[1].items() if times > 1]
            if len(others) >= count and number == 0:
                assert not repeated
                probes = replay.probe_fraction * (number + 1) * count + 1
                assert len(set(names(plain)) & world["retired"]) <= probes
        pool.close()


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(
    held=st.lists(st.lists(st.sampled_from(["own", "seed", "import"]), min_size=1, max_size=4), max_size=14),
    limits=st.dictionaries(st.sampled_from(["own", "seed", "import"]), st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0])),
    per_group=st.integers(1, 3),
    batch=st.integers(1, 9),
)
def test_no_source_exceeds_its_limit_and_limits_leave_no_place_empty_that_another_source_could_fill(
    held: list[list[str]], limits: dict[str, float], per_group: int, batch: int
) -> None:
    """``held`` holds the sources of the trajectories of each task."""
    replay = ReplaySettings(task_ratio=1.0, per_group=per_group, source_limits=limits, tasks="uniform")
    with TemporaryDirectory() as folder:
        curriculum = wrap(Path(folder), replay, Stream(NAMES, 8))
        source_of: dict[str, str] = {}
        for name, sources in zip(NAMES, held, strict=False):
            for number, source in enumerate(sources):
                each = trajectory(name, number)
                source_of[each.id] = source
                assert curriculum.pool.add(Task(name), each, attempts=8, successes=4, source=source)
        free = sum(any(limits.get(source, 1.0) == 1.0 for source in sources) for sources in held)
        for _ in range(3):
            specs = propose(curriculum, batch)
            used = Counter(source_of[each.id] for spec in specs for each in spec.replayed)
            for source, count in used.items():
                assert count <= np.ceil(limits.get(source, 1.0) * batch * per_group - 1e-9), source
            assert sum(bool(spec.replayed) for spec in specs) >= min(batch, free)
        metrics = curriculum.observe([], {})
        assert all(metrics[f"replay/source/{name}"] >= count for name, count in used.items())
        curriculum.pool.close()


@pytest.mark.parametrize(("limit", "seeded"), [(0.0, 0), (0.25, 1), (0.5, 2)])
def test_the_rest_of_a_batch_is_replayed_from_few_tasks_of_other_sources(
    folder: Path, limit: float, seeded: int
) -> None:
    replay = ReplaySettings(source_limits={"seed": limit})
    curriculum = wrap(folder, replay, Stream(NAMES, 8))
    curriculum.pool.observe([group(name, 4, 8) for name in NAMES[:4]], 0)
    for number in range(300):
        name = f"seeded {number}"
        curriculum.pool.add(Task(name), trajectory(name, 0), attempts=8, successes=4, source="seed")
    for _ in range(3):
        replayed = [spec.task.id for spec in propose(curriculum, 8) if spec.replayed]
        assert Counter(name.split()[0] == "seeded" for name in replayed) == Counter({True: seeded, False: 4 - seeded})


def test_half_of_a_batch_is_replayed_and_placement_sets_the_number_of_fresh_members(folder: Path) -> None:
    for placement, fresh in (("replace", 6), ("add", 8)):
        (folder / placement).mkdir()
        replay = ReplaySettings(per_group=2, placement=placement, probe_fraction=0)
        curriculum = wrap(folder / placement, replay, Stream(NAMES, 8))
        curriculum.pool.observe([group(f"t{i}", 4, 8) for i in range(20, 40)], 0)
        for _ in range(3):
            specs = propose(curriculum, 16)
            assert Counter((spec.fresh, len(spec.replayed)) for spec in specs) == {(8, 0): 8, (fresh, 2): 8}


def test_the_adaptive_share_follows_the_effective_sample_size_and_continues_after_a_resume(folder: Path) -> None:
    replay = ReplaySettings(task_ratio=0.75, min_task_ratio=0.25, probe_fraction=0)

    def replayed(curriculum: ReplayCurriculum) -> int:
        return sum(bool(spec.replayed) for spec in propose(curriculum, 16))

    curriculum = wrap(folder, replay, Stream(NAMES, 8))
    curriculum.pool.observe([group(f"t{i}", 4, 8) for i in range(20, 40)], 0)
    assert replayed(curriculum) == 12
    shares = [curriculum.observe([], {"loss/replayed/ess": 0.5})["replay/task_ratio"] for _ in range(60)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(0.25 + 0.5 * 0.95)  # an EMA from 1 with the weight 0.1 of a new step
    assert shares[-1] == pytest.approx(0.5, abs=2e-3)
    assert curriculum.observe([], {})["replay/task_ratio"] == shares[-1]  # a step that replayed nothing
    assert replayed(curriculum) == 8

    state = json.loads(json.dumps(curriculum.state_dict()))
    curriculum.load_state_dict(state)
    assert curriculum.observe([], {})["replay/task_ratio"] == shares[-1]

    (folder / "exchanged").mkdir()
    with pytest.raises(UserError, match="min_task_ratio"):
        wrap(folder / "exchanged", ReplaySettings(task_ratio=0.2, min_task_ratio=0.5), Stream(NAMES, 8))


@pytest.mark.parametrize(("batch", "low"), [(2, 0.25), (4, 0.0), (4, 0.1)])
def test_an_adaptive_share_below_one_group_does_not_end_replay(folder: Path, batch: int, low: float) -> None:
    """The effective sample size is known only for steps that replay something."""
    replay = ReplaySettings(task_ratio=0.5, min_task_ratio=low, probe_fraction=0)
    curriculum = wrap(folder, replay, Stream(NAMES, 8))
    curriculum.pool.observe([group(f"t{i}", 4, 8) for i in range(20, 40)], 0)
    replayed: list[int] = []
    for ess in [0.2] * 30 + [1.0] * 120:
        replayed.append(sum(bool(spec.replayed) for spec in propose(curriculum, batch)))
        curriculum.observe([], {"loss/replayed/ess": ess} if replayed[-1] else {})
    assert 0 < sum(replayed[20:30]) < 10 * batch * 0.5
    assert sum(replayed[-20:]) == pytest.approx(20 * batch * 0.5, rel=0.1)


def test_placement_replace_removes_one_fresh_member_per_retrieved_trajectory(folder: Path) -> None:
    replay = ReplaySettings(per_group=3, placement="replace", task_ratio=1.0, probe_fraction=0)
    curriculum = wrap(folder, replay, Stream(NAMES, 8))
    curriculum.pool.observe([group("t20", 1, 8), group("t21", 2, 8), group("t22", 5, 8)], 0)
    found = {s.task.id: (s.fresh, len(s.replayed)) for s in propose(curriculum, 3)}
    assert found == {"t20": (7, 1), "t21": (6, 2), "t22": (5, 3)}


def test_with_an_empty_pool_the_inner_plan_is_unchanged_and_this_is_logged_once(folder: Path, caplog: Any) -> None:
    curriculum = wrap(folder, ReplaySettings(), Stream(NAMES, 8))
    with caplog.at_level(logging.INFO):
        found = names([spec for _ in range(3) for spec in propose(curriculum, 4)])
    assert found == NAMES[:12]
    assert sum("plainly on-policy" in line for line in caplog.messages) == 1
    assert sum("replay begins" in line for line in caplog.messages) == 1


def test_displaced_tasks_come_first_in_the_next_batch(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(probe_fraction=0), Stream(NAMES[:20], 8))
    curriculum.pool.observe([group(f"t{i}", 4, 8) for i in range(20, 40)], 0)
    batches = [propose(curriculum, 8) for _ in range(5)]
    assert all(sum(bool(spec.replayed) for spec in specs) == 4 for specs in batches)
    fresh = [[spec.task.id for spec in specs if not spec.replayed] for specs in batches]
    assert fresh == [NAMES[i : i + 4] for i in range(0, 20, 4)]
    assert curriculum.observe([], {})["replay/displaced"] == 4


def test_replayed_groups_have_varying_positions_in_a_batch(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(probe_fraction=0), Stream(NAMES[:20], 8))
    curriculum.pool.observe([group(f"t{i}", 4, 8) for i in range(20, 40)], 0)
    layouts = {tuple(bool(spec.replayed) for spec in propose(curriculum, 8)) for _ in range(6)}
    assert len(layouts) > 1


def test_missing_replayed_tasks_are_filled_with_fresh_tasks(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(probe_fraction=0), Stream(NAMES[:30], 8))
    curriculum.pool.observe([group("t38", 4, 8), group("t39", 4, 8)], 0)
    specs = propose(curriculum, 8)
    assert {spec.task.id for spec in specs if spec.replayed} == {"t38", "t39"}
    assert [spec.task.id for spec in specs if not spec.replayed] == NAMES[:6]
    metrics = curriculum.observe([], {})
    assert (metrics["replay/planned"], metrics["replay/wanting"]) == (2, 2)


@pytest.mark.parametrize(("ratio", "known", "mixed"), [(0.5, 4, 4), (0.5, 3, 3), (1.0, 4, 4), (0.25, 4, 2)])
def test_few_tasks_are_replayed_and_played_fresh_in_the_same_batch(
    folder: Path, ratio: float, known: int, mixed: int
) -> None:
    """There are half as many tasks as groups in a batch, and the pool holds successes on ``known`` of them."""
    curriculum = wrap(folder, ReplaySettings(task_ratio=ratio, probe_fraction=0), Stream(NAMES[:4], 8))
    curriculum.pool.observe([group(f"t{i}", 4, 8) for i in range(known)], 0)
    played: Counter[str] = Counter()
    for _ in range(6):
        specs = propose(curriculum, 8)
        assert len(specs) == 8
        replayed = names([spec for spec in specs if spec.replayed])
        assert len(replayed) == len(set(replayed)) == mixed
        played.update(names([spec for spec in specs if not spec.replayed]))
    assert set(played) == set(NAMES[:4])
    assert curriculum.observe([], {})["replay/displaced"] <= 8


def test_fresh_tasks_are_not_kept_waiting_for_every_batch_that_replays_them(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(probe_fraction=0), Stream(NAMES[:12], 8))
    curriculum.pool.observe([group(f"t{i}", 4, 8) for i in range(4)], 0)
    for _ in range(40):
        specs = propose(curriculum, 8)
        assert Counter(names(specs)).most_common(1)[0][1] == 1
        assert {spec.task.id for spec in specs if spec.replayed} == set(NAMES[:4])
    assert curriculum.observe([], {})["replay/displaced"] <= 12


def test_a_task_whose_trajectories_are_all_rejected_is_played_fresh(folder: Path) -> None:
    async def estimate(trajectories: Any) -> list[tuple[float, float]]:
        return [(0.0, 9.0) for _ in trajectories]

    curriculum = wrap(folder, ReplaySettings(max_ratio=2.0, probe_fraction=0), Stream(NAMES[:4], 8), estimate=estimate)
    curriculum.pool.observe([group("t0", 4, 8)], 0)
    assert sorted(names(propose(curriculum, 4))) == NAMES[:4]


def test_per_group_zero_chooses_tasks_from_the_pool_and_replays_nothing(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(per_group=0, placement="replace", probe_fraction=0), Stream(NAMES[:20], 8))
    curriculum.pool.observe([group(f"t{i}", 4, 8) for i in range(20, 40)], 0)
    specs = propose(curriculum, 8)
    assert all(spec.fresh == 8 and not spec.replayed for spec in specs)
    assert sum(int(spec.task.id[1:]) >= 20 for spec in specs) == 4


def test_retired_tasks_are_proposed_only_if_other_tasks_do_not_suffice(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(probe_fraction=0), Stream(NAMES[:10], 4), 4)
    retire(curriculum.pool, NAMES[:7])
    assert [sorted(names(propose(curriculum, 3))) for _ in range(3)] == [NAMES[7:10]] * 3
    specs = names(propose(curriculum, 5))
    assert set(NAMES[7:10]) < set(specs)
    assert len(set(specs)) == 5


def test_retired_tasks_are_probed_at_probe_fraction(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(probe_fraction=0.05), Stream(NAMES[:30], 4), 4)
    retire(curriculum.pool, NAMES[30:])
    probed = [sum(int(name[1:]) >= 30 for name in names(propose(curriculum, 8))) for _ in range(20)]
    assert sum(probed) == 8
    assert max(probed) == 1


def test_refunded_tickets_get_other_tasks_at_the_same_replay_ratio(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(probe_fraction=0), Stream(NAMES[:20], 8))
    curriculum.pool.observe([group(f"t{i}", 4, 8) for i in range(20, 40)], 0)
    batch = propose(curriculum, 8)
    again = [propose(curriculum, 1)[0] for _ in range(8)]
    assert sum(bool(spec.replayed) for spec in again) == 4
    assert len(set(names([*batch, *again]))) == 16
    assert len(propose(curriculum, 8)) == 8


def test_proposals_of_one_group_are_replayed_at_the_task_ratio(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(task_ratio=0.25, probe_fraction=0), Stream(NAMES[:4], 8))
    curriculum.pool.observe([group("t39", 4, 8)], 0)
    assert [bool(propose(curriculum, 1)[0].replayed) for _ in range(8)] == [False, False, False, True] * 2


def test_fresh_and_replayed_groups_keep_the_greedy_attempt(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(), Stream(NAMES[:20], 8, greedy=True))
    curriculum.pool.observe([group("t39", 4, 8)], 0)
    specs = propose(curriculum, 4)
    assert any(spec.replayed for spec in specs)
    assert all(spec.greedy for spec in specs)


def test_equal_seeds_give_equal_plans(folder: Path) -> None:
    def plan(name: str, seed: int) -> list[Any]:
        (folder / name).mkdir()
        curriculum = wrap(folder / name, ReplaySettings(probe_fraction=0), Stream(NAMES[:20], 8), seed=seed)
        curriculum.pool.observe([group(f"t{i}", 4, 8) for i in range(20, 40)], 0)
        return [keys(propose(curriculum, 8)) for _ in range(3)]

    assert plan("a", 1) == plan("b", 1) != plan("c", 2)


@pytest.mark.parametrize(
    ("replay", "message"),
    [
        (ReplaySettings(placement="replace", per_group=8), "per_group"),
        (ReplaySettings(reverify=True), "reverify"),
        (ReplaySettings(tasks="difficulty", difficulty=9), "difficulty"),
    ],
)
def test_unusable_settings_raise_a_user_error(folder: Path, replay: ReplaySettings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        wrap(folder, replay, Stream(NAMES, 8))


def test_difficulty_is_checked_only_if_tasks_are_chosen_by_it(folder: Path) -> None:
    wrap(folder, ReplaySettings(difficulty=9), Stream(NAMES, 8)).pool.close()
    wrap(folder, ReplaySettings(tasks="difficulty", difficulty=8), Stream(NAMES, 8))


@pytest.mark.parametrize("batch", [4, 1])
def test_proposals_for_refunded_tickets_do_not_count_as_progress(folder: Path, batch: int) -> None:
    """Replacing dropped groups does not bring the start of replay closer."""
    curriculum = wrap(folder, ReplaySettings(start_progress=0.3), Stream(NAMES, 4), 4)
    for replaced in (3, 2, 0):
        for count in (batch, *[1] * replaced):
            propose(curriculum, count)
            assert not curriculum.on
        curriculum.observe([], {})
    propose(curriculum, batch)
    assert curriculum.on


def test_probes_do_not_accumulate_while_no_task_is_retired(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(probe_fraction=0.25), Stream(NAMES[:30], 4), 4)
    for _ in range(8):
        propose(curriculum, 4)
    retire(curriculum.pool, NAMES[30:])
    probed = [sum(int(name[1:]) >= 30 for name in names(propose(curriculum, 4))) for _ in range(3)]
    assert probed == [2, 1, 1]


def test_probes_are_full_groups_with_a_greedy_attempt_if_others_have_one(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(probe_fraction=0.5), Stream(NAMES[:30], 4, greedy=True), 4)
    retire(curriculum.pool, NAMES[30:])
    probes = [spec for spec in propose(curriculum, 4) if int(spec.task.id[1:]) >= 30]
    assert len(probes) == 2
    assert all(spec.greedy and spec.fresh == 4 and not spec.replayed for spec in probes)
    assert all(spec.task.payload == {"word": "left"} for spec in probes)


def test_probes_do_not_reduce_the_number_of_replayed_tasks(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(task_ratio=0.75, probe_fraction=0.5), Stream(NAMES[:20], 4), 4)
    curriculum.pool.observe([group(f"t{i}", 2, 4) for i in range(20, 30)], 0)
    retire(curriculum.pool, NAMES[30:])
    specs = propose(curriculum, 4)
    assert sum(bool(spec.replayed) for spec in specs) == 3
    assert [spec.task.id for spec in specs if int(spec.task.id[1:]) >= 30] != []
    assert len(specs) == 4


# --- when replay begins -----------------------------------------------------------------------------
def replay_began(curriculum: ReplayCurriculum, rates: list[int]) -> list[bool]:
    out = []
    for solved in rates:
        propose(curriculum, 2)
        out.append(curriculum.on)
        curriculum.observe([group(f"t{len(out)}", solved, 4)], {})
    return out


def test_replay_begins_at_start_progress(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(start_progress=0.35), Stream(NAMES, 4), 4)
    assert replay_began(curriculum, [0] * 6) == [False] * 4 + [True] * 2


def test_a_run_that_is_resumed_with_replay_has_planned_the_batches_of_its_staleness_bound(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(start_progress=0.6), Stream(NAMES, 4), 4, first_step=4, staleness=2)
    propose(curriculum, 4)
    assert curriculum.on


def test_replay_begins_at_start_solve_rate_and_does_not_end_again(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(start_solve_rate=0.35), Stream(NAMES, 4), 4)
    solved = [0, 0, 2, 2, 2, 2, 0, 0, 0, 0]
    mean, tried, expected = 0.0, 0.0, []
    for now in solved:
        expected.append((expected and expected[-1]) or (tried > 0 and mean / tried >= 0.35))
        mean, tried = 0.9 * mean + now, 0.9 * tried + 4
    assert replay_began(curriculum, solved) == expected
    assert expected[5:7] == [False, True]


def test_with_two_start_conditions_replay_begins_at_the_first_one_met(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = ReplaySettings(start_solve_rate=0.9, start_progress=0.3)
    with caplog.at_level("INFO", "gleanrl"):
        assert replay_began(wrap(folder, both, Stream(NAMES, 4), 4), [0] * 5) == [False] * 3 + [True] * 2
    waits = [line.getMessage() for line in caplog.records if "waits" in line.getMessage()]
    assert len(waits) == 1
    assert all(share in waits[0] for share in ("90%", "30%"))


@pytest.mark.parametrize(
    ("replay", "by"),
    [
        (ReplaySettings(start_progress=0.2), "progress"),
        (ReplaySettings(start_solve_rate=0.4), "solve_rate"),
        (ReplaySettings(start_solve_rate=0.9, start_progress=0.2), "progress"),
    ],
)
def test_metrics_of_each_step_say_whether_replay_is_on_and_what_started_it(
    folder: Path, replay: ReplaySettings, by: str
) -> None:
    def step(curriculum: ReplayCurriculum) -> dict[str, float]:
        propose(curriculum, 2)
        return dict(curriculum.observe([group("t1", 2, 4)], {}))

    curriculum = wrap(folder, replay, Stream(NAMES, 4), 4)
    steps = [step(curriculum) for _ in range(4)]
    first = {"progress": 2, "solve_rate": 1}[by]
    for number, metrics in enumerate(steps):
        began = {name: metrics[f"replay/on_by_{name}"] for name in ("progress", "solve_rate")}
        assert metrics["replay/on"] == float(number >= first)
        assert began == {name: float(number >= first and name == by) for name in began}
    assert [metrics["replay/progress"] for metrics in steps] == [0.1, 0.2, 0.3, 0.4]
    state = curriculum.state_dict()
    curriculum.pool.close()
    resumed = wrap(folder, replay, Stream(NAMES, 4), 4)
    resumed.load_state_dict(state)
    assert step(resumed)[f"replay/on_by_{by}"] == 1.0


def test_before_replay_begins_nothing_is_replayed_but_successes_are_stored(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(start_progress=0.2, probe_fraction=0), Stream(NAMES, 4), 4)
    seen = []
    for step in range(4):
        specs = propose(curriculum, 4)
        seen.append(sum(bool(spec.replayed) for spec in specs))
        curriculum.observe([group(spec.task.id, 2, 4, first=8 * step) for spec in specs if not spec.replayed], {})
    assert seen == [0, 0, 2, 2]


# --- which trajectories -----------------------------------------------------------------------------
def one_task(folder: Path, replay: ReplaySettings, logprobs: list[float], **more: Any) -> ReplayCurriculum:
    """The pool holds one task with one success for each log-prob; its entropy is minus the log-prob."""
    curriculum = wrap(folder, replay.model_copy(update={"probe_fraction": 0.0}), Stream(NAMES[:20], 8), **more)
    curriculum.pool.observe([group("t39", len(logprobs), len(logprobs) + 1, logprobs=logprobs)], 0)
    return curriculum


def replayed(curriculum: ReplayCurriculum) -> list[str]:
    return [t.id for spec in propose(curriculum, 2) for t in spec.replayed]


@pytest.mark.parametrize(
    ("select", "expected"),
    [("lowest_entropy", ["t39.1", "t39.3"]), ("highest_entropy", ["t39.2", "t39.0"]), ("newest", ["t39.3", "t39.2"])],
)
def test_select_chooses_by_recorded_entropy_or_by_order_of_storing(
    folder: Path, select: str, expected: list[str]
) -> None:
    replay = ReplaySettings(select=select, per_group=2, entropy_from="recorded")
    assert replayed(one_task(folder, replay, [-0.7, -0.1, -0.9, -0.2])) == expected


def test_a_ranking_sees_entropy_uses_age_score_and_length_and_decides(folder: Path) -> None:
    seen: list[TaskTrajectories] = []

    @ranking("oldest, for a test", by_entropy=False)
    def oldest(trajectories: TaskTrajectories, random: np.random.Generator) -> np.ndarray:
        seen.append(trajectories)
        return np.lexsort((np.arange(trajectories.age.size), -trajectories.age))

    replay = ReplaySettings(select=oldest.name, per_group=2, task_ratio=1.0, probe_fraction=0, entropy_from="current")
    curriculum = wrap(folder, replay, Stream(NAMES[:20], 8), estimate=None)
    for step in range(3):
        curriculum.observe([group("t39", 1, 4, first=4 * step, logprobs=[-0.1 * (step + 1)], version=step)], {})
    assert [t.id for spec in propose(curriculum, 1) for t in spec.replayed] == ["t39.0", "t39.4"]
    (trajectories,) = seen
    assert trajectories.age.tolist() == [3, 2, 1]
    np.testing.assert_allclose(trajectories.entropy, [0.1, 0.2, 0.3], rtol=1e-6)
    assert trajectories.uses.tolist() == [0, 0, 0]
    assert trajectories.score.tolist() == [1.0, 1.0, 1.0]
    assert trajectories.length.tolist() == [6, 6, 6]


def test_the_current_policy_estimates_all_candidates_in_one_call_and_decides(folder: Path) -> None:
    calls = []

    async def estimate(trajectories: Any) -> list[tuple[float, float]]:
        calls.append([t.id for t in trajectories])
        return [(float(t.id[-1]), 0.0) for t in trajectories]  # the reverse of the recorded entropies

    replay = ReplaySettings(task_ratio=1.0, probe_fraction=0, entropy_from="current")
    curriculum = wrap(folder, replay, Stream(NAMES[:20], 8), estimate=estimate)
    groups = [group(f"t{i}", 3, 4, logprobs=[-0.9, -0.5, -0.1]) for i in (38, 39)]
    curriculum.pool.observe([*groups, group("t37", 1, 4)], 0)
    specs = propose(curriculum, 3)
    assert {s.task.id: [t.id for t in s.replayed] for s in specs} == {
        "t37": ["t37.0"],
        "t38": ["t38.0"],
        "t39": ["t39.0"],
    }
    assert [sorted(call) for call in calls] == [["t38.0", "t38.1", "t38.2", "t39.0", "t39.1", "t39.2"]]


@pytest.mark.parametrize("answer", [RuntimeError("out of memory"), [(1.0, 0.0)], [(np.nan, 0.0)] * 3])
def test_without_a_valid_estimate_the_recorded_entropy_decides(folder: Path, answer: Any, caplog: Any) -> None:
    async def estimate(trajectories: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    curriculum = one_task(folder, ReplaySettings(entropy_from="current"), [-0.7, -0.1, -0.9], estimate=estimate)
    assert replayed(curriculum) == ["t39.1"]
    assert "this batch uses the recorded entropies" in caplog.text
    assert curriculum.observe([], {})["replay/estimate_failed"] == 1


def test_a_trajectory_over_max_ratio_is_not_replayed_but_stays_in_the_pool(folder: Path) -> None:
    log_ratios = {"t39.0": 0.5, "t39.1": 0.8, "t39.2": -0.8}

    async def estimate(trajectories: Any) -> list[tuple[float, float]]:
        return [(0.0 if t.id != "t39.0" else 1.0, log_ratios[t.id]) for t in trajectories]

    curriculum = one_task(folder, ReplaySettings(max_ratio=2.0, entropy_from="current"), [-0.5] * 3, estimate=estimate)
    assert replayed(curriculum) == ["t39.0"]
    assert curriculum.observe([], {})["replay/rejected"] == 2
    log_ratios["t39.0"] = 0.7
    specs = propose(curriculum, 2)
    assert not any(spec.replayed for spec in specs)
    assert len(specs) == 2
    metrics = curriculum.observe([], {})
    assert (metrics["replay/missing"], metrics["replay/rejected"]) == (1, 3)
    assert len(curriculum.pool.stored(["t39"])["t39"]) == 3


def test_a_trajectory_that_fails_reverification_is_evicted_and_the_next_best_taken(folder: Path) -> None:
    verdicts = {"t39.1": Score(0.0), "t39.3": Score.failed("the judge is away"), "t39.0": Score(1.0)}

    async def reverify(task: Task, trajectory: Trajectory) -> Score:
        assert task.payload == {"word": "left"}
        if trajectory.id == "t39.2":
            raise ConnectionError("no route")
        return verdicts[trajectory.id]

    replay = ReplaySettings(reverify=True, entropy_from="recorded")
    curriculum = one_task(folder, replay, [-0.7, -0.1, -0.4, -0.2], reverify=reverify)
    assert replayed(curriculum) == ["t39.0"]
    assert [s.trajectory.id for s in curriculum.pool.stored(["t39"])["t39"]] == ["t39.0", "t39.2", "t39.3"]
    metrics = curriculum.observe([], {})
    assert (metrics["replay/reverified"], metrics["replay/reverify_failed"]) == (4, 2)
    assert metrics["pool/evicted/reverify"] == 1


def test_a_checkpoint_during_planning_saves_the_pool_as_before_the_plan(folder: Path) -> None:
    """Evictions take effect together with the plan, so a resumed run plans the same batch again."""
    asked, released = asyncio.Event(), asyncio.Event()

    async def reverify(task: Task, trajectory: Trajectory) -> Score:
        if int(task.id[1:]) % 2:  # these fail at once; the others wait
            return Score(0.0)
        asked.set()
        await released.wait()
        return Score(1.0)

    replay = ReplaySettings(reverify=True, entropy_from="recorded", probe_fraction=0, task_ratio=1.0)
    curriculum = wrap(folder, replay, Stream(NAMES[:20], 4), 4, reverify=reverify)
    curriculum.pool.observe([group(f"t{i}", 2 + i // 33, 4) for i in range(20, 40)], 0)

    async def planned() -> tuple[list[GroupSpec], dict[str, Any]]:
        proposal = asyncio.create_task(curriculum.propose(8))
        await asked.wait()
        state = curriculum.state_dict()
        released.set()
        return await proposal, state

    specs, state = asyncio.run(planned())
    evicted = curriculum.pool.stats()["evicted"]
    assert evicted["reverify"] > 1
    assert len([spec for spec in specs if spec.replayed]) > 1
    curriculum.load_state_dict(state)
    assert curriculum.pool.stats()["evicted"] == {}
    assert keys(propose(curriculum, 8)) == keys(specs)
    assert curriculum.pool.stats()["evicted"] == evicted


def test_reverification_stops_when_enough_trajectories_are_found(folder: Path) -> None:
    asked: list[str] = []

    async def reverify(task: Task, trajectory: Trajectory) -> Score:
        asked.append(trajectory.id)
        return Score(float(trajectory.id != "t39.1"))

    replay = ReplaySettings(reverify=True, entropy_from="recorded", per_group=2)
    curriculum = one_task(folder, replay, [-0.1, -0.2, -0.3, -0.4, -0.5], reverify=reverify)
    assert replayed(curriculum) == ["t39.0", "t39.2"]
    assert asked == ["t39.0", "t39.1", "t39.2"]
    assert curriculum.observe([], {})["replay/reverified"] == 3


def test_a_task_whose_trajectories_cannot_be_read_is_replaced(folder: Path, caplog: Any) -> None:
    curriculum = wrap(folder, ReplaySettings(probe_fraction=0, task_ratio=1.0), Stream(NAMES[:10], 8))
    curriculum.pool.observe([group(f"t{i}", 4, 8) for i in range(30, 33)], 0)
    stored = curriculum.pool.stored
    curriculum.pool.stored = lambda names: {n: [] if n == "t31" else own for n, own in stored(names).items()}
    seen = [propose(curriculum, 2) for _ in range(6)]
    assert all({s.task.id for s in specs if s.replayed} == {"t30", "t32"} for specs in seen)
    assert "task t31 is not replayed in this batch" in caplog.text
    assert curriculum.observe([], {})["replay/missing"] > 0


def test_least_used_replays_all_trajectories_of_a_task_in_turn_and_lowest_entropy_one(folder: Path) -> None:
    """The recorded entropies never change, so a choice by them alone is always the same."""
    logprobs = [-0.7, -0.1, -0.4]
    curriculum = one_task(folder, ReplaySettings(select="least_used"), logprobs)
    assert [replayed(curriculum) for _ in range(6)] == [["t39.1"], ["t39.2"], ["t39.0"]] * 2
    assert [s.uses for s in curriculum.pool.stored(["t39"])["t39"]] == [2, 2, 2]
    curriculum.pool.observe([group("t39", 1, 2, first=50)], 0)  # a new success
    assert [replayed(curriculum) for _ in range(3)] == [["t39.50"], ["t39.50"], ["t39.1"]]
    curriculum.pool.close()
    strict = wrap(folder, ReplaySettings(select="lowest_entropy", probe_fraction=0), Stream(NAMES[:20], 8))
    assert [replayed(strict) for _ in range(3)] == [["t39.1"]] * 3
    assert [s.uses for s in strict.pool.stored(["t39"])["t39"]] == [2, 6, 2, 2]


# --- observation and checkpoints --------------------------------------------------------------------
def test_only_fresh_members_are_stored_and_ages_are_counted_in_versions(folder: Path) -> None:
    inner = Stream(NAMES, 4)
    curriculum = wrap(folder, ReplaySettings(), inner, 4)
    for _ in range(6):
        curriculum.observe([], {})
    old = (trajectory("t1", 90, version=1), trajectory("t1", 91, version=4, logprob=-1.5))
    fresh = group("t1", 1, 4, first=10, version=5)
    mixed = Group(GroupSpec(fresh.spec.task, 4, old), (*fresh.trajectories, *old), 0)
    invalid = Group(GroupSpec(Task("t2"), 2), (trajectory("t2", 0, None), trajectory("t2", 1, None)), 1)
    metrics = curriculum.observe([mixed, invalid], {})
    assert [s.trajectory.id for s in curriculum.pool.stored(["t1"])["t1"]] == ["t1.10"]
    assert [s.step for s in curriculum.pool.stored(["t1"])["t1"]] == [6]
    assert curriculum.pool.rates(["t1", "t2"]) == {"t1": 0.25}
    assert inner.observed == [mixed, invalid]
    expected = {
        "replay/tasks": 1,
        "replay/trajectories": 2,
        "replay/tokens": 12,
        "replay/age_mean": (5 + 2) / 2,
        "replay/age_max": 5,
        "replay/recorded_entropy": 1.0,
        "replay/fresh_entropy": 0.5,
        "replay/solve_rate": 0.25,
        "replay/solve_rate_running": 0.25,
        "inner/seen": 2,
        "pool/trajectories": 1,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert all(isinstance(value, float) for value in metrics.values())


def test_a_success_is_a_score_of_at_least_success_threshold(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(success_threshold=0.7), Stream(NAMES, 4), 4, temperature=0.6)
    members = tuple(trajectory("t1", i, score) for i, score in enumerate((0.7, 0.69, 0.0, 0.5)))
    metrics = curriculum.observe([Group(GroupSpec(Task("t1"), 4), members, 0)], {})
    assert metrics["replay/solve_rate"] == curriculum.solve_rate == 0.25
    [stored] = curriculum.pool.stored(["t1"])["t1"]
    assert (stored.trajectory.id, stored.temperature) == ("t1.0", 0.6)


def test_a_later_version_of_another_run_gives_age_zero(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(), Stream(NAMES, 4), 4)
    old = trajectory("t1", 9, version=50)
    fresh = group("t1", 1, 4)
    metrics = curriculum.observe([Group(GroupSpec(fresh.spec.task, 4, (old,)), (*fresh.trajectories, old), 0)], {})
    assert metrics["replay/age_mean"] == metrics["replay/age_max"] == 0


def test_the_age_of_a_seeded_trajectory_counts_from_its_version_in_the_pool(folder: Path) -> None:
    """The version in the trajectory counts steps of the run that sampled it. A checkpoint keeps both versions."""
    curriculum = wrap(folder, ReplaySettings(task_ratio=1.0, probe_fraction=0), Stream(NAMES, 4), 4)
    seeded = trajectory("t39", 9, version=50)
    assert curriculum.pool.add(Task("t39"), seeded, version=2, attempts=4, successes=2)
    for _ in range(5):
        curriculum.observe([], {})
    [spec] = (spec for spec in propose(curriculum, 2) if spec.replayed)
    spec = serialize.from_json(serialize.to_json(spec), GroupSpec)
    assert [t.version for t in spec.replayed] == [50]  # the trajectory is unchanged
    fresh = group("t39", 1, 4, first=20, version=5)
    metrics = curriculum.observe([Group(spec, (*fresh.trajectories, *spec.replayed), 0)], {})
    assert metrics["replay/age_mean"] == metrics["replay/age_max"] == 3


@pytest.mark.parametrize(
    ("staleness", "ahead", "due"),
    [(0, 0, 6), (1, 1, 7), (3, 3, 9), (3, 1, 7), (0, 4, 6), (1, 4, 7)],  # ahead > staleness: tickets were refunded
)
def test_replayed_trajectories_are_within_max_age_in_the_step_they_are_planned_for(
    folder: Path, staleness: int, ahead: int, due: int
) -> None:
    replay = ReplaySettings(task_ratio=1.0, probe_fraction=0, max_age=4)
    curriculum = wrap(folder, replay, Stream(NAMES[:20], 4), 4, staleness=staleness)
    for _ in range(6):
        propose(curriculum, 8)
        curriculum.observe([], {})
    for _ in range(ahead):
        propose(curriculum, 8)
    curriculum.pool.observe([group(f"t{20 + version}", 1, 4, version=version) for version in range(8)], 5)
    versions = [t.version for spec in propose(curriculum, 8) for t in spec.replayed]
    assert sorted(versions) == list(range(due - 4, 8))
    metrics = curriculum.observe([], {})
    assert (metrics["replay/too_old"], metrics["replay/missing"]) == (due - 4, 0)
    assert metrics["pool/evicted/age"] == 3  # they would exceed max_age in the next step, 7
    propose(curriculum, 8)
    assert curriculum.observe([], {})["replay/too_old"] == max(min(due + 1, 7 + staleness) - 4 - 3, 0)


def test_counts_and_times_of_planning_are_reported_per_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts and seconds restart from zero in each step, and the time of selection is not part of planning."""
    now = [0.0]
    for module in ("curriculum", "recall"):
        monkeypatch.setattr(f"gleanrl.experience.replay.{module}.perf_counter", lambda: now[0])

    async def estimate(trajectories: Any) -> list[tuple[float, float]]:
        now[0] += 5.0
        return [(0.0, 0.0) for _ in trajectories]

    curriculum = wrap(
        folder,
        ReplaySettings(per_group=2, probe_fraction=0.25, entropy_from="current"),
        Stream(NAMES, 4),
        4,
        estimate=estimate,
    )
    curriculum.pool.observe([group("t37", 3, 4), group("t38", 3, 4)], 0)
    retire(curriculum.pool, [*NAMES[:2], "t39"])
    draw, observe = curriculum.pool.draw, curriculum.pool.observe

    def slow(real: Any, seconds: float) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            now[0] += seconds
            return real(*args, **kwargs)

        return call

    curriculum.pool.draw = slow(draw, 2.0)
    curriculum.pool.observe = slow(observe, 3.0)
    passed_over = set(NAMES[:2]) - set(names(propose(curriculum, 8)))
    expected = {"planned": 2, "wanting": 2, "retrieved": 4, "probes": 2, "retired_passed_over": len(passed_over)}
    metrics = curriculum.observe([], {})
    assert {name: metrics[f"replay/{name}"] for name in expected} == expected
    assert metrics["time/replay_plan_s"] % 2 == 0
    assert metrics["time/replay_plan_s"] > 0
    assert (metrics["time/replay_select_s"], metrics["time/replay_store_s"]) == (5, 3)
    metrics = curriculum.observe([], {})
    assert {metrics[f"replay/{name}"] for name in expected} == {0}
    assert (metrics["time/replay_plan_s"], metrics["time/replay_select_s"]) == (0, 0)


def test_a_group_spec_survives_a_checkpoint_bit_for_bit() -> None:
    old = trajectory("t1", 7, logprob=-0.1234567)
    spec = GroupSpec(Task("t1", ({"role": "user", "content": "hä?"},), {"a": [1]}), 3, (old,), greedy=True)
    back = serialize.from_json(serialize.to_json(spec), GroupSpec)
    assert (back.task, back.fresh, back.greedy) == (spec.task, 3, True)
    for one, other in zip(back.replayed[0].turns(), old.turns(), strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes()
        assert one.sampled == other.sampled
        assert one.logprobs is None or one.logprobs.tobytes() == other.logprobs.tobytes()


def drive(curriculum: ReplayCurriculum, steps: range) -> list[Any]:
    seen = []
    for step in steps:
        specs = propose(curriculum, 6)
        again = propose(curriculum, 1)
        seen.append(keys([*specs, *again]))
        curriculum.observe(
            [group(s.task.id, (step + int(s.task.id[1:])) % 5, 4, first=9 * step, version=step) for s in specs], {}
        )
    return seen


def test_a_resumed_curriculum_plans_the_same_batches_as_an_uninterrupted_one(folder: Path) -> None:
    replay = ReplaySettings(start_solve_rate=0.3, per_group=2, probe_fraction=0.1)
    curriculum = wrap(folder, replay, Stream(NAMES[:14], 4), 4)
    drive(curriculum, range(5))
    state = json.dumps(curriculum.state_dict())
    stats = curriculum.pool.stats()
    first = drive(curriculum, range(5, 10))
    curriculum.pool.close()
    second = wrap(folder, replay, Stream(NAMES[:14], 4), 4)
    second.load_state_dict(json.loads(state))
    assert {**second.pool.stats(), "file_bytes": 0} == {**stats, "file_bytes": 0}
    assert drive(second, range(5, 10)) == first
    assert any(replayed for batch in first for _, _, replayed in batch)


def test_a_checkpoint_during_planning_loses_no_task(folder: Path) -> None:
    """The checkpoint is taken during the policy's estimates; after a resume, the same tasks are planned again."""
    states = []

    async def estimate(trajectories: Any) -> list[tuple[float, float]]:
        await asyncio.sleep(0)
        states.append(json.dumps(curriculum.state_dict()))
        return [(0.0, 0.0) for _ in trajectories]

    curriculum = one_task(folder, ReplaySettings(entropy_from="current"), [-0.5] * 3, estimate=estimate)
    before = names(propose(curriculum, 4))
    whole = keys(propose(curriculum, 4))
    curriculum.load_state_dict(json.loads(states[1]))
    assert keys(propose(curriculum, 4)) == whole
    assert before
    assert len(states) == 3


def test_marks_of_old_checkpoints_are_forgotten(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(), Stream(NAMES, 4), 4, keep_marks=2)
    states = []
    for step in range(5):
        curriculum.observe([group(f"t{step}", 2, 4)], {})
        states.append(curriculum.state_dict())
        curriculum.state_dict()  # the same step saved again keeps its first mark
    curriculum.load_state_dict(states[3])
    assert curriculum.pool.stats()["trajectories"] == 8
    with pytest.raises(UserError, match="no mark"):
        curriculum.load_state_dict(states[1])


def test_shares_and_progress_survive_a_checkpoint(folder: Path, caplog: Any) -> None:
    """A checkpoint keeps the owed fraction of a replayed task, the progress, and which messages have been logged."""
    replay = ReplaySettings(start_progress=0.3, probe_fraction=0.0)
    curriculum = wrap(folder, replay, Stream(NAMES[:20], 4), 4)
    for _ in range(3):
        propose(curriculum, 4)
        curriculum.observe([], {})
    states = [json.dumps(curriculum.state_dict())]
    with caplog.at_level(logging.INFO):
        propose(curriculum, 4)  # logs that the pool is empty
        curriculum.pool.observe([group(f"t{i}", 2, 4) for i in range(20, 40)], 0)
        assert not propose(curriculum, 1)[0].replayed
        states.append(json.dumps(curriculum.state_dict()))
        assert propose(curriculum, 1)[0].replayed
        said = len(caplog.messages)
        curriculum.pool.close()
        again = wrap(folder, replay, Stream(NAMES[:20], 4), 4)
        again.load_state_dict(json.loads(states[1]))
        assert propose(again, 1)[0].replayed
        again.pool.evict([s.key for own in again.pool.stored(NAMES).values() for s in own], "test")
        propose(again, 4)
        assert caplog.messages[said:] == []
    again.load_state_dict(json.loads(states[0]))
    assert not again.on
    propose(again, 4)
    assert again.on


def test_a_refunded_ticket_of_a_resumed_run_repeats_no_task_of_its_batch(folder: Path) -> None:
    stream = ["t0", "t1", "t2", "t0", "t3"]
    curriculum = wrap(folder, ReplaySettings(), Stream(stream, 4), 4)
    propose(curriculum, 3)
    state = json.dumps(curriculum.state_dict())
    curriculum.pool.close()
    again = wrap(folder, ReplaySettings(), Stream(stream, 4), 4)
    again.load_state_dict(json.loads(state))
    assert names(propose(again, 1)) == ["t3"]


def test_tickets_after_a_batch_repeat_no_task_of_it(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(), Stream(["t0", "t1", "t2", "t3", "t0", "t4"], 4), 4)
    assert names(propose(curriculum, 3)) == ["t0", "t1", "t2"]
    assert [names(propose(curriculum, 1)) for _ in range(2)] == [["t3"], ["t4"]]


def test_no_replayed_task_is_owed_for_proposals_before_the_start(folder: Path) -> None:
    replay = ReplaySettings(start_progress=0.5, probe_fraction=0)
    curriculum = wrap(folder, replay, Stream(NAMES[:20], 4), 4, total_batches=6)
    curriculum.pool.observe([group(f"t{i}", 2, 4) for i in range(20, 40)], 0)
    replayed = []
    for _ in range(7):
        replayed.append(bool(propose(curriculum, 1)[0].replayed))
        curriculum.observe([], {})
    assert replayed == [False] * 4 + [True, False, True]


def test_metrics_of_a_plan_are_reported_once_wherever_a_checkpoint_falls(folder: Path) -> None:
    """With a checkpoint before, during or after a plan, counts and evictions equal those without a checkpoint."""

    def counts(metrics: Any) -> dict[str, float]:
        return {name: value for name, value in metrics.items() if not name.startswith("time/")}

    async def reverify(task: Task, trajectory: Trajectory) -> Score:
        states.append(json.dumps(curriculum.state_dict()))
        return Score(float(trajectory.id != "t39.1"))

    states: list[str] = []
    curriculum = one_task(folder, ReplaySettings(reverify=True), [-0.7, -0.1, -0.4], reverify=reverify)
    states.append(json.dumps(curriculum.state_dict()))
    propose(curriculum, 2)
    states.append(json.dumps(curriculum.state_dict()))
    whole = counts(curriculum.observe([], {}))
    assert (whole["pool/evicted/reverify"], whole["replay/reverified"], whole["replay/retrieved"]) == (1, 2, 1)
    for index, state in reversed(list(enumerate(states[:4]))):
        curriculum.load_state_dict(json.loads(state))
        if index < 3:
            propose(curriculum, 2)
        assert counts(curriculum.observe([], {})) == whole
    assert "pool/evicted/reverify" not in curriculum.observe([], {})


def test_the_running_solve_rate_survives_a_checkpoint(folder: Path) -> None:
    replay = ReplaySettings(start_solve_rate=0.35)
    curriculum = wrap(folder, replay, Stream(NAMES, 4), 4)
    propose(curriculum, 4)
    curriculum.observe([group("t0", 3, 4), group("t1", 1, 4)], {})
    state = json.dumps(curriculum.state_dict())
    curriculum.pool.close()
    again = wrap(folder, replay, Stream(NAMES, 4), 4)
    again.load_state_dict(json.loads(state))
    assert again.solve_rate == 0.5
    propose(again, 4)
    assert again.on


def test_placement_add_may_add_more_members_than_the_group_has(folder: Path) -> None:
    replay = ReplaySettings(placement="add", per_group=5, task_ratio=1.0, probe_fraction=0)
    curriculum = wrap(folder, replay, Stream(NAMES[:20], 4), 4)
    curriculum.pool.observe([group("t39", 6, 7)], 0)
    [spec] = [spec for spec in propose(curriculum, 2) if spec.replayed]
    assert (spec.fresh, len(spec.replayed)) == (4, 5)


def test_the_mark_from_before_the_run_is_kept_until_the_second_checkpoint(folder: Path) -> None:
    """A checkpoint removes old marks while it is made and may still fail, so the first one removes none."""
    pool = ExperiencePool(folder / "pool.sqlite", ReplaySettings())
    found = pool.mark()
    curriculum = ReplayCurriculum(
        Stream(NAMES, 4), pool, ReplaySettings(), total_batches=9, group=4, seed=3, keep_marks=2
    )
    for step in range(2):
        curriculum.observe([group(f"t{step}", 2, 4)], {})
        assert found in pool.stats()["marks"]
        curriculum.state_dict()
    assert found not in pool.stats()["marks"]


def test_replay_is_turned_on_and_off_between_two_checkpoints(folder: Path) -> None:
    plain = Stream(NAMES[:12], 4)
    asyncio.run(plain.propose(20))
    replay = ReplaySettings(start_progress=0.5, max_age=3, probe_fraction=0)
    curriculum = wrap(folder, replay, Stream(NAMES[:12], 4), 4, first_step=5)
    curriculum.load_state_dict(json.loads(json.dumps(plain.state_dict())))
    curriculum.observe([group(f"t{i}", 2, 4, version=5) for i in range(4)], {})
    specs = propose(curriculum, 4)
    assert curriculum.on  # 5 of 10 steps were done
    assert sum(bool(spec.replayed) for spec in specs) == 2
    assert next(spec.task.id for spec in specs if not spec.replayed) in NAMES[8:12]  # the stream went on
    played = Group(specs[0], (*group(specs[0].task.id, 2, 4, version=6).trajectories, *specs[0].replayed), 0)
    metrics = curriculum.observe([played], {})
    assert metrics["replay/progress"] == 0.6
    assert metrics.get("replay/age_max", 1) == 1
    assert {s.step for own in curriculum.pool.stored(NAMES[:4]).values() for s in own} <= {5, 6}
    state = json.loads(json.dumps(curriculum.state_dict()))
    again = Stream(NAMES[:12], 4)
    again.load_state_dict(state)
    assert again.position == curriculum.state_dict()["position"] > 20


def test_an_inner_curriculum_that_proposes_nothing_raises_an_error_that_names_it(folder: Path) -> None:
    class Dry(Stream):
        async def propose(self, count: int) -> list[GroupSpec]:
            return []

    with pytest.raises(ValueError, match=r"Dry.propose\(4\) proposed nothing"):
        propose(wrap(folder, ReplaySettings(), Dry(NAMES, 4)), 4)


def test_retired_tasks_are_probed_in_places_that_replay_leaves_free(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(task_ratio=1.0, probe_fraction=0.25), Stream(NAMES[:20], 4), 4)
    curriculum.pool.observe([group("t25", 2, 4)], 0)
    retire(curriculum.pool, NAMES[30:])
    for _ in range(3):
        specs = propose(curriculum, 4)
        assert sum(bool(spec.replayed) for spec in specs) == 1
        assert sum(int(spec.task.id[1:]) >= 30 for spec in specs) == 1


def test_a_checkpoint_that_is_kept_for_longer_can_be_resumed_from(folder: Path) -> None:
    curriculum = wrap(folder, ReplaySettings(), Stream(NAMES, 4), 4, keep_marks=2, kept_steps=lambda: [4])
    saved = {}
    for step in range(1, 9):
        curriculum.observe([group(f"t{step}", 2, 4)], {})
        saved[step] = curriculum.state_dict()
    curriculum.pool.close()
    resumed = wrap(folder, ReplaySettings(), Stream(NAMES, 4), 4, keep_marks=2, first_step=4)
    resumed.load_state_dict(saved[4])
    assert sorted(resumed.pool.rates(NAMES)) == ["t1", "t2", "t3", "t4"]
