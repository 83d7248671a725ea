"""Tests of ``open_pool``: which state of the experience pool a started or resumed run begins with.

The cases are pools of earlier runs, seeded pools, and those that a killed start of the same run has changed.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gleanrl.config.settings import Config
from gleanrl.experience import ExperiencePool
from gleanrl.runtime import experience
from gleanrl.runtime.experience import check_policy, open_pool
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.types import Task
from gleanrl.utils.errors import UserError
from tests.experience.pool_world import contents, episode, solved, task


class Tokenizer:
    chat_template = "{{ messages }}"
    backend_tokenizer = SimpleNamespace(to_str=lambda: "words")

    def __len__(self) -> int:
        return 100


def configured(**replay: Any) -> Config:
    return Config.model_validate({"replay": {"enabled": True, **replay}})


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The pool of an earlier run, with marks and with a trajectory that was added after the last mark."""
    path = tmp_path / "earlier.sqlite"
    with open_pool(configured(path=str(path)), RunFolder(tmp_path / "old"), Tokenizer(), resume=False) as pool:
        assert pool is not None
        for step in range(3):
            pool.mark()
            pool.observe([solved(f"t{step}", 2, 4, first=10 * step)], 0)
    return path


def started(config: Config, folder: RunFolder, *, resume: bool, newest: int = -1, step: int = 9) -> None:
    """Start a run that reaches a step and ends before its first checkpoint."""
    with open_pool(config, folder, Tokenizer(), resume=resume, newest=newest) as pool:
        assert pool is not None
        pool.mark()
        pool.observe([solved("new", 1, 4, first=10 * step)], step)


def test_resuming_a_killed_start_undoes_its_changes_to_an_earlier_run_s_pool(tmp_path: Path, earlier: Path) -> None:
    config, folder = configured(path=str(earlier)), RunFolder(tmp_path / "run")
    with open_pool(config, folder, Tokenizer(), resume=False) as pool:
        assert pool is not None
        before = contents(earlier)
        pool.mark()
        pool.observe([solved("new", 1, 4, first=90)], 9)
    assert contents(earlier) != before
    for _ in range(2):
        with open_pool(config, folder, Tokenizer(), resume=True) as pool:
            assert pool is not None
            assert contents(earlier) == before
            pool.observe([solved("new", 3, 4)], 7)


def test_a_new_run_uses_a_shared_pool_with_the_changes_of_a_killed_run(tmp_path: Path, earlier: Path) -> None:
    """Only a resume of the killed run undoes its changes; a new run of the same name uses the pool as it is."""
    config, folder = configured(path=str(earlier)), RunFolder(tmp_path / "run")
    started(config, folder, resume=False)
    with open_pool(config, folder, Tokenizer(), resume=False) as pool:
        assert pool is not None
        assert pool.rates(["new", "t0"]) == {"new": 0.25, "t0": 0.5}
        assert pool.stats()["trajectories"] == 7
    own = configured()
    started(own, folder, resume=False)
    with open_pool(own, folder, Tokenizer(), resume=False) as pool:
        assert pool is not None
        assert pool.stats()["trajectories"] == 0  # the run's own pool begins empty again


def test_a_resumed_run_with_a_checkpoint_keeps_its_pool_and_is_not_seeded_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    started(configured(), folder, resume=False)
    before = contents(folder.experience_path)
    with open_pool(configured(seed_from="nowhere"), folder, Tokenizer(), resume=True, newest=2, uses_pool=True):
        assert contents(folder.experience_path) == before


def test_a_seeding_that_was_killed_is_repeated_from_the_beginning(
    tmp_path: Path, earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = configured(seed_from=str(earlier)), RunFolder(tmp_path / "run")

    def killed(pool: ExperiencePool, source: str, **_: Any) -> None:
        pool.add(task("t0"), episode("t0", tokens=(0, 5)))
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(experience, "seed_pool", killed)
        with pytest.raises(SystemExit), open_pool(config, folder, Tokenizer(), resume=False):
            pass
    with open_pool(config, folder, Tokenizer(), resume=True) as pool:
        assert pool is not None
        assert pool.stats()["trajectories"] == 6
        assert pool.buckets() == {(2, 4): 3}


def asks(name: str, text: str) -> Task:
    return replace(task(name), prompt=({"role": "user", "content": text},))


@pytest.mark.parametrize("how", ["path", "seed_from"])
def test_only_training_tasks_whose_prompt_has_not_changed_are_drawn(
    tmp_path: Path, earlier: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, tasks = configured(**{how: str(earlier)}), [asks("t0", "in French"), task("t1")]
    with open_pool(config, RunFolder(tmp_path / "run"), Tokenizer(), resume=False) as pool:
        assert pool is not None
        pool.set_tasks(tasks)
        assert {name: len(own) for name, own in pool.stored(["t0", "t1", "t2"]).items()} == {"t0": 0, "t1": 2, "t2": 2}
        assert [drawn.task.id for drawn in pool.draw((2, 4), 9, np.random.default_rng(0))] == ["t1"]
        assert sum("t0 is the first) differ" in line for line in caplog.messages) == 1
        assert sum("t2" in line for line in caplog.messages) == 1
        assert pool.observe([], 0)["pool/outside"] == 1


def test_a_pool_of_an_unknown_tokenizer_needs_trust_tokenizer(tmp_path: Path) -> None:
    with ExperiencePool(tmp_path / "verl.sqlite") as pool:
        pool.observe([solved("t", 2, 4)], 0)
    for how in ("path", "seed_from"):
        given = {how: str(tmp_path / "verl.sqlite")}
        with (
            pytest.raises(UserError, match=r"replay\.trust_tokenizer = true"),
            open_pool(configured(**given), RunFolder(tmp_path / how), Tokenizer(), resume=False),
        ):
            pass
    for how in ("seed_from", "path"):
        config = configured(**{how: str(tmp_path / "verl.sqlite")}, trust_tokenizer=True)
        with open_pool(config, RunFolder(tmp_path / f"{how} on trust"), Tokenizer(), resume=False) as pool:
            assert pool is not None
            assert len(pool.stored(["t"])["t"]) == 2


def test_trajectories_longer_than_the_model_s_context_are_evicted(tmp_path: Path, earlier: Path) -> None:
    config = configured(path=str(earlier))
    for context, left in ((5, 2), (4, 0)):  # the trajectories have 3 context tokens and 2 sampled ones
        with open_pool(
            config, RunFolder(tmp_path / str(context)), Tokenizer(), resume=False, max_context=context
        ) as pool:
            assert pool is not None
            assert len(pool.stored(["t1"])["t1"]) == left


def test_a_resumed_run_refuses_to_undo_later_changes_of_another_run(tmp_path: Path, earlier: Path) -> None:
    def opened(name: str, path: Path, *, resume: bool) -> Any:
        config = Config.model_validate({"run": {"name": name}, "replay": {"enabled": True, "path": str(path)}})
        newest: dict[str, Any] = {"newest": 2, "uses_pool": True} if resume and name == "a" else {}
        return open_pool(config, RunFolder(tmp_path / name), Tokenizer(), resume=resume, **newest)

    with opened("a", earlier, resume=False) as pool:
        pool.observe([solved("mine", 2, 4)], 3)
        mark = pool.mark()
        pool.observe([solved("later", 2, 4)], 4)
    with opened("a", earlier, resume=True) as pool:
        pool.mark()
        pool.rewind(mark)  # only the run's own changes came after the mark
    with opened("b", earlier, resume=False) as pool:
        pool.observe([solved("theirs", 2, 4)], 5)
    before = contents(earlier)
    with opened("a", earlier, resume=True) as pool, pytest.raises(UserError, match=r"another run \(b \w+\) has used"):
        pool.rewind(mark)
    assert contents(earlier) == before
    copy = tmp_path / "copy.sqlite"
    shutil.copyfile(earlier, copy)
    for _ in range(2):  # in a copy no other run's work is lost, however often it is resumed
        with opened("a", copy, resume=True) as pool:
            pool.rewind(mark)
            assert (pool.rates(["mine", "theirs"]), pool.mark() > mark) == ({"mine": 0.5}, True)
    with opened("b", earlier, resume=True) as pool:
        assert pool.rates(["mine", "theirs"]) == {"mine": 0.5}  # run b has no checkpoint and starts from the beginning


def test_a_killed_start_is_not_undone_after_another_run_used_the_pool(tmp_path: Path, earlier: Path) -> None:
    config = configured(path=str(earlier))
    started(config, RunFolder(tmp_path / "a"), resume=False)
    started(config, RunFolder(tmp_path / "b"), resume=False, step=11)
    before = contents(earlier)
    with (
        pytest.raises(UserError, match="another run"),
        open_pool(config, RunFolder(tmp_path / "a"), Tokenizer(), resume=True),
    ):
        pass
    assert contents(earlier) == before


def test_a_pool_that_a_resumed_run_uses_first_is_prepared_as_at_the_start_of_a_run(
    tmp_path: Path, earlier: Path
) -> None:
    """Replay is turned on at step 4, by starts that are killed. Then the checkpoint of step 4 is found damaged."""
    config, folder, before = configured(path=str(earlier)), RunFolder(tmp_path / "run"), contents(earlier)
    prepared = {}
    for step in (4, 4, 2, 2):
        with open_pool(config, folder, Tokenizer(), resume=True, newest=step) as pool:
            assert pool is not None
            assert {own[-1].version for own in pool.stored(["t0", "t1", "t2"]).values()} == {step}
            assert prepared.setdefault(step, contents(earlier)) == contents(earlier) != before
            mark = pool.mark()
            pool.observe([solved("t1", 1, 4, first=90)], 5)
            kept = pool.mark()
    after = contents(earlier)
    with open_pool(config, folder, Tokenizer(), resume=True, newest=4, uses_pool=True) as pool:
        assert pool is not None
        assert contents(earlier) == after
        pool.rewind(kept)
        pool.rewind(mark)


def test_a_pool_that_is_used_again_after_replay_was_off_is_rewound_and_shifted_only_if_another_run_used_it(
    tmp_path: Path,
) -> None:
    """Replay was on up to step 2, and is turned on again at step 6 and at step 9, by starts that are killed."""
    path = tmp_path / "shared.sqlite"
    config, folder = configured(path=str(path)), RunFolder(tmp_path / "run")
    started(config, folder, resume=False, step=2)
    before = contents(path)
    for _ in range(2):
        with open_pool(config, folder, Tokenizer(), resume=True, newest=6) as pool:
            assert pool is not None
            assert contents(path) == before
            pool.observe([solved("t1", 1, 4, first=90)], 6)
    started(config, RunFolder(tmp_path / "other"), resume=False, step=5)
    for _ in range(2):
        with open_pool(config, folder, Tokenizer(), resume=True, newest=9) as pool:
            assert pool is not None
            assert pool.sources().keys() == {"earlier"}
            [stored] = pool.stored(["new"])["new"][-1:]
            assert stored.version == 9 - 5  # version 0 at the other run's step 5, which is step 9 here
            pool.observe([solved("t2", 1, 4, first=130)], 9)


@pytest.mark.parametrize(("log_ratio", "warned"), [(-2.0, True), (-0.3, False), (1.0, False)])
def test_a_pool_whose_trajectories_are_improbable_under_the_model_is_reported(
    earlier: Path, log_ratio: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def estimate(trajectories: Any) -> list[tuple[float, float]]:
        assert len(trajectories) == 3  # one of each task
        return [(1.0, log_ratio) for _ in trajectories]

    with ExperiencePool(earlier) as pool:
        asyncio.run(check_policy(pool, estimate))
    assert any(str(earlier) in line and "0.14" in line for line in caplog.messages) == warned


def test_the_check_of_a_pool_s_policy_reads_a_limited_number_of_tokens(tmp_path: Path) -> None:
    asked: list[int] = []

    async def estimate(trajectories: Any) -> list[tuple[float, float]]:
        asked.append(sum(each.total_tokens for each in trajectories))
        return [(1.0, 0.0) for _ in trajectories]

    for length in (30_000, 100_000):
        with ExperiencePool(tmp_path / f"{length}.sqlite") as pool:
            for name in ("a", "b", "c"):
                pool.add(task(name), episode(name, tokens=[7] * length))
            asyncio.run(check_policy(pool, estimate))
    assert asked == [2 * 30_003, 100_003]


def test_no_pool_is_opened_where_replay_is_off(tmp_path: Path) -> None:
    with open_pool(configured(enabled=False), RunFolder(tmp_path), Tokenizer(), resume=False) as pool:
        assert pool is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_goes_back_only_to_its_own_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs r and x set marks of the same numbers, in pools of their own, then in one file under two spellings."""
    monkeypatch.chdir(tmp_path)

    def opened(name: str, path: str, *, newest: int | None = None) -> Any:
        config = Config.model_validate({"run": {"name": name}, "replay": {"enabled": True, "path": path}})
        resumed: dict[str, Any] = {"resume": newest is not None, "uses_pool": bool(newest), "newest": newest or -1}
        return open_pool(config, RunFolder(tmp_path / name), Tokenizer(), **resumed)

    marks = {}
    for name in ("r", "x"):
        with opened(name, f"{name}.sqlite") as pool:
            pool.observe([solved(name, 1, 4)], 0)
            marks[name] = pool.mark()
            pool.observe([solved(f"{name} later", 1, 4)], 1)
    theirs = contents(tmp_path / "x.sqlite")
    with opened("r", "x.sqlite", newest=1) as pool, pytest.raises(UserError, match="no mark"):
        pool.rewind(marks["r"])
    assert contents(tmp_path / "x.sqlite") == theirs
    with opened("x", "r.sqlite", newest=0) as pool:  # killed before its first checkpoint: it begins to use that pool
        assert pool.rates(["r", "r later"]) == {"r": 0.25, "r later": 0.25}
    for spelling in ("r.sqlite", "./r.sqlite", str(tmp_path / "r.sqlite")):
        with opened("r", spelling, newest=1) as pool, pytest.raises(UserError, match="another run"):
            pool.rewind(marks["r"])
    shutil.copyfile("r.sqlite", "copy.sqlite")
    with opened("r", "copy.sqlite", newest=1) as pool:
        pool.rewind(marks["r"])
        assert pool.rates(["r", "r later"]) == {"r": 0.25}
    with opened("x", "copy.sqlite") as pool:
        pool.observe([solved("x", 1, 4)], 0)
    with opened("r", "./copy.sqlite", newest=1) as pool, pytest.raises(UserError, match="another run"):
        pool.rewind(marks["r"])  # the copy is the run's own pool by now
