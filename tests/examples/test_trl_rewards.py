"""Tests of `examples/trl_rewards.py`: the scores that it gives TRL's trainer, mostly from a judge over HTTP."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl.rewards import BlockingRewardAgent, Request
from gleanrl.rewards.http import HttpReward

pytest.importorskip("trl", reason="trl is not installed")
from datasets import Dataset

EXAMPLES = Path(__file__).parents[2] / "examples"
MEMBERS = 4
STEP = re.compile(r"step (\d+): success (?:\d\.\d\d|nan), (\d+) of (\d+) not scored")
LAST = re.compile(r"(\d+) scored by the judge, (\d+) refused, (\d+) at once at most")


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("trl_rewards")


def rows(words: Any, count: int) -> list[dict[str, Any]]:
    tasks = words.word_tasks(count, length=4, seed=0)
    return [{"id": task.id, "prompt": list(task.prompt), "answer": task.payload["word"][::-1]} for task in tasks]


def called(function: Any, data: list[dict[str, Any]], answers: list[str], **more: Any) -> list[float | None]:
    """Call a reward function as TRL does: one row per completion, columns as lists, and TRL's own arguments."""
    return function(
        prompts=[row["prompt"] for row in data],
        completions=[[{"role": "assistant", "content": answer}] for answer in answers],
        completion_ids=[[1, 2]] * len(data),
        trainer_state=object(),
        log_extra=lambda name, values: None,
        **{key: [row[key] for row in data] for key in ("id", "answer")},
        **more,
    )


def test_each_completion_gets_its_score_or_none_where_the_judge_refused(example: Any) -> None:
    data = [row for row in rows(importlib.import_module("words"), 8) for _ in range(MEMBERS)]
    answers = [row["answer"] if i % 3 else f"{row['answer']}{i}" for i, row in enumerate(data)]
    logged: dict[str, float] = {}
    service = importlib.import_module("judge_service")
    with service.judge(latency=(0.0, 0.1), refused=0.3) as judge, BlockingRewardAgent(HttpReward(judge.url)) as agent:
        told = called(example.reward_function(agent), data, answers, log_metric=logged.__setitem__)
        (alone,) = called(example.reward_function(agent), data[1:2], answers[1:2])
    expected = [1.0 if i % 3 else 0.0 for i in range(len(data))]
    assert 0 < told.count(None) < len(data)
    assert [score if score is not None else right for score, right in zip(told, expected, strict=True)] == expected
    refused = {(row["id"], answer) for row, answer, score in zip(data, answers, told, strict=True) if score is None}
    assert judge.refusals == len(refused) + (alone is None)
    assert logged["service/failed/refused"] == len(refused)
    assert logged["service/scored"] + logged["service/cache_hits"] == len(data) - len(refused)


def test_scores_are_post_processed_in_trl_s_groups(example: Any) -> None:
    class Best:
        async def compute_score(self, request: Request) -> float:
            assert request.task.payload == {"answer": request.task.payload["answer"]}
            return float(len(request.response))

        def post_process_scores(self, scores: list[Any]) -> list[float]:
            assert len(scores) == MEMBERS
            return [score.value - max(other.value for other in scores) for score in scores]

    data = [row for row in rows(importlib.import_module("words"), 2) for _ in range(MEMBERS)]
    with BlockingRewardAgent(Best()) as agent:
        told = called(example.reward_function(agent), data, ["a", "aa", "aaa", "aaaa", "a", "a", "a", "aa"])
    assert told == [-3, -2, -1, 0, -1, -1, -1, 0]


def test_completions_without_a_score_have_no_advantage_and_do_not_change_the_baseline(
    example: Any, tmp_path: Path
) -> None:
    words = importlib.import_module("words")
    data = rows(words, 2)
    model, tokenizer = words.warm_started(words.word_tasks(2, length=4, seed=0), steps=2, seed=0)
    given: list[float | None] = [1.0, 0.0, None, 0.5, None, None, None, None]

    async def scripted(request: Request) -> float | None:
        return given[asked.index(request.response)]

    asked: list[str] = []

    def watched(completions: Any, **columns: Any) -> list[float | None]:
        asked[:] = [f"{i}" for i in range(len(completions))]  # the model's answers could be equal
        return judged(completions=[[{"role": "assistant", "content": text}] for text in asked], **columns)

    with BlockingRewardAgent(scripted, cache=0) as agent:
        judged = example.reward_function(agent)
        settings = example.GRPOConfig(
            output_dir=str(tmp_path),
            max_steps=1,
            num_generations=MEMBERS,
            per_device_train_batch_size=2 * MEMBERS,
            max_completion_length=8,
            scale_rewards="none",
            use_cpu=True,
            bf16=False,
            report_to="none",
        )
        trainer = example.ToldRewards(
            model=model,
            processing_class=tokenizer,
            reward_funcs=[watched],
            train_dataset=Dataset.from_list(data),
            args=settings,
        )
        trainer.model.train()
        batch = trainer._generate_and_score_completions([row for row in data for _ in range(MEMBERS)])
    assert torch.allclose(batch["advantages"].flatten(), torch.tensor([0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_trains_with_a_slow_judge_that_scores_many_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "trl_rewards.py"), "--steps", "3", "--warm-steps", "8"],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr
    steps = [match.groups() for line in done.stdout.splitlines() if (match := STEP.fullmatch(line))]
    assert [(int(step), int(rows)) for step, _, rows in steps] == [(0, 32), (1, 32), (2, 32)]
    last = LAST.fullmatch(done.stdout.splitlines()[-1])
    assert last is not None
    answered, refused, most = map(int, last.groups())
    assert sum(int(missing) for _, missing, _ in steps) >= refused  # the same response may be refused more than once
    assert answered + refused <= 96
    assert most > 16
