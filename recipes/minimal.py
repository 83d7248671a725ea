"""GRPO for a multi-turn agent as a single script without a trainer: `python recipes/minimal.py`.

A tiny model learns household tasks in ALFWorld, on generated households. The loop in `run` samples groups of episodes,
computes advantages within each group, and makes clipped policy-gradient updates on exactly the tokens that were
sampled. The environment, the sampler, the advantage estimator and the loss come from the library, and each of them can
be replaced.

`gleanrl train quickstart` does the same with schedules, checkpoints, evaluation and a report.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from gleanrl.algorithms.advantages import estimate
from gleanrl.algorithms.loss import padded_policy_loss
from gleanrl.config.settings import ContextSettings, LossSettings, ModelSettings
from gleanrl.environments.alfworld import AlfworldTaskset
from gleanrl.learners.supervised import fine_tune
from gleanrl.learners.tiny import build_model, build_tokenizer
from gleanrl.rollout.player import Player
from gleanrl.rollout.renderer import Renderer
from gleanrl.samplers.transformers import TransformersSampler
from gleanrl.types import Task, Trajectory, segment_arrays
from gleanrl.utils.seeding import derive

MAX_CONTEXT = 1024  # maximum number of tokens of an episode


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    asyncio.run(run(args))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO for a multi-turn agent as a single script")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--train-tasks", type=int, default=256, help="tasks to train on")
    parser.add_argument("--groups", type=int, default=16, help="tasks per step")
    parser.add_argument("--members", type=int, default=8, help="episodes per task")
    parser.add_argument("--updates", type=int, default=4, help="optimizer updates per step")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--demonstrations", type=int, default=400)
    parser.add_argument("--warm-steps", type=int, default=260)
    parser.add_argument("--eval-tasks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


async def run(args: argparse.Namespace) -> None:
    # 1. Tasks. The splits share no household, and a solver has verified that each task can be solved.
    taskset = AlfworldTaskset(goals=("put",), receptacles=(5, 6), objects=(4, 6), seed=args.seed)
    train_tasks = list(taskset.tasks("train", args.train_tasks))
    eval_tasks = taskset.tasks("eval", args.eval_tasks)

    # 2. A tiny model, fine-tuned on noisy demonstrations. Untrained it would never succeed, and RL could not start.
    model, renderer = warm_start(taskset, args)

    # 3. A sampler, which has a copy of the weights that is updated after each step, and a player, which runs episodes:
    #    it alternates between the sampler and the environment.
    sampler = TransformersSampler(model, max_rows=256, max_context=MAX_CONTEXT)
    player = Player(
        environment=taskset.environment,
        sampler=sampler,
        renderer=renderer,
        context=ContextSettings(max_turns=12, max_tokens_per_turn=12),
        temperature=1.0,
        max_context=MAX_CONTEXT,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    print(f"held-out success before RL: {await success(player, eval_tasks, args.seed):.2f}")

    # 4. GRPO. Each step samples groups of episodes, divides them into mini-batches, and makes an update on each.
    order = random.Random(args.seed)
    for step in range(args.steps):
        started = time.perf_counter()
        tasks = order.sample(train_tasks, args.groups)
        groups = await play_groups(player, tasks, args.members, derive(args.seed, "rollout", step))
        sampled = time.perf_counter()
        order.shuffle(groups)
        loss = 0.0
        for mini_batch in np.array_split(np.arange(len(groups)), args.updates):
            loss += update(model, optimizer, [groups[i] for i in mini_batch]) / args.updates
        await sampler.publish(dict(model.named_parameters()), step + 1)
        rewards = [t.score.value for group in groups for t in group]
        print(
            f"step {step + 1}: reward {np.mean(rewards):.2f}  loss {loss:+.3f}  "
            f"sampled in {sampled - started:.1f} s, trained in {time.perf_counter() - sampled:.1f} s"
        )
    print(f"held-out success after RL: {await success(player, eval_tasks, args.seed):.2f}")
    await sampler.close()


def warm_start(taskset: AlfworldTaskset, args: argparse.Namespace) -> tuple[PreTrainedModel, Renderer]:
    """Record demonstrations of the environment's expert, train a tokenizer on their text, and fine-tune a new model.

    In the demonstrations, 30 % of the actions are random.
    """
    tasks = taskset.tasks("warm_start", 100)
    played = [taskset.demonstrate(tasks[i % len(tasks)], seed=i, noise=0.3) for i in range(args.demonstrations)]
    conversations = [conversation for conversation, score in played if score.value > 0]
    tokenizer = build_tokenizer([m["content"] for c in conversations for m in c], vocabulary=512)
    model = build_model(ModelSettings(max_context=MAX_CONTEXT), tokenizer, seed=args.seed)
    renderer = Renderer(tokenizer)
    examples = [segment_arrays(renderer.demonstration(conversation))[:2] for conversation in conversations]
    fine_tune(model, examples, steps=args.warm_steps, batch=32, lr=1e-3, seed=args.seed)
    return model, renderer


async def play_groups(player: Player, tasks: Sequence[Task], members: int, seed: int) -> list[list[Trajectory]]:
    """Play ``members`` episodes of each task and return them by task.

    All episodes run concurrently, so that the sampler can batch their requests.
    """

    async def episode(task: Task, member: int) -> Trajectory:
        name = f"{task.id}.{member}"
        return await player.play(task, trajectory_id=name, seed=derive(seed, name))

    async def group(task: Task) -> list[Trajectory]:
        return list(await asyncio.gather(*(episode(task, member) for member in range(members))))

    return list(await asyncio.gather(*(group(task) for task in tasks)))


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list[list[Trajectory]]) -> float:
    """Make one optimizer update with the clipped policy loss on a mini-batch of groups, and return the loss."""
    members = [(g, t) for g, group in enumerate(groups) for t in group if t.score.valid]
    # By default the context only grows, so that a trajectory is a single segment.
    arrays = [segment_arrays(t.segments[0]) for _, t in members]
    length = max(tokens.size for tokens, _, _ in arrays)
    tokens = torch.zeros(len(members), length, dtype=torch.int64)
    mask = torch.zeros(len(members), length)
    behaviour = torch.zeros(len(members), length)
    rewards = torch.zeros(len(members), length)
    for row, ((_, trajectory), (ids, trained, logprobs)) in enumerate(zip(members, arrays, strict=True)):
        tokens[row, : ids.size] = torch.from_numpy(ids)
        mask[row, : ids.size] = torch.from_numpy(trained)
        behaviour[row, : ids.size] = torch.from_numpy(logprobs)
        rewards[row, int(np.flatnonzero(trained)[-1])] = trajectory.score.value
    group_of = torch.tensor([g for g, _ in members])
    advantages, _ = estimate("grpo", rewards, mask.bool(), group_of)

    # The logits at position i predict token i + 1. Tokens, log-probs, advantages and mask are therefore shifted by one.
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    logp = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    output = padded_policy_loss(
        logp, behaviour[:, 1:], advantages[:, 1:], mask[:, 1:].bool(), config=LossSettings(clip_low=0.2, clip_high=0.28)
    )
    output.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(output.loss)


async def success(player: Player, tasks: Sequence[Task], seed: int) -> float:
    """Return the mean reward of two sampled episodes of each task."""
    groups = await play_groups(player, tasks, members=2, seed=derive(seed, "evaluation"))
    return float(np.mean([t.score.value for group in groups for t in group if t.score.valid]))


if __name__ == "__main__":
    main()
