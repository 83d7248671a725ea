"""Tests of `examples/trl_replay.py`: the rows that it adds to TRL's batches, with TRL's own generation and loss."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.experience import ExperiencePool
from gleanrl.utils.errors import UserError

pytest.importorskip("trl", reason="trl is not installed")
from datasets import Dataset
from trl.trainer.grpo_trainer import GRPOTrainer

EXAMPLES = Path(__file__).parents[2] / "examples"
MEMBERS = 4
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("trl_replay")


@pytest.fixture(scope="module")
def warm(example: Any) -> tuple[list[Any], Any, Any]:
    """Two tasks, and a model after a short warm start on them with its tokenizer."""
    words = importlib.import_module("words")
    tasks = words.word_tasks(2, length=4, seed=0)
    return (tasks, *words.warm_started(tasks, steps=2, seed=0))


@pytest.fixture
def make(
    example: Any, warm: tuple[list[Any], Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Make trainers with two prompts, whose completions get the scores of ``pattern`` in turn.

    A trainer records in ``seen`` the batches that TRL alone would train on.
    """
    tasks, model, tokenizer = warm
    model = copy.deepcopy(model)  # because the trainers change it
    theirs = GRPOTrainer._generate_and_score_completions

    def watched(self: Any, inputs: Any) -> Any:
        batch = theirs(self, inputs)
        self.seen.append({key: value.clone() for key, value in batch.items()})
        return batch

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", watched)
    with ExperiencePool(tmp_path / "pool.sqlite") as pool:

        def trainer(pattern: Sequence[float | None] = (0.0, 1.0, 0.0, 0.0), **changes: Any) -> Any:
            scores = cycle(pattern)

            def patterned(completions: Any, **_: Any) -> list[float | None]:
                return [next(scores) for _ in completions]

            args = example.argparse.Namespace(seed=0, steps=2, members=MEMBERS, prompts=2, lr=1e-3)
            settings = example.settings(args, str(tmp_path))
            for name, value in changes.items():
                setattr(settings, name, value)
            data = [{"id": task.id, "prompt": list(task.prompt), **task.payload} for task in tasks]
            made = example.ReplayTrainer(
                model=model,
                processing_class=tokenizer,
                reward_funcs=[patterned],
                train_dataset=Dataset.from_list(data),
                args=settings,
                pool=pool,
            )
            made.seen, made.rows = [], [row for row in data for _ in range(MEMBERS)]
            made.model.train()
            return made

        yield trainer


def sequences(batch: dict[str, torch.Tensor], ids: str, mask: str) -> list[list[int]]:
    """Return the tokens of each row without padding."""
    return [row[keep.bool()].tolist() for row, keep in zip(batch[ids], batch[mask], strict=True)]


def trained_advantages(batch: dict[str, torch.Tensor]) -> list[set[float]]:
    """Return, for each row, the advantages of its trained tokens."""
    return [set(row[mask.bool()].tolist()) for row, mask in zip(batch["advantages"], batch["tool_mask"], strict=True)]


def test_fresh_rows_are_unchanged_and_each_prompt_gets_a_stored_success(make: Make) -> None:
    trainer = make()
    first = trainer._generate_and_score_completions(trainer.rows)
    assert len(first["completion_ids"]) == 2 * MEMBERS  # nothing was stored yet
    second = trainer._generate_and_score_completions(trainer.rows)
    theirs = trainer.seen[1]
    assert len(second["completion_ids"]) == 2 * (MEMBERS + 1)
    fresh = [0, 1, 2, 3, 5, 6, 7, 8]
    for ids, mask in (("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask")):
        assert [sequences(second, ids, mask)[i] for i in fresh] == sequences(theirs, ids, mask)
        stored = [sequences(first, ids, mask)[i] for i in (1, MEMBERS + 1)]  # each prompt's success
        assert [sequences(second, ids, mask)[i] for i in (4, 9)] == stored
    for row, kept in ((4, 1), (9, MEMBERS + 1)):
        sampled, recorded = second["tool_mask"][row].bool(), first["tool_mask"][kept].bool()
        assert torch.equal(second["old_per_token_logps"][row][sampled], first["old_per_token_logps"][kept][recorded])
    assert second["num_items_in_batch"] == sum(map(len, sequences(second, "completion_ids", "completion_mask")))


def test_fresh_advantages_are_trl_s_and_a_stored_success_uses_the_fresh_baseline(make: Make) -> None:
    trainer = make()
    for _ in range(2):
        batch = trainer._generate_and_score_completions(trainer.rows)
    theirs = trainer.seen[1]["advantages"].tolist()
    assert trained_advantages(batch) == [{theirs[i]} for i in range(4)] + [{0.75}] + [
        {theirs[i]} for i in range(4, 8)
    ] + [{0.75}]


def test_stored_rows_keep_their_sampling_log_probs_and_the_loss_uses_them_in_its_ratio(make: Make) -> None:
    trainer = make()
    trainer._generate_and_score_completions(trainer.rows)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.02)
    batch = trainer._generate_and_score_completions(trainer.rows)
    inputs = [torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], 1) for kind in ("ids", "mask")]
    width = batch["prompt_ids"].shape[1]
    logits = trainer.model(inputs[0], attention_mask=inputs[1]).logits[:, width - 1 : -1].log_softmax(-1)
    now = logits.gather(-1, batch["completion_ids"][..., None])[..., 0]
    mask = batch["tool_mask"].bool()
    gap = ((now - batch["old_per_token_logps"]).abs() * mask).amax(-1)
    stored = torch.tensor([4, 9])
    fresh = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8])
    assert gap[fresh].max() < 1e-4
    assert gap[stored].min() > 1e-3
    ratio = (now - batch["old_per_token_logps"]).exp()
    terms = torch.minimum(ratio * batch["advantages"], ratio.clamp(0.8, 2.0) * batch["advantages"])
    loss = -(terms * mask).sum() / mask.sum()
    trainer.current_gradient_accumulation_steps = 1
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), loss, rtol=1e-4, atol=1e-5)


def test_completions_without_a_score_enter_neither_baseline_nor_pool(make: Make) -> None:
    trainer = make([1.0, None, 0.0, None])
    batch = trainer._generate_and_score_completions(trainer.rows)
    assert trained_advantages(batch) == [{0.5}, {-0.5}, {0.5}, {-0.5}]
    assert trainer.pool.stats()["trajectories"] == 2
    nothing = make([None])
    assert torch.equal(
        nothing._generate_and_score_completions(nothing.rows)["completion_ids"], nothing.seen[-1]["completion_ids"]
    )


def test_the_batch_is_padded_so_that_trl_can_divide_it_without_losing_rows(make: Make) -> None:
    trainer = make(per_device_train_batch_size=2, steps_per_generation=4, gradient_accumulation_steps=4)
    for _ in range(2):
        batch = trainer._generate_and_score_completions(trainer.rows)
    assert len(batch["completion_ids"]) == 12  # 10 rows, and 2 without a trained token
    assert batch["tool_mask"][:10].any(-1).all()
    assert not batch["tool_mask"][10:].any()
    assert batch["num_items_in_batch"] == batch["tool_mask"].sum()


def test_a_stored_success_alone_changes_the_weights(make: Make) -> None:
    """All fresh completions fail, so that TRL alone would leave the weights unchanged."""
    trainer = make([0.0, 1.0, *[0.0] * 1000])
    trainer._generate_and_score_completions(trainer.rows)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert all(not batch["advantages"].any() for batch in trainer.seen[1:])
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))


def test_evaluation_does_not_change_the_pool(make: Make) -> None:
    trainer = make()
    trainer.model.eval()
    trainer._generate_and_score_completions(trainer.rows)
    assert trainer.pool.stats()["tasks"] == 0


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"beta": 0.1}, "set beta = 0"),
        ({"loss_type": "grpo"}, "loss_type"),
        ({"scale_rewards": "group"}, "scale_rewards"),
        ({"top_p": 0.9}, "whole vocabulary"),
    ],
)
def test_unsupported_trl_settings_are_refused(make: Make, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        make(**changes)


def test_stored_trajectories_have_their_text_tokens_version_and_temperature(make: Make) -> None:
    trainer = make()
    batch = trainer._generate_and_score_completions(trainer.rows)
    name = trainer.rows[0]["id"]
    [stored] = trainer.pool.stored([name])[name]
    prompt, answer = stored.trajectory.turns()
    assert answer.message["content"] == trainer._tokenizer.decode(answer.tokens.tolist())
    assert np.array_equal(prompt.tokens, sequences(batch, "prompt_ids", "prompt_mask")[0])
    assert (stored.version, stored.temperature) == (0, 1.0)
