"""What a run does with its pool: the file it opens, whatever a killed start left there, and the policy's opinion."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gleanrl.batch import Sample
from gleanrl.config import Config
from gleanrl.experience import ExperiencePool
from gleanrl.learners.engine import TokenScores
from gleanrl.runfolder import RunFolder
from gleanrl.runtime import seed
from gleanrl.runtime.replay import opened_pool, policy_opinion, tokenizer_fingerprint
from gleanrl.types import FloatArray, StopReason, Trajectory, Turn
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
