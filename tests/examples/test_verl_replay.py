"""Tests of `examples/verl_replay.py`: the rows that it adds to verl's batches, with verl's own advantages and loss."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.experience import ExperiencePool

pytest.importorskip("verl", reason="verl is not installed")

EXAMPLES = Path(__file__).parents[2] / "examples"
MEMBERS = 4


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("verl_replay")


@pytest.fixture
def world(example: Any) -> Any:
    """A model, its tokenizer and two tasks."""
    words = importlib.import_module("words")
    tasks = words.word_tasks(2, length=4, seed=0)
    return *words.warm_started(tasks, steps=2, seed=0), {task.id: task for task in tasks}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ExperiencePool]:
    with ExperiencePool(tmp_path / "pool.sqlite") as opened:
        yield opened


def rolled_out(example: Any, world: Any, scores: tuple[float, ...] = (0.0, 1.0, 0.0, 0.0)) -> Any:
    """A batch as verl's `fit` has it before the update; each prompt's members get ``scores``."""
    model, tokenizer, tasks = world
    batch = example.roll_out(model, tokenizer, list(tasks.values()), MEMBERS)
    mask = batch.batch["response_mask"]
    rewards = torch.zeros_like(mask, dtype=torch.float32)
    rewards[torch.arange(len(mask)), mask.sum(-1) - 1] = torch.tensor(scores * 2)
    batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = rewards
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    batch.batch["advantages"], _ = example.core_algos.compute_grpo_outcome_advantage(
        rewards, mask, batch.non_tensor_batch["task_id"]
    )
    return batch


def by_row(batch: Any, key: str) -> list[list[float]]:
    """Return, for each row, the values of its sampled tokens."""
    rows = zip(batch.batch[key], batch.batch["response_mask"], strict=True)
    return [values[mask.bool()].tolist() for values, mask in rows]


def test_a_stored_success_is_added_with_its_recorded_tokens_and_log_probs(
    example: Any, world: Any, pool: ExperiencePool
) -> None:
    model, tokenizer, tasks = world
    first = rolled_out(example, world)
    _, none = example.with_experience(first, pool, tasks, step=0, pad_token=tokenizer.pad_token_id)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    second = rolled_out(example, world)
    mixed, stored = example.with_experience(second, pool, tasks, step=1, pad_token=tokenizer.pad_token_id)
    assert (none, stored) == (0, 2)
    names = sorted(tasks)  # the batch is ordered by task
    assert mixed.non_tensor_batch["task_id"].tolist() == [name for name in names for _ in range(MEMBERS + 1)]
    for name in names:
        [before], [now], [rows] = (
            [np.flatnonzero(batch.non_tensor_batch["task_id"] == name)] for batch in (first, second, mixed)
        )
        for key in ("responses", "rollout_log_probs", "old_log_probs"):
            found = by_row(mixed, key)
            assert [found[i] for i in rows[:-1]] == [by_row(second, key)[i] for i in now]
            assert found[rows[-1]] == by_row(first, key)[before[1]]
        assert torch.equal(mixed.batch["prompts"][rows[-1]], first.batch["prompts"][before[1]])
    gap = (example.logprobs(model, mixed) - mixed.batch["old_log_probs"]).abs() * mixed.batch["response_mask"]
    assert gap.amax(-1)[[0, 1, 2, 3, 5, 6, 7, 8]].max() < 1e-4
    assert gap.amax(-1)[[4, 9]].min() > 1e-3


def test_fresh_advantages_are_verl_s_and_a_stored_success_uses_the_fresh_baseline(
    example: Any, world: Any, pool: ExperiencePool
) -> None:
    _, tokenizer, tasks = world
    for step in range(2):
        batch = rolled_out(example, world)
        mixed, _ = example.with_experience(batch, pool, tasks, step=step, pad_token=tokenizer.pad_token_id)
    ours = np.array([row[0] for row in by_row(mixed, "advantages")]).reshape(2, MEMBERS + 1)
    theirs = np.array([row[0] for row in by_row(batch, "advantages")]).reshape(2, MEMBERS)
    np.testing.assert_allclose(ours[:, :-1], theirs, rtol=1e-4)
    np.testing.assert_allclose(ours[:, -1], 0.75 / 0.5, rtol=1e-4)  # 0.5: standard deviation of the fresh rewards


def test_a_stored_success_changes_the_weights_where_all_fresh_rollouts_fail(
    example: Any, world: Any, pool: ExperiencePool
) -> None:
    model, tokenizer, tasks = world
    example.with_experience(rolled_out(example, world), pool, tasks, step=0, pad_token=tokenizer.pad_token_id)
    failed = rolled_out(example, world, (0.0,) * MEMBERS)
    mixed, _ = example.with_experience(failed, pool, tasks, step=1, pad_token=tokenizer.pad_token_id)
    assert not any(map(any, by_row(failed, "advantages")))
    ours = [row[0] for row in by_row(mixed, "advantages")]
    assert ours == pytest.approx([0.0, 0.0, 0.0, 0.0, 1.0] * 2, rel=1e-5)
    before = [parameter.clone() for parameter in model.parameters()]
    example.update_actor(model, torch.optim.SGD(model.parameters(), lr=0.1), mixed)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
