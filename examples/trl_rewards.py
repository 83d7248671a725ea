"""The reward agent as a reward function of TRL's `GRPOTrainer`. Runs on a CPU in less than a minute.

    pip install 'gleanrl[trl,rewards]'
    python examples/trl_rewards.py

A tiny model learns to spell words backward. A slow HTTP service, which this script starts, scores its answers. TRL
samples and trains as usual; `reward_function` returns a reward function for it. The agent sends all requests of a batch
at the same time, and repeats those that time out or fail. The reward of a completion that is never scored is None,
which makes TRL leave it out; it is not counted as 0.

The reward function is synchronous and calls a `BlockingRewardAgent`, which is open during the training. TRL (1.16) also
accepts async reward functions and runs them on an event loop of its own. That loop has no shutdown hook, so an agent's
connections and journal could not be closed properly on it. With one service, async functions would not be faster
either, because the whole batch is sent at the same time in both cases. To use several services at the same time, give
the agent a `gleanrl.rewards.compose.Weighted`, or write ``async def`` functions that await
``asyncio.wrap_future(agent.submit(...))``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from gleanrl import Task
from gleanrl.rewards import BlockingRewardAgent
from gleanrl.rewards.http import HttpReward
from judge_service import judge
from words import arguments, warm_started, word_tasks

RewardFunction = Callable[..., list[float | None]]


def reward_function(agent: BlockingRewardAgent) -> RewardFunction:
    """Return a reward function for TRL that scores completions with ``agent``.

    The dataset must have a column ``id`` that identifies the prompt. Its other columns become the task's payload.
    """

    def judged(
        prompts: Sequence[Any], completions: Sequence[Any], id: Sequence[str], log_metric: Any = None, **columns: Any
    ) -> list[float | None]:
        payload = {name: values for name, values in columns.items() if name not in TRL_OWN}
        rows = []
        for task_id, prompt, completion, *values in zip(id, prompts, completions, *payload.values(), strict=True):
            task = Task(task_id, tuple(prompt), dict(zip(payload, values, strict=True)))
            rows.append((task, [*prompt, *completion]))
        groups = [list(members) for _, members in groupby(rows, key=lambda row: row[0].id)]
        scores = [score for group in agent.score_groups(groups) for score in group]
        if log_metric is not None:
            for name, value in agent.metrics().items():
                log_metric(name, value)
        return [score.value if score.valid else None for score in scores]

    return judged


TRL_OWN = frozenset({"completion_ids", "trainer_state", "log_extra", "environments"})


class ToldRewards(GRPOTrainer):
    """A `GRPOTrainer` that prints the mean reward of each batch and how many completions have no score."""

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        missing = int(rewards.isnan().all(1).sum())
        print(f"step {self.state.global_step}: success {rewards.nanmean():.2f}, {missing} of {len(rewards)} not scored")
        return rewards


def main() -> None:
    args = arguments("the reward agent inside TRL's GRPOTrainer")
    torch.set_num_threads(1)
    shown = word_tasks(1000, length=4, seed=args.seed + 1)
    model, tokenizer = warm_started(shown, steps=args.warm_steps, seed=args.seed)
    tasks = word_tasks(args.words, length=4, seed=args.seed)
    data = [{"id": task.id, "prompt": list(task.prompt), "answer": task.payload["word"][::-1]} for task in tasks]
    with (
        tempfile.TemporaryDirectory() as folder,
        judge() as service,
        BlockingRewardAgent(HttpReward(service.url), max_concurrency=1000, timeout_s=10) as agent,
    ):
        settings = GRPOConfig(
            output_dir=folder,
            seed=args.seed,
            max_steps=args.steps,
            num_generations=args.members,
            per_device_train_batch_size=args.prompts * args.members,
            max_completion_length=8,
            learning_rate=args.lr,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = ToldRewards(
            model=model,
            processing_class=tokenizer,
            reward_funcs=[reward_function(agent)],
            train_dataset=Dataset.from_list(data),
            args=settings,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        print(f"{service.answered} scored by the judge, {service.refusals} refused, {service.most} at once at most")


if __name__ == "__main__":
    main()
