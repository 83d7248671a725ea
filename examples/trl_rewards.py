"""The reward agent inside TRL's `GRPOTrainer`, with a slow judge, on a CPU, in less than a minute.

    pip install 'gleanrl[trl,rewards]'
    python examples/trl_rewards.py

A tiny model learns to spell words backward, and a judge behind HTTP says whether it did (on loopback here, started by
this file). TRL samples and trains as always; `judged` is a reward function as it asks for one. All completions of a
batch are with the judge at once; what it does not answer in time, or breaks over, is asked again; and a completion that
it does not score is None, TRL's word for "does not count", never 0.

The function is a sync one, over a `BlockingRewardAgent` that is open as long as the training. TRL (1.16) runs async
reward functions on a loop of its own, all of them at once, but gives nobody a chance to close on that loop what was
opened on it: connections and a journal would end with the process. Nor is anything gained for one service, which has
the whole batch at once either way. For several at once, give the agent `gleanrl.rewards.compose.Weighted`, or write
``async def`` functions that await ``asyncio.wrap_future(agent.submit(...))``.
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
    """TRL's reward function over an agent. The dataset has a column ``id``; its others become the task's payload."""

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
    """A `GRPOTrainer` that prints what each batch was worth."""

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
