"""Tests of the failures that a pool stores with ``replay.keep_failures``: which ones remain, that they survive rewinds,
and that no success depends on them."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.pool import browse, transfer
from gleanrl.experience.pool.pool import ExperiencePool, Incoming
from gleanrl.types import Group, GroupSpec
from gleanrl.utils.errors import UserError
from tests.experience.pool_world import contents, episode, group, solved, task
from tests.experience.test_pool import NAMES, chosen, groups
from tests.strategies import examples

KEEP = ReplaySettings(keep_failures=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "experience.sqlite"


def tokens(pool: ExperiencePool, name: str = "t") -> list[list[int]]:
    return [next(s.trajectory.sampled_turns()).tokens.tolist() for s in pool.failures([name])[name]]


def of_successes(path: Path, *, marks: bool = True) -> dict[str, Any]:
    """Return all rows of a pool's tables except those of failures."""
    found = contents(path, marks=marks)
    kept = {name: rows for name, rows in found.items() if "failure" not in name}
    kept["counters"] = sorted(row[1:] for row in found["counters"] if "failure" not in row[1])
    kept.pop("undo_counters", None)
    return kept


def model_of(history: list[tuple[list[Group], int]], config: ReplaySettings) -> dict[str, list[tuple[Any, ...]]]:
    """Return the failures of each task, oldest first, by the documented rules: the newest ones with distinct tokens."""
    kept: dict[str, list[tuple[Any, ...]]] = {name: [] for name in NAMES}
    for batch, step in history:
        for name, own in kept.items():
            kept[name] = [one for one in own if config.max_age is None or step + 1 - one[1] <= config.max_age]
        for each in batch:
            own = kept[each.spec.task.id]
            for member in each.valid_fresh:
                if not member.score.reaches(config.success_threshold):
                    turn = next(member.sampled_turns())
                    own[:] = [one for one in own if one[0] != turn.tokens.tolist()]
                    own.append((turn.tokens.tolist(), turn.version, step))
            own[:] = own[-config.keep_failures :]
    return kept


def read(pool: ExperiencePool) -> dict[str, list[tuple[Any, ...]]]:
    return {
        name: [(next(s.trajectory.sampled_turns()).tokens.tolist(), s.version, s.step) for s in own]
        for name, own in pool.failures(NAMES).items()
    }


def draws(pool: ExperiencePool, random: np.random.Generator) -> list[Any]:
    """Draw tasks of every bucket and their trajectories, as replay does, and return all of it."""
    drawn = [(b, t.task.id, t.rate) for b in (*pool.buckets(), None) for t in pool.draw(b, 2, random)]
    stored = pool.stored(NAMES)
    return [drawn, [(s.key, s.trajectory.id, s.uses, s.version) for own in stored.values() for s in own]]


@given(chosen=chosen, keep=st.integers(1, 3), data=st.data())
@settings(max_examples=examples(25))
def test_any_history_keeps_the_newest_failures_and_the_same_successes_as_without(
    chosen: ReplaySettings, keep: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keeping = chosen.model_copy(update={"keep_failures": keep})
        paths = Path(folder) / "keeps.sqlite", Path(folder) / "plain.sqlite"
        with ExperiencePool(paths[0], keeping) as pool, ExperiencePool(paths[1], chosen) as plain:
            history: list[tuple[list[Group], int]] = []
            marks: dict[int, tuple[Any, Any]] = {}
            random = np.random.default_rng(1), np.random.default_rng(1)
            for step in range(data.draw(st.integers(3, 12))):
                what = data.draw(st.sampled_from(["observe", "observe", "observe", "mark", "rewind", "forget", "used"]))
                if what == "observe":
                    batch = data.draw(st.lists(groups(step), max_size=3))
                    ours, theirs = pool.observe(batch, step), plain.observe(batch, step)
                    assert {name: ours[name] for name in theirs} == theirs
                    assert ours.keys() - theirs.keys() == {
                        "pool/failures",
                        "pool/failure_bytes",
                        "pool/failures_stored",
                    }
                    history.append((batch, step))
                elif what == "mark":
                    number = pool.mark()
                    assert number == plain.mark()
                    marks[number] = (copy.copy(history), contents(paths[0]))
                elif what in ("rewind", "forget") and marks:
                    number = data.draw(st.sampled_from(sorted(marks)))
                    if what == "rewind":
                        pool.rewind(number)
                        plain.rewind(number)
                        history = copy.copy(marks[number][0])
                        assert contents(paths[0]) == marks[number][1]
                        marks = {n: kept for n, kept in marks.items() if n <= number}
                    else:
                        pool.forget(number)
                        plain.forget(number)
                        marks = {n: kept for n, kept in marks.items() if n >= number}
                elif what == "used":
                    pool.used([s.key for own in pool.failures(NAMES).values() for s in own])
                    keys = [s.key for own in pool.stored(NAMES).values() for s in own][:2]
                    pool.used(keys)
                    plain.used(keys)
                assert draws(pool, random[0]) == draws(plain, random[1])
                assert read(pool) == model_of(history, keeping)
            assert of_successes(paths[0]) == of_successes(paths[1])
            assert not contents(paths[1])["failures"]
            assert pool.verify() == plain.verify() == []


def test_failures_of_groups_of_every_rate_are_stored_but_only_valid_fresh_ones(path: Path) -> None:
    with ExperiencePool(path, KEEP) as pool:
        old = episode("t", 0.0, (90,))
        members = [episode("t", 0.0, (1,)), episode("t", None, (2,)), episode("t", 0.3, (3,))]
        metrics = pool.observe([group("t", members, [old]), solved("u", 4, 4)], 0)
        assert (tokens(pool), tokens(pool, "u"), pool.stored(["t"])["t"]) == ([[1], [3]], [], [])
        assert (metrics["pool/failures"], metrics["pool/failures_stored"], metrics["pool/trajectories"]) == (2, 2, 0)
        assert pool.buckets() == {}
        altered = episode("t", 0.0, (4,), info={"altered_sampling": "top_p=0.9"})
        unfit = episode("t", 0.0, (5, 6), [0.0, 0.0])
        pool.observe([group("t", [altered, unfit, episode("t", 0.0, (1,), version=1)])], 1)
        assert tokens(pool) == [[3], [1]]  # the repeated one is the newest
        assert [s.version for s in pool.failures(["t"])["t"]] == [0, 1]
        assert pool.stats()["failures_evicted"] == {"repeated": 1}
        assert [s.key for s in pool.failures(["t"])["t"]] == [-2, -3]
        assert pool.verify() == []


def test_a_retired_task_keeps_its_failures_and_a_changed_one_loses_them(path: Path) -> None:
    with ExperiencePool(path, KEEP) as pool:
        pool.observe([solved("t", 2, 4)], 0)
        pool.observe([solved("t", 4, 4)], 1)
        pool.observe([solved("t", 4, 4)], 2)
        assert (pool.retired(["t"]), tokens(pool)) == ({"t"}, [[2, 5], [3, 5]])
        pool.set_tasks([replace(task("t"), payload={})])
        assert (tokens(pool), pool.stats()["failures"], pool.stats()["failure_bytes"]) == ([], 0, 0)
        assert pool.stats()["failures_evicted"] == {"other_task": 2}
        assert pool.verify() == []


def test_failures_age_and_are_relabelled_as_successes_are(path: Path) -> None:
    with ExperiencePool(path, KEEP) as pool:
        pool.observe([solved("old", 1, 2, version=3)], 3)
        pool.observe([solved("new", 1, 2, version=10)], 10)
    with ExperiencePool(path, KEEP.model_copy(update={"max_age": 8})) as pool:
        pool.start_run()
        found = pool.failures(["old", "new"])
        assert {name: (own[0].version, own[0].source) for name, own in found.items()} == {
            "old": (-7, "earlier"),
            "new": (0, "earlier"),
        }
        pool.observe([], 0)
        assert pool.stats()["failures"] == 2
        pool.observe([], 1)
        assert (tokens(pool, "old"), tokens(pool, "new")) == ([], [[1, 5]])
        assert pool.stats()["failures_evicted"] == {"age": 1}


def test_a_run_that_keeps_none_removes_those_of_the_tasks_that_it_observes(path: Path) -> None:
    with ExperiencePool(path, KEEP) as pool:
        pool.observe([solved("t", 1, 4), solved("u", 1, 4)], 0)
    with ExperiencePool(path) as pool:
        pool.observe([solved("t", 1, 4, first=9)], 1)
        assert (tokens(pool), len(tokens(pool, "u")), len(pool.stored(["t"])["t"])) == ([], 2, 2)
    strict = KEEP.model_copy(update={"success_threshold": -1.0})  # by which the stored scores are successes
    with ExperiencePool(path, strict) as pool:
        assert tokens(pool, "u") == []
        assert pool.stats()["failures_evicted"] == {"newer": 2, "success": 2}


def test_a_damaged_failure_is_evicted_and_reported(path: Path) -> None:
    with ExperiencePool(path, KEEP) as pool:
        pool.observe([solved("t", 2, 4)], 0)
        pool._db.execute("UPDATE failure_blobs SET data = x'00' WHERE id = -1")
        assert any("failures without a record of their length: 1" in fault for fault in pool.verify())
        assert any("trajectory -1 of task 't'" in fault for fault in pool.verify())
        assert (tokens(pool), len(pool.stored(["t"])["t"])) == ([[3, 5]], 2)
        pool.evict([-2, 1, -77], "asked")
        assert (tokens(pool), [s.key for s in pool.stored(["t"])["t"]]) == ([], [2])
        assert pool.stats()["evicted"] == {"asked": 1}
        assert pool.stats()["failures_evicted"] == {"asked": 1, "damaged": 1}
        assert pool.verify() == []


def test_verify_reads_tasks_that_have_only_failures(path: Path) -> None:
    with ExperiencePool(path, KEEP) as pool:
        pool.observe([solved("t", 0, 4)], 0)
        assert pool.verify() == []
        pool._db.execute("UPDATE bodies SET data = x'00'")
        [fault] = pool.verify()
        assert "task 't'" in fault


def test_exports_and_seeds_hold_failures_only_if_asked(path: Path, tmp_path: Path) -> None:
    with ExperiencePool(path, KEEP, tokenizer="one") as pool:
        pool.observe([solved("t", 2, 5), solved("u", 0, 2, version=3)], 4)
        failures = read_all(pool)
    file = tmp_path / "pool.parquet"
    assert transfer.export_parquet(path, file) == (2, 0, [])
    assert transfer.export_parquet(path, file, failures=True) == (2, 4, [])
    with ExperiencePool(tmp_path / "plain.sqlite", tokenizer="one") as plain:
        moved = transfer.import_parquet(plain, file)
        assert (moved.stored, moved.left_out["no success"], plain.stats()["failures"]) == (2, 4, 0)
        with pytest.raises(UserError, match="keep_failures"):
            transfer.import_parquet(plain, file, failures=True)
    with ExperiencePool(tmp_path / "copy.sqlite", KEEP, tokenizer="one") as copied:
        assert transfer.import_parquet(copied, file).stored == 2
        assert transfer.import_parquet(copied, file, failures=True).failures == 4
        assert [(a[0], a[1:]) for a in read_all(copied)] == [(a[0], a[1:]) for a in failures]
        assert {s.source for s in copied.failures(["t"])["t"]} == {"import"}
        assert copied.verify() == []
        assert copied.rates(["t", "u"]) == {"t": 0.4}  # failures say nothing of a task's state
    with ExperiencePool(tmp_path / "seeded.sqlite", KEEP, tokenizer="one") as seeded:
        assert transfer.seed_from_pool(seeded, path).stored == 2
        assert transfer.seed_from_pool(seeded, path, failures=True, label="other").failures == 4
        assert {(s.source, s.version) for s in seeded.failures(["u"])["u"]} == {("other", 0)}
        assert not any(seeded.add_all([Incoming(task("t"), episode("t", 0.0, (70,)))]))
        assert not any(seeded.add_failures([Incoming(task("t"), episode("t", 1.0, (70,)))]))


def test_copying_failures_again_changes_nothing(path: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "pool.parquet", tmp_path / "other.sqlite"
    with ExperiencePool(path, KEEP, tokenizer="one") as pool:
        pool.observe([solved("t", 2, 5), solved("u", 0, 2, version=3)], 4)
        transfer.export_parquet(path, file, failures=True)
        before = contents(path)
        moved = transfer.import_parquet(pool, file, failures=True, label="again")
        assert (moved.stored, moved.failures, moved.left_out.total()) == (0, 0, 6)
        assert contents(path) == before
    with ExperiencePool(other, KEEP, tokenizer="one") as seeded:
        moved = transfer.seed_from_pool(seeded, path, failures=True)
        assert (moved.stored, moved.failures, moved.left_out.total()) == (2, 4, 0)
        before = contents(other)
        assert transfer.seed_from_pool(seeded, path, failures=True).left_out.total() == 6
        assert contents(other) == before
        assert seeded.stats()["failures_evicted"] == {}
        seeded.observe([group("t", [episode("t", 0.0, (4, 5), version=9)])], 9)  # sampled, so it replaces the copy
        assert [(s.version, s.source) for s in seeded.failures(["t"])["t"]] == [(0, "seed"), (9, "own")]


@pytest.mark.parametrize("batch", [1, 2, 1_000])  # 2: a transaction ends between the failures of a task
def test_copied_failures_take_free_places_only_and_the_newest_of_the_source_come_first(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(transfer, "BATCH", batch)
    file, other = tmp_path / "pool.parquet", tmp_path / "other.sqlite"
    with ExperiencePool(path, ReplaySettings(keep_failures=4), tokenizer="one") as pool:
        pool.observe([solved("u", 0, 1), solved("t", 0, 4), solved("v", 0, 3)], 500)
    transfer.export_parquet(path, file, failures=True)
    for copy_into in (
        lambda pool: transfer.import_parquet(pool, file, failures=True),
        lambda pool: transfer.seed_from_pool(pool, path, failures=True),
    ):
        other.unlink(missing_ok=True)
        with ExperiencePool(other, ReplaySettings(keep_failures=3), tokenizer="one") as pool:
            pool.observe([solved("t", 0, 2, first=8), solved("u", 0, 3, first=8)], 1)
            assert copy_into(pool).failures == 4
            own = [s for name in "tu" for s in pool.failures([name])[name] if s.source == "own"]
            assert len(own) == 5
            assert (tokens(pool)[:2], tokens(pool)[2:]) == ([[8, 5], [9, 5]], [[3, 5]])
            if batch > 2:
                assert tokens(pool, "v") == [[0, 5], [1, 5], [2, 5]]  # oldest first, as in the source
            before = contents(other)
            assert copy_into(pool).failures == 0
            assert contents(other) == before
            assert pool.verify() == []


def read_all(pool: ExperiencePool) -> list[tuple[Any, ...]]:
    found = pool.failures(["t", "u"])
    return [(s.trajectory.id, s.entropy, s.version, s.step) for own in found.values() for s in own]


def test_the_queries_that_show_a_pool_show_failures_apart(path: Path) -> None:
    with ExperiencePool(path, KEEP) as pool:
        pool.observe([solved("t", 2, 4), solved("u", 0, 1)], 0)
        with browse.reading(path) as db:
            assert [line.key for line in browse.lines(db)] == [2, 1]
            assert [line.key for line in browse.lines(db, failures=True)] == [-3, -2, -1]
            assert [line.key for line in browse.lines(db, "t", 1, failures=True)] == [-2]
            found, success = browse.entry(db, -3), browse.entry(db, 1)
            assert found is not None
            assert success is not None
            assert (found.task.id, found.stored.trajectory.score.value) == ("u", 0.0)
            assert success.stored.trajectory.score.value == 1.0
            assert browse.entry(db, -4) is None
            given: dict[str, Any] = {"max_age": None, "keep": 1, "retired": False, "settings": KEEP}
            assert browse.prunable(db, **given, keep_failures=1) == {"capacity": [1], "newer": [-1]}
            assert browse.prunable(db, **given, source="own") == {"source": [-3, -2, -1, 1, 2]}


def test_restarted_groups_store_no_failures(path: Path) -> None:
    from gleanrl.experience.replay.curriculum import ReplayCurriculum
    from tests.experience.replay_world import Stream, trajectory

    with ExperiencePool(path, KEEP) as pool:
        curriculum = ReplayCurriculum(Stream(["t"], 4), pool, KEEP, total_batches=1, group=4, seed=1)
        start = trajectory("t", 1).segments[0][:2]
        members = tuple(trajectory("t", 5 + number, 0.0) for number in range(4))
        curriculum.observe([Group(GroupSpec(task("t"), 4, start=start), members, 0)], {})
        assert pool.stats()["failures"] == 0
        curriculum.observe([Group(GroupSpec(task("t"), 4), members, 0)], {})
        assert pool.stats()["failures"] == 2


def test_a_new_run_counts_ages_from_the_newest_version_of_failures_too(path: Path) -> None:
    with ExperiencePool(path, KEEP) as pool:
        pool.add(task("t"), episode("t"), step=3, version=3)
        pool.add_failures([Incoming(task("t"), episode("t", 0.0, (9, 5)), step=490, version=490)])
        pool.start_run()
        assert [stored.version for stored in pool.failures(["t"])["t"]] == [0]
        assert [stored.version for stored in pool.stored(["t"])["t"]] == [-487]


def test_a_failure_that_is_refused_adds_no_task(path: Path) -> None:
    with ExperiencePool(path, KEEP, vocabulary=10) as pool:
        assert pool.add_failures([Incoming(task("t"), episode("t", 0.0, (99, 5)))]) == [False]
        assert pool.stats()["tasks"] == 0


def test_copied_failures_keep_their_order_where_a_transaction_ends(path: Path, tmp_path: Path) -> None:
    with ExperiencePool(path, KEEP) as source:
        source.observe([group("alone", [episode("alone", 0.0, (4, 5)), episode("alone", 1.0, (5, 5))])], 0)
        pairs = [[episode(f"t{i}", 0.0, (4, 5)), episode(f"t{i}", 0.0, (6, 5))] for i in range(transfer.BATCH // 2 + 5)]
        source.observe([group(own[0].task_id, own) for own in pairs], 0)
        with ExperiencePool(tmp_path / "copy.sqlite", KEEP) as copied:
            transfer.seed_from_pool(copied, path, failures=True)
            for own in pairs:
                assert tokens(copied, own[0].task_id) == tokens(source, own[0].task_id)
