"""What a run does with its pool: the file it opens, whatever a killed start left there, and the policy's opinion."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gleanrl.algorithms.batch import Batch, Sample, build
from gleanrl.config.loading import Config
from gleanrl.config.settings import CreditSettings, LossSettings, ScheduleSettings
from gleanrl.experience import ExperiencePool
from gleanrl.experience.pool import import_ as seed
from gleanrl.learners.engine import TokenScores
from gleanrl.runtime.prepare import tokenizer_fingerprint
from gleanrl.runtime.replay import START_FILE, PractisingLearner, opened_pool, policy_opinion
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.types import FloatArray, Group, Score, StopReason, Task, Trajectory, Turn
from gleanrl.utils.errors import UserError
from tests.experience.pool_world import contents, episode, group, solved, task


class Tokenizer:
    chat_template = "{{ messages }}"
    backend_tokenizer = SimpleNamespace(to_str=lambda: "words")

    def __len__(self) -> int:
        return 100


def configured(**replay: Any) -> Config:
    return Config.model_validate({"replay": {"enabled": True, **replay}})


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A pool that another run left, with marks of its own and something after the last."""
    path = tmp_path / "earlier.sqlite"
    with opened_pool(configured(path=str(path)), RunFolder(tmp_path / "old"), Tokenizer(), resume=False) as pool:
        assert pool is not None
        for step in range(3):
            pool.mark()
            pool.observe([solved(f"t{step}", 2, 4, first=10 * step)], step)
    return path


def started(config: Config, folder: RunFolder, *, resume: bool, step: int = 9) -> None:
    """A start of a run that comes as far as a step, but to no checkpoint."""
    with opened_pool(config, folder, Tokenizer(), resume=resume) as pool:
        assert pool is not None
        pool.mark()
        pool.observe([solved("new", 1, 4, first=10 * step)], step)


def test_a_start_that_was_killed_leaves_nothing_and_takes_nothing_of_an_earlier_run(
    tmp_path: Path, earlier: Path
) -> None:
    config, folder, before = configured(path=str(earlier)), RunFolder(tmp_path / "run"), contents(earlier)
    started(config, folder, resume=False)
    assert contents(earlier) != before
    for _ in range(2):
        with opened_pool(config, folder, Tokenizer(), resume=True) as pool:
            assert pool is not None
            assert contents(earlier) == before
            pool.observe([solved("new", 3, 4)], 7)


def test_another_run_goes_on_from_what_a_killed_one_left_elsewhere(tmp_path: Path, earlier: Path) -> None:
    """Only the same run may undo it: a new one of the same name finds the pool as it is."""
    config, folder = configured(path=str(earlier)), RunFolder(tmp_path / "run")
    started(config, folder, resume=False)
    after = contents(earlier)
    with opened_pool(config, folder, Tokenizer(), resume=False):
        assert contents(earlier) == after
    own = configured()
    started(own, folder, resume=False)
    with opened_pool(own, folder, Tokenizer(), resume=False) as pool:
        assert pool is not None
        assert pool.stats()["trajectories"] == 0  # in its own folder a start that failed is given again


def test_a_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    config, folder = configured(seed_from="nowhere"), RunFolder(tmp_path)
    folder.checkpoint_path(2).mkdir(parents=True)
    with ExperiencePool(folder.experience_path, tokenizer=tokenizer_fingerprint(Tokenizer())) as pool:
        pool.mark()
        pool.observe([solved("x", 2, 4)], 0)
    before = contents(folder.experience_path)
    with opened_pool(config, folder, Tokenizer(), resume=True):
        assert contents(folder.experience_path) == before


def test_a_seeding_that_was_killed_is_done_again_as_a_whole(
    tmp_path: Path, earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = configured(seed_from=str(earlier)), RunFolder(tmp_path / "run")

    def killed(pool: ExperiencePool, source: str, **_: Any) -> None:
        pool.add(task("t0"), episode("t0", tokens=(0, 5)))
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(seed, "seed_pool", killed)
        with pytest.raises(SystemExit), opened_pool(config, folder, Tokenizer(), resume=False):
            pass
    with opened_pool(config, folder, Tokenizer(), resume=True) as pool:
        assert pool is not None
        assert pool.stats()["trajectories"] == 6
        assert pool.buckets() == {(2, 4): 3}


def asks(name: str, text: str) -> Task:
    return replace(task(name), prompt=({"role": "user", "content": text},))


@pytest.mark.parametrize("how", ["path", "seed_from"])
def test_what_an_earlier_run_asked_otherwise_is_asked_as_this_run_does(
    tmp_path: Path, earlier: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, tasks = configured(**{how: str(earlier)}), [asks("t0", "in French"), task("t1")]
    with opened_pool(config, RunFolder(tmp_path / "run"), Tokenizer(), resume=False, tasks=tasks) as pool:
        assert pool is not None
        assert {name: len(own) for name, own in pool.stored(["t0", "t1", "t2"]).items()} == {"t0": 0, "t1": 2, "t2": 2}
        assert sorted(drawn.task.id for drawn in pool.draw((2, 4), 9, np.random.default_rng(0))) == ["t1", "t2"]
        assert sum("t0 is the first) differ" in line for line in caplog.messages) == 1


def test_a_run_takes_a_pool_of_an_unknown_tokenizer_on_trust_only(tmp_path: Path) -> None:
    with ExperiencePool(tmp_path / "verl.sqlite") as pool:
        pool.observe([solved("t", 2, 4)], 0)
    for how in ("path", "seed_from"):
        given = {how: str(tmp_path / "verl.sqlite")}
        with (
            pytest.raises(UserError, match=r"replay\.trust_tokenizer = true"),
            opened_pool(configured(**given), RunFolder(tmp_path / how), Tokenizer(), resume=False),
        ):
            pass
    for how in ("seed_from", "path"):
        config = configured(**{how: str(tmp_path / "verl.sqlite")}, trust_tokenizer=True)
        with opened_pool(config, RunFolder(tmp_path / f"{how} on trust"), Tokenizer(), resume=False) as pool:
            assert pool is not None
            assert len(pool.stored(["t"])["t"]) == 2


def test_what_is_longer_than_the_models_context_is_evicted(tmp_path: Path, earlier: Path) -> None:
    config = configured(path=str(earlier))
    for context, left in ((5, 2), (4, 0)):  # 3 of context, 2 sampled
        with opened_pool(
            config, RunFolder(tmp_path / str(context)), Tokenizer(), resume=False, max_context=context
        ) as pool:
            assert pool is not None
            assert len(pool.stored(["t1"])["t1"]) == left


def test_a_resumed_run_does_not_undo_what_another_did_with_the_pool_since(tmp_path: Path, earlier: Path) -> None:
    def opened(name: str, path: Path, *, resume: bool) -> Any:
        config = Config.model_validate({"run": {"name": name}, "replay": {"enabled": True, "path": str(path)}})
        return opened_pool(config, RunFolder(tmp_path / name), Tokenizer(), resume=resume)

    with opened("a", earlier, resume=False) as pool:
        pool.observe([solved("mine", 2, 4)], 3)
        mark = pool.mark()
        pool.observe([solved("later", 2, 4)], 4)
    RunFolder(tmp_path / "a").checkpoint_path(2).mkdir(parents=True)
    with opened("a", earlier, resume=True) as pool:
        pool.mark()
        pool.rewind(mark)  # over its own
    with opened("b", earlier, resume=False) as pool:
        pool.observe([solved("theirs", 2, 4)], 5)
    before = contents(earlier)
    with opened("a", earlier, resume=True) as pool, pytest.raises(UserError, match=r"another run \(b \w+\) has used"):
        pool.rewind(mark)
    assert contents(earlier) == before
    copy = tmp_path / "copy.sqlite"
    shutil.copyfile(earlier, copy)
    for _ in range(2):  # given a copy it may, as often as it is resumed
        with opened("a", copy, resume=True) as pool:
            pool.rewind(mark)
            assert (pool.rates(["mine", "theirs"]), pool.mark() > mark) == ({"mine": 0.5}, True)
    with opened("b", earlier, resume=True) as pool:
        assert pool.rates(["mine", "theirs"]) == {"mine": 0.5}  # without a checkpoint it starts anew


def test_a_start_that_was_killed_is_not_undone_over_another_run(tmp_path: Path, earlier: Path) -> None:
    config = configured(path=str(earlier))
    started(config, RunFolder(tmp_path / "a"), resume=False)
    started(config, RunFolder(tmp_path / "b"), resume=False, step=11)
    before = contents(earlier)
    with (
        pytest.raises(UserError, match="another run"),
        opened_pool(config, RunFolder(tmp_path / "a"), Tokenizer(), resume=True),
    ):
        pass
    assert contents(earlier) == before


def test_a_run_from_before_marks_had_owners_is_resumed(tmp_path: Path) -> None:
    config, folder = configured(), RunFolder(tmp_path)
    with ExperiencePool(folder.experience_path, tokenizer=tokenizer_fingerprint(Tokenizer())) as pool:
        first = pool.mark()
        pool.observe([solved("x", 2, 4)], 0)
        pool.mark()
    (tmp_path / START_FILE).write_text(str(first))
    for _ in range(2):
        with opened_pool(config, folder, Tokenizer(), resume=True) as pool:
            assert pool is not None
            assert pool.stats()["trajectories"] == 0
            pool.observe([solved("x", 2, 4)], 0)
            pool.mark()


def test_no_pool_where_replay_is_off(tmp_path: Path) -> None:
    with opened_pool(configured(enabled=False), RunFolder(tmp_path), Tokenizer(), resume=False) as pool:
        assert pool is None
    assert list(tmp_path.iterdir()) == []


def as_floats(values: npt.ArrayLike) -> FloatArray:
    return np.asarray(values, np.float32)


# --- the policy's opinion ---------------------------------------------------------------------------
class Knowing:
    """Gives token ``t`` the entropy ``t`` and a log-prob that is ``t / 100`` above what was recorded."""

    def __init__(self) -> None:
        self.groups: list[set[int]] = []

    async def logprobs(self, samples: Sequence[Sample]) -> list[TokenScores]:
        self.groups.append({sample.group for sample in samples})
        return [TokenScores(s.behaviour + as_floats(s.tokens / 100), as_floats(s.tokens)) for s in samples]


def test_each_trajectory_gets_its_own_opinion_and_a_task_is_one_group() -> None:
    two = episode("a", tokens=(30, 40))
    more = (Turn({"role": "user", "content": "?"}, np.array([9])), *episode("a", tokens=(50,)).segments[0][1:])
    of_two = Trajectory("a/2", "a", (two.segments[0], more), two.score, StopReason.DONE, {})
    asked = [episode("a", tokens=(10, 20)), episode("b", tokens=(70,)), of_two, episode("b", tokens=(80, 90))]
    learner = Knowing()
    told = asyncio.run(policy_opinion(learner, 64)(asked))  # pyright: ignore[reportArgumentType]
    assert [entropy for entropy, _ in told] == pytest.approx([15, 70, 40, 85])
    assert [drift for _, drift in told] == pytest.approx([0.15, 0.7, 0.4, 0.85])
    assert learner.groups == [{0, 1}]


# --- extra updates ----------------------------------------------------------------------------------
class Practised:
    """A learner that has consumed ``step`` steps and notes what it practises."""

    def __init__(self, step: int = 1) -> None:
        self.step = step
        self.practised: list[tuple[Batch, int]] = []

    async def update(self, batch: Batch) -> dict[str, float]:
        return {"tokens/trained": 1.0}

    async def practise(self, batch: Batch, step: int) -> dict[str, float]:
        self.practised.append((batch, step))
        return {"loss/policy": 0.5, "tokens/trained": 2.0, "time/train_s": 9.0}

    @property
    def weights(self) -> list[list[float]]:
        """Of each extra update, of each group, in their order."""
        return [[float(part.samples[0].advantages.max()) for part in batch.parts] for batch, _ in self.practised]


def practise(
    pool: ExperiencePool,
    learner: Practised,
    groups: Sequence[Group] = (),
    *,
    begun: bool = True,
    reverify: Any = None,
    **replay: Any,
) -> dict[str, float]:
    """The metrics of a step of one group, behind whose update the extra ones come."""
    config = configured(**replay).model_copy(update={"schedule": ScheduleSettings(batch=1, group=4)})
    practising = PractisingLearner(
        *(learner, pool, config),  # pyright: ignore[reportArgumentType]
        seed=1,
        max_context=64,
        begun=lambda: begun,
        reverify=reverify,
    )

    async def make(groups: Sequence[Group]) -> Batch:
        return build(groups, CreditSettings(), LossSettings(), 64)

    async def step() -> dict[str, float]:
        batch = await practising.seeing(make)(groups or [solved("now", 1, 4)])
        return dict(await practising.update(batch))

    return asyncio.run(step())


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ExperiencePool]:
    with ExperiencePool(tmp_path / "pool.sqlite") as made:
        yield made


def test_a_task_that_was_never_tried_is_practised_with_its_whole_weight(pool: ExperiencePool) -> None:
    assert pool.add(task("seeded"), episode("seeded"))
    learner = Practised()
    assert practise(pool, learner)["practice/0/trajectories"] == 1
    assert learner.weights == [[1.0]]
    pool.observe([solved("known", 1, 4)], 0)
    practise(pool, learner)
    assert sorted(learner.weights[1]) == [0.75, 1.0]


def test_extra_updates_count_as_uses_and_tell_their_ages_by_the_pool(pool: ExperiencePool) -> None:
    """The age of what another run sampled counts from when it came here."""
    pool.add(task("old"), episode("old", version=70), version=1)
    pool.add(task("new"), episode("new", version=4))
    metrics = practise(pool, Practised(step=6), pool_updates=2)
    assert [s.uses for own in pool.stored(["old", "new"]).values() for s in own] == [2, 2]
    for number in (0, 1):
        ages = (metrics[f"practice/{number}/age_mean"], metrics[f"practice/{number}/age_max"])
        assert ages == (2.5, 4)  # in step 5
        assert metrics[f"practice/{number}/loss/policy"] == 0.5
        assert metrics[f"practice/{number}/tokens/trained"] == 2.0
    assert metrics["tokens/trained"] == 1.0


def test_no_extra_update_before_replay_begins(pool: ExperiencePool) -> None:
    pool.observe([solved("known", 1, 4)], 0)
    for source in ("pool", "batch"):
        learner = Practised()
        assert practise(pool, learner, begun=False, pool_from=source) == {"tokens/trained": 1.0}
        assert not learner.practised
        practise(pool, learner, pool_from=source)
        assert len(learner.practised) == 1


def test_what_an_extra_update_could_not_draw_is_counted_and_its_time_told(
    pool: ExperiencePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.observe([solved(f"t{index}", 1, 4) for index in range(3)], 0)
    with sqlite3.connect(pool.path) as db:
        db.execute("UPDATE blobs SET data = x'00' WHERE id = (SELECT min(id) FROM blobs)")
    now = [0.0]
    for module in ("gleanrl.runtime.replay", "gleanrl.experience.replay.recall"):
        monkeypatch.setattr(f"{module}.perf_counter", lambda: now[0])
    draw, fails = pool.draw, iter([True])

    def slow(*args: Any, **kwargs: Any) -> Any:
        now[0] += 2.0
        return draw(*args, **kwargs)

    async def reverify(task: Task, trajectory: Trajectory) -> Score:
        now[0] += 3.0
        return Score.failed("no answer") if next(fails, False) else trajectory.score

    async def practised(batch: Batch, step: int) -> dict[str, float]:
        now[0] += 5.0
        return {}

    monkeypatch.setattr(pool, "draw", slow)
    learner = Practised()
    learner.practise = practised
    metrics = practise(pool, learner, reverify=reverify)
    told = {name: metrics[f"practice/{name}"] for name in ("missing", "rejected", "too_old", "appraise_failed")}
    assert told == {"missing": 2, "rejected": 0, "too_old": 0, "appraise_failed": 0}  # one damaged, one without score
    assert (metrics["practice/reverified"], metrics["practice/reverify_failed"]) == (2, 1)
    assert metrics["practice/0/trajectories"] == 1
    assert (metrics["time/practice_select_s"], metrics["time/practice_update_s"]) == (6, 5)
    assert metrics["time/practice_plan_s"] >= 2
    assert metrics["time/practice_plan_s"] % 2 == 0


def test_extra_updates_take_nothing_over_max_age(pool: ExperiencePool) -> None:
    pool.observe([solved(f"t{version}", 1, 4, version=version) for version in range(3)], 2)
    metrics = practise(pool, Practised(step=4), max_age=2)  # in step 3
    assert (metrics["practice/0/age_max"], metrics["practice/0/trajectories"], metrics["practice/too_old"]) == (2, 2, 1)


def test_the_steps_own_successes_are_those_that_reach_the_threshold(pool: ExperiencePool) -> None:
    fresh = [episode("t", score, (index, 5)) for index, score in enumerate((0.7, 0.95, 0.6, 0.1))]
    for threshold, weight in ((0.9, 0.75), (0.65, 0.5), (0.5, 0.25)):
        learner = Practised()
        metrics = practise(pool, learner, [group("t", fresh)], pool_from="batch", success_threshold=threshold)
        assert learner.weights == [[weight]]
        assert "practice/0/age_max" not in metrics
    [part] = learner.practised[0][0].parts
    assert {int(sample.tokens[3]) for sample in part.samples} <= {0, 1, 2}
