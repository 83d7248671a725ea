"""Experience replay in TRL's `GRPOTrainer`. Runs on a CPU in about a minute.

    pip install 'gleanrl[trl]'
    python examples/trl_replay.py

A tiny model learns to spell words backward. TRL samples, scores and trains as usual. `ReplayTrainer` adds two things
after each batch is sampled:

* If some but not all completions of a prompt are correct, the correct ones are stored in the pool, with their token ids
  and log-probs.
* If a prompt occurs again, stored correct completions of it are added to its group.

The baseline of a group is the mean reward of its fresh completions only. The importance ratio of a stored token is
computed with its stored log-prob.

By default the pool is deleted at the end. With ``--pool FILE`` it is kept, and the next run starts with it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from gleanrl import Task
from gleanrl.experience import ExperiencePool, attach_replayed
from gleanrl.experience.interop.verl import from_verl, to_verl
from gleanrl.types import Group
from gleanrl.utils.errors import UserError
from words import arguments, correct, warm_started, word_tasks

Tensors = dict[str, torch.Tensor]


class ReplayTrainer(GRPOTrainer):
    """A `GRPOTrainer` that adds up to ``pool.settings.per_group`` stored successes to each group.

    The dataset must have a column ``id`` that identifies the prompt.

    Raises:
        UserError: an option of TRL is set that this trainer does not support. Some would need values, such as a
            reference model's log-probs, that are not stored with a completion.
    """

    # TRL declares these attributes with types that also allow None or other objects, which never occurs here.
    args: Any
    model: Any
    num_generations: Any
    _tokenizer: Any

    def __init__(self, *, args: GRPOConfig, pool: ExperiencePool, **options: Any) -> None:
        if args.beta or args.use_vllm or args.world_size > 1:
            raise UserError("ReplayTrainer has no reference model, no vLLM and no second process; set beta = 0")
        if args.loss_type != "dapo" or args.scale_rewards != "none":
            raise UserError("ReplayTrainer is written for loss_type = 'dapo' and scale_rewards = 'none'")
        if args.top_p < 1 or args.top_k or args.min_p or args.repetition_penalty != 1:
            raise UserError("ReplayTrainer stores log-probs of the policy: sample from the whole vocabulary")
        super().__init__(args=args, **options)
        self.pool = pool
        pool.start_run()  # steps are counted from 0 again, and the ages of what is stored count on

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        """Return the rewards [N, reward functions], and store them, because TRL's batch contains only advantages."""
        self._rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Tensors:
        batch = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return batch
        firsts = inputs[:: self.num_generations]
        tasks = [Task(row["id"], tuple(row["prompt"])) for row in firsts]
        step = self.state.global_step
        fresh = from_verl(self._rows(batch), tasks, version=step, prefix=f"step-{step}", decode=self._tokenizer.decode)
        mixed = attach_replayed(fresh, self.pool, seed=step)
        self.pool.observe(fresh, step, temperature=self.temperature)
        report(step, mixed, self.pool)
        arrays = to_verl(mixed, pad_token=self._tokenizer.pad_token_id, advantages=advantages(mixed))
        # If no completion could be scored, there are no rows. TRL's own batch then trains nothing either.
        return self._batch(arrays) if len(arrays["responses"]) else batch

    def _rows(self, batch: Tensors) -> dict[str, Any]:
        """Convert TRL's batch of N completions to the arrays that `from_verl` reads, which have verl's names."""
        input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        response = batch["completion_mask"] * batch.get("tool_mask", 1)  # tool results were not sampled by the model
        logprobs = batch.get("old_per_token_logps")
        if logprobs is None:  # TRL does not compute them for on-policy updates, but the pool must store them
            width = response.shape[1]
            with torch.no_grad():
                logprobs = self._get_per_token_logps_and_entropies(self.model, input_ids, attention, width)[0]
        scored = ~self._rewards.isnan().all(1)
        rows = {
            "responses": batch["completion_ids"],
            "input_ids": input_ids,
            "attention_mask": attention,
            "response_mask": response,
            "rollout_log_probs": logprobs,
            "scores": (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(1),
            "valid": scored,
            "group_ids": torch.arange(len(input_ids)) // self.num_generations,
        }
        return {key: value.cpu() for key, value in rows.items()}

    def _batch(self, arrays: dict[str, np.ndarray]) -> Tensors:
        """Convert the arrays that `to_verl` returns to a batch of TRL."""
        rows = {
            key: torch.from_numpy(value).to(self.accelerator.device)
            for key, value in arrays.items()
            if value.dtype != object  # names of groups, tasks and trajectories
        }
        # TRL splits the batch into `steps_per_generation` parts of equal size and drops the remainder. Copies of the
        # last row with an empty mask, which train nothing, make the number of rows divisible.
        count = len(rows["responses"])
        filled = count + -count % self.args.steps_per_generation
        rows = {key: value[torch.arange(filled).clamp(max=count - 1)] for key, value in rows.items()}
        rows["response_mask"][count:] = 0
        width = rows["prompts"].shape[1]
        return {
            "prompt_ids": rows["prompts"],
            "prompt_mask": rows["attention_mask"][:, :width],
            "completion_ids": rows["responses"],
            "completion_mask": rows["attention_mask"][:, width:],
            "tool_mask": rows["response_mask"],
            "advantages": rows["advantages"],
            "old_per_token_logps": rows["old_log_probs"],
            "num_items_in_batch": rows["response_mask"].sum(),
        }


def advantages(groups: Sequence[Group]) -> list[float]:
    """Return each trajectory's score minus the mean score of the fresh members of its group; 0 without a score."""
    found: list[float] = []
    for group in groups:
        baseline = np.mean([t.score.value for t in group.valid_fresh]) if group.valid_fresh else 0.0
        found += [t.score.value - float(baseline) if t.score.valid else 0.0 for t in group.trajectories]
    return found


def report(step: int, groups: Sequence[Group], pool: ExperiencePool) -> None:
    scores = [t.score.value for group in groups for t in group.valid_fresh]
    success = np.mean(scores) if scores else 0.0
    replayed = sum(len(group.spec.replayed) for group in groups)
    print(
        f"step {step}: success {success:.2f}, {replayed} stored next to {len(groups)} prompts, "
        f"{pool.stats()['trajectories']} in the pool"
    )


def reward(completions: Sequence[Any], word: Sequence[str], **_: Any) -> list[float]:
    """A reward function in TRL's format: 1 for each completion that is its ``word`` spelt backward, else 0."""
    return [correct(each, messages[0]["content"]) for each, messages in zip(word, completions, strict=True)]


def settings(args: argparse.Namespace, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        seed=args.seed,
        max_steps=args.steps,
        num_generations=args.members,
        per_device_train_batch_size=args.prompts * args.members,
        max_completion_length=8,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="dapo",
        scale_rewards="none",
        # Fresh tokens are on-policy, so their ratio is 1. This clips only the ratios of stored tokens, at 1 + 1.0 = 2.
        epsilon_high=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    args = arguments("an experience pool inside TRL's GRPOTrainer")
    torch.set_num_threads(1)
    shown = word_tasks(1000, length=4, seed=args.seed + 1)
    model, tokenizer = warm_started(shown, steps=args.warm_steps, seed=args.seed)
    tasks = word_tasks(args.words, length=4, seed=args.seed)
    data = [{"id": task.id, "prompt": list(task.prompt), **task.payload} for task in tasks]
    with (
        tempfile.TemporaryDirectory() as folder,
        ExperiencePool(args.pool or Path(folder) / "experience.sqlite", vocabulary=len(tokenizer)) as pool,
    ):
        trainer = ReplayTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=[reward],
            train_dataset=Dataset.from_list(data),
            args=settings(args, folder),
            pool=pool,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


if __name__ == "__main__":
    main()
