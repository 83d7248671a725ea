"""Experience replay in a training loop with verl's functions. Runs on a CPU in about a minute.

    pip install 'gleanrl' ray tensordict hydra-core codetiming torchdata orjson aiohttp
    pip install --no-deps verl==0.9.1
    python examples/verl_replay.py

A tiny model learns to spell words backward. The loop in `train` has the steps of verl's `RayPPOTrainer.fit` (rollout,
score, advantages, update) in one process instead of workers. The batch is verl's `DataProto`, and verl's functions
compute advantages and loss. One call is added before the update, `with_experience`:

* If some but not all rollouts of a prompt are correct, the correct ones are stored in the pool.
* If a prompt occurs again, stored correct rollouts of it are added to the batch.

In a subclass of `RayPPOTrainer`, make this call at the beginning of `_update_actor`.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from verl import DataProto  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]
from verl.workers.config import ActorConfig  # pyright: ignore[reportMissingImports]

from gleanrl import Task
from gleanrl.algorithms.advantages import estimate
from gleanrl.experience import ExperiencePool, attach_replayed
from gleanrl.experience.interop.verl import from_verl, to_verl
from words import arguments, correct, warm_started, word_tasks

ANSWER = 8  # maximum number of tokens of an answer

NEEDED = (
    *("responses", "input_ids", "attention_mask", "response_mask"),
    *("rollout_log_probs", "token_level_scores"),
)


def with_experience(
    batch: Any, pool: ExperiencePool, tasks: Mapping[str, Task], *, step: int, pad_token: int
) -> tuple[Any, int]:
    """Store successful rows of a batch in the pool, and add stored successes of earlier steps to the batch.

    Args:
        batch: a `DataProto` with log-probs and scores. ``non_tensor_batch["task_id"]`` has the id of each row's task,
            which must be the same in every epoch (verl's ``uid`` is not, because it is new in every step).
        tasks: the tasks by id.
        step: number of the training step.
        pad_token: id of the token that pads prompts and responses.

    Returns:
        The batch with the stored successes as additional rows and with new advantages, and the number of these rows.
    """
    names, group_ids = np.unique(batch.non_tensor_batch["task_id"].astype(str), return_inverse=True)
    rows = {key: batch.batch[key].cpu() for key in NEEDED} | {"group_ids": group_ids}
    fresh = from_verl(rows, [tasks[name] for name in names], prefix=f"step-{step}", version=step)
    mixed = attach_replayed(fresh, pool, seed=step)
    pool.observe(fresh, step, temperature=batch.meta_info["temperature"])

    width = batch.batch["prompts"].shape[1]
    arrays = to_verl(mixed, pad_token=pad_token, max_prompt=width, max_response=batch.batch["responses"].shape[1])
    tensors = {key: torch.from_numpy(value) for key, value in arrays.items() if value.dtype != object}
    stored = tensors["exp_mask"][:, width:].any(-1)
    tensors["advantages"], tensors["returns"] = estimate(
        "grpo",
        tensors["token_level_rewards"],
        tensors["response_mask"].bool(),
        tensors["group_ids"],
        # With all rows in the baseline this would equal verl's GRPO. Stored rows are left out of it, so that they do
        # not change the advantages of fresh rows.
        baseline_members=~stored,
    )
    columns = {"task_id": arrays["task_ids"], "uid": arrays["uid"]}
    return DataProto.from_dict(tensors, non_tensors=columns, meta_info=dict(batch.meta_info)), int(stored.sum())


# --- the steps of a trainer, small --------------------------------------------------------------
def roll_out(model: Any, tokenizer: PreTrainedTokenizerFast, tasks: Sequence[Task], members: int) -> Any:
    """Sample ``members`` answers to each task and return them as a `DataProto`. All prompts have the same length."""
    rows = [task for task in tasks for _ in range(members)]
    conversations: Any = [list(task.prompt) for task in rows]
    prompts = torch.tensor(tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=False))
    with torch.no_grad():
        input_ids = model.generate(prompts, max_new_tokens=ANSWER, min_new_tokens=1, do_sample=True, top_k=0)
    responses = input_ids[:, prompts.shape[1] :]
    ended = (responses == tokenizer.eos_token_id).long()
    mask = ((ended.cumsum(-1) - ended) == 0).long()
    attention = torch.cat([torch.ones_like(prompts), mask], 1)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "input_ids": input_ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
    }
    names = np.array([task.id for task in rows], object)
    batch = DataProto.from_dict(tensors, non_tensors={"task_id": names}, meta_info={"temperature": 1.0})
    with torch.no_grad():
        batch.batch["rollout_log_probs"] = logprobs(model, batch)
    return batch


def logprobs(model: LlamaForCausalLM, batch: Any) -> torch.Tensor:
    """Return the log-probs of the response tokens under ``model``, as float32 [N, response length]."""
    b, width = batch.batch, batch.batch["prompts"].shape[1]
    logits = model(b["input_ids"], attention_mask=b["attention_mask"], position_ids=b["position_ids"]).logits
    values = logits[:, width - 1 : -1].log_softmax(-1).gather(-1, b["responses"][..., None])
    return values[..., 0]


def score(batch: Any, tokenizer: PreTrainedTokenizerFast, tasks: Mapping[str, Task]) -> float:
    """Write each answer's score to the position of its last token, as verl does, and return the mean score."""
    mask = batch.batch["response_mask"]
    answers = tokenizer.batch_decode(batch.batch["responses"] * mask, skip_special_tokens=True)
    names = batch.non_tensor_batch["task_id"]
    scores = [correct(tasks[name].payload["word"], text) for name, text in zip(names, answers, strict=True)]
    rewards = torch.zeros_like(mask, dtype=torch.float32)
    rewards[torch.arange(len(mask)), mask.sum(-1) - 1] = torch.tensor(scores)
    batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = rewards
    return float(np.mean(scores))


def update_actor(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Make one optimizer update with verl's clipped policy loss."""
    # Fresh tokens are on-policy, so their ratio is 1. `clip_ratio_high` clips only the ratios of stored tokens, at 2.
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=1.0)
    loss, _ = core_algos.get_policy_loss_fn("vanilla")(
        old_log_prob=batch.batch["old_log_probs"],
        log_prob=logprobs(model, batch),
        advantages=batch.batch["advantages"],
        response_mask=batch.batch["response_mask"],
        loss_agg_mode="token-mean",
        config=config,
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def train(args: argparse.Namespace, pool_file: Path) -> None:
    shown = word_tasks(1000, length=4, seed=args.seed + 1)
    model, tokenizer = warm_started(shown, steps=args.warm_steps, seed=args.seed)
    padding: Any = tokenizer.pad_token_id
    torch.manual_seed(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    tasks = {task.id: task for task in word_tasks(args.words, length=4, seed=args.seed)}
    order = random.Random(args.seed)
    with ExperiencePool(pool_file, vocabulary=len(tokenizer)) as pool:
        pool.start_run()  # steps are counted from 0 again, and the ages of what is stored count on
        for step in range(args.steps):
            chosen = order.sample(list(tasks.values()), args.prompts)
            batch = roll_out(model, tokenizer, chosen, args.members)
            success = score(batch, tokenizer, tasks)
            # as with verl's setting rollout_correction.bypass_mode
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
            batch.batch["advantages"], batch.batch["returns"] = core_algos.compute_grpo_outcome_advantage(
                batch.batch["token_level_rewards"], batch.batch["response_mask"], batch.non_tensor_batch["task_id"]
            )
            # the only call that is not part of verl's training loop
            batch, stored = with_experience(batch, pool, tasks, step=step, pad_token=padding)
            update_actor(model, optimizer, batch)
            print(
                f"step {step}: success {success:.2f}, {stored} stored next to {len(chosen)} prompts, "
                f"{pool.stats()['trajectories']} in the pool"
            )


def main() -> None:
    args = arguments("an experience pool between verl's steps")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        train(args, args.pool or Path(folder) / "experience.sqlite")


if __name__ == "__main__":
    main()
