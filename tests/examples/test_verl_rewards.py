"""Tests of `examples/verl_rewards.py`: verl's reward functions share one agent, called from threads and by verl."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.utils.errors import UserError

EXAMPLES = Path(__file__).parents[2] / "examples"
LINE = re.compile(r"(\w+), (\w+): (\d+) responses in \d+\.\d s, (\d+) at once, success (\d\.\d\d), (\d+) not scored")
SIZES = SimpleNamespace(prompts=6, members=4, seed=0)


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("verl_rewards")


@pytest.fixture
def service(example: Any) -> Iterator[Any]:
    with importlib.import_module("judge_service").judge(latency=(0.0, 0.1), refused=0.2) as judge:
        yield judge
        example._agents.pop(judge.url).close()


def right(row: dict[str, Any]) -> float:
    return float(row["solution_str"] == row["ground_truth"])


def test_the_sync_and_the_async_function_score_each_response_with_one_agent(example: Any, service: Any) -> None:
    rows = example.rows(SIZES)
    options = {"url": service.url, "missing": "nan", "cache": 0}
    with ThreadPoolExecutor(16) as threads:
        told = list(threads.map(lambda row: example.compute_score(**row, **options), rows))

    async def awaited() -> list[dict[str, float]]:
        return await asyncio.gather(*(example.compute_score_async(**row, **options) for row in rows))

    again = asyncio.run(awaited())
    assert [each["score"] for each in told if each["scored"]] == [
        right(row) for row, each in zip(rows, told, strict=True) if each["scored"]
    ]
    assert all(math.isnan(each["score"]) for each in told if not each["scored"])
    assert 0 < sum(each["scored"] for each in told) < len(rows)
    assert [each["scored"] for each in again] == [each["scored"] for each in told]
    assert service.answered + service.refusals == 2 * len(rows)
    assert list(example._agents) == [service.url]


def test_a_missing_score_raises_or_is_nan_and_is_never_zero(example: Any, service: Any) -> None:
    service.refused = 1.0
    row = example.rows(SIZES)[0]
    with pytest.raises(UserError, match="no opinion on this one"):
        example.compute_score(**row, url=service.url)
    with pytest.raises(UserError, match="no opinion on this one"):
        asyncio.run(example.compute_score_async(**row, url=service.url))
    told = example.compute_score(**row, url=service.url, missing="nan")
    assert math.isnan(told["score"])
    assert told["scored"] == 0.0


def batch_of(scores: list[float], lengths: list[int], uids: list[str]) -> Any:
    """The parts of a `DataProto` that `neutral` reads; each score is on the last token of its response."""
    mask = (torch.arange(4) < torch.tensor(lengths)[:, None]).long()
    rewards = torch.zeros(len(scores), 4)
    rewards[torch.arange(len(scores)), torch.tensor(lengths) - 1] = torch.tensor(scores)
    tensors = {"token_level_scores": rewards, "response_mask": mask}
    return SimpleNamespace(batch=tensors, non_tensor_batch={"uid": np.array(uids, object)})


def test_neutral_masks_rows_without_a_score_and_gives_them_the_group_mean(example: Any) -> None:
    nan = math.nan
    batch = batch_of([1.0, 0.0, nan, 0.5, nan, nan, nan, 1.0], [4, 3, 2, 1, 4, 4, 3, 2], list("ababcabb"))
    before = batch.batch["response_mask"].clone()
    assert example.neutral(batch) == 4
    totals = batch.batch["token_level_scores"].sum(-1)
    # Group a has the score 1 and two missing, b has 0, 0.5, 1 and one missing, and c has no score.
    assert totals.tolist() == [1.0, 0.0, 1.0, 0.5, 0.0, 1.0, 0.5, 1.0]
    missing = torch.tensor([False, False, True, False, True, True, True, False])
    assert not batch.batch["response_mask"][missing].any()
    assert torch.equal(batch.batch["response_mask"][~missing], before[~missing])
    clean = batch_of([1.0, 0.0], [2, 3], ["a", "a"])
    kept = {key: value.clone() for key, value in clean.batch.items()}
    assert example.neutral(clean) == 0
    assert all(torch.equal(clean.batch[key], kept[key]) for key in kept)


def test_verl_gives_neutral_rows_no_advantage_and_leaves_other_advantages_unchanged(example: Any) -> None:
    pytest.importorskip("verl", reason="verl is not installed")
    from verl import DataProto
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    uids = np.array(list("aaaa"), object)
    made = batch_of([1.0, 0.0, math.nan, 0.5], [4, 3, 2, 1], list(uids))
    batch = DataProto.from_dict(made.batch, non_tensors={"uid": uids})
    example.neutral(batch)
    rewards, mask = batch.batch["token_level_scores"], batch.batch["response_mask"]
    got, _ = compute_grpo_outcome_advantage(rewards, mask, uids, norm_adv_by_std_in_grpo=False)
    others = [0, 1, 3]
    alone, _ = compute_grpo_outcome_advantage(
        rewards[others], mask[others], uids[others], norm_adv_by_std_in_grpo=False
    )
    assert torch.equal(got[others], alone)
    assert not got[2].any()


@pytest.mark.heavy
def test_the_example_runs_and_the_async_function_scores_the_whole_batch_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "verl_rewards.py")],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr
    found = [match.groups() for line in done.stdout.splitlines() if (match := LINE.fullmatch(line))]
    by = "verl" if importlib.util.find_spec("verl") else "threads"
    assert [(who, name, count) for who, name, count, *_ in found] == [
        (by, "compute_score", "64"),
        (by, "compute_score_async", "64"),
    ]
    assert len({rest for *_, success, missing in found for rest in [(success, missing)]}) == 1
    (_, _, _, few, *_), (_, _, _, many, *_) = found
    assert int(many) > 48
    assert int(few) <= min(32, (os.cpu_count() or 1) + 4)
