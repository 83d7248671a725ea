"""Compares the tokens per second of the learner and of a plain training loop on the same model and data.

    python benchmarks/learner.py [--rounds 5] [--threads 1] [--groups 16] [--clock cpu]
        [--tokens-per-microbatch 1024 2048]

The plain loop is a straightforward implementation: a transformers model, padded rows with an attention mask, logits and
log-softmax at the positions of trained tokens, the same PPO loss and AdamW. It runs with several micro-batch sizes,
with rows sorted by length and unsorted, and the learner is compared with the fastest variant. Runs alternate, and
medians over rounds are printed. The learner uses at most 2048 tokens per micro-batch on a CPU.

``--clock cpu`` measures CPU time instead of wall-clock time, for a shared machine. With one thread on an idle machine,
both are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gleanrl.algorithms.batch import Batch, build
from gleanrl.config.settings import CreditSettings, LearnerSettings, LossSettings
from gleanrl.learners.engine import microbatch_budget
from gleanrl.learners.torch import TorchLearner
from gleanrl.types import Group, GroupSpec, Score, StopReason, Task, Trajectory, Turn

VOCABULARY, MEMBERS = 500, 8
PLAIN_ROWS = (4, 8, 32)
CPU = torch.device("cpu")


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    return Qwen2ForCausalLM(config)


def make_groups(count: int, flat_share: float) -> list[Group]:
    """Make groups of episodes of 150 to 400 tokens, of which about a quarter are sampled.

    In the share ``flat_share`` of the groups, all members have the same score, so that their advantages are 0.
    """
    random = np.random.default_rng(0)

    def turn(role: str, size: int) -> Turn:
        logprobs = np.full(size, -np.log(VOCABULARY), np.float32) if role == "assistant" else None
        return Turn(
            {"role": role, "content": ""},
            random.integers(0, VOCABULARY, size),
            logprobs,
            0 if logprobs is not None else -1,
        )

    def trajectory(task: str, member: int, score: float) -> Trajectory:
        length, turns = int(random.integers(150, 400)), [turn("system", 60)]
        while sum(t.tokens.size for t in turns) < length:
            turns += [turn("user", int(random.integers(10, 20))), turn("assistant", int(random.integers(4, 12)))]
        return Trajectory(f"{task}/{member}", task, (tuple(turns),), Score(score), StopReason.DONE)

    groups: list[Group] = []
    for index in range(count):
        scores = [1.0] * MEMBERS if index < flat_share * count else [float(m % 2) for m in range(MEMBERS)]
        members = tuple(trajectory(f"task-{index}", m, score) for m, score in enumerate(scores))
        groups.append(Group(GroupSpec(Task(f"task-{index}"), MEMBERS), members, index))
    return groups


def plain_update(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    rows: int,
    ordered: bool,
    loss: LossSettings,
) -> float:
    """Make one update of a transformers model, which may be a peft model, and return the gradient norm."""
    samples = sorted(batch.samples, key=lambda s: -s.tokens.size) if ordered else list(batch.samples)
    total = sum(int(s.mask.sum()) for s in samples)
    language_model = model.get_base_model() if hasattr(model, "peft_config") else model
    for start in range(0, len(samples), rows):
        part = samples[start : start + rows]
        length = max(s.tokens.size for s in part)
        tokens = torch.zeros(len(part), length, dtype=torch.long)
        attention = torch.zeros_like(tokens)
        mask = torch.zeros(len(part), length, dtype=torch.bool)
        old, advantages = (torch.zeros(len(part), length) for _ in range(2))
        for row, s in enumerate(part):
            n = s.tokens.size
            tokens[row, :n] = torch.from_numpy(s.tokens.copy())
            attention[row, :n] = 1
            mask[row, :n] = torch.from_numpy(s.mask.copy())
            old[row, :n] = torch.from_numpy(s.behaviour.copy())
            advantages[row, :n] = torch.from_numpy(s.advantages.copy())
        states = language_model.base_model(input_ids=tokens, attention_mask=attention, use_cache=False)
        logits = language_model.lm_head(states.last_hidden_state[:, :-1][mask[:, 1:]])
        logp = logits.log_softmax(-1).gather(-1, tokens[mask][:, None]).squeeze(-1)
        ratio = (logp - old[mask]).exp()
        a = advantages[mask]
        values = torch.maximum(-a * ratio, -a * ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high))
        (values.sum() / total).backward()
    norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--skip-share", type=float, default=0.0, help="share of groups without variance")
    parser.add_argument("--tokens-per-microbatch", type=int, nargs="*", default=[2048])
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    loss = LossSettings()
    base = make_model()
    started = clock()
    batch = build(make_groups(options.groups, options.skip_share), CreditSettings(), loss, 1024)
    building = clock() - started
    tokens = sum(s.tokens.size for s in batch.samples)
    trained = sum(int(s.mask.sum()) for s in batch.samples)
    print(
        f"{sum(p.numel() for p in base.parameters()) / 1e6:.2f} M parameters, vocabulary {VOCABULARY}, "
        f"{len(batch.samples)} samples, {tokens} tokens, {trained / tokens:.0%} trained, {options.threads} thread(s); "
        f"groups and batch built in {building * 1e3:.0f} ms"
    )

    runs: dict[str, list[float]] = {}
    plain_model = copy.deepcopy(base)
    optimizer = torch.optim.AdamW(plain_model.parameters(), lr=1e-5, fused=True)
    learners = {
        budget: TorchLearner(
            copy.deepcopy(base),
            LearnerSettings(lr=1e-5, tokens_per_microbatch=budget),
            loss,
            total_steps=1000,
            groups_per_step=options.groups,
            pad_token=0,
            temperature=1.0,
        )
        for budget in sorted({microbatch_budget(each, CPU) for each in options.tokens_per_microbatch})
    }
    padding: dict[str, str] = {}
    for _ in range(options.rounds):
        for rows in PLAIN_ROWS:
            for ordered in (False, True):
                started = clock()
                plain_update(plain_model, optimizer, batch, rows, ordered, loss)
                name = f"plain loop, {rows} rows, {'sorted' if ordered else 'unsorted'}"
                runs.setdefault(name, []).append(tokens / (clock() - started))
        for budget, learner in learners.items():
            started = clock()
            metrics = asyncio.run(learner.update(batch))
            name = f"gleanrl, {budget} tokens per micro-batch"
            runs.setdefault(name, []).append(tokens / (clock() - started))
            padding[name] = f"{metrics['learner/padding']:.1%}"
    best = max(statistics.median(r) for name, r in runs.items() if name.startswith("plain"))
    print(f"{'':40} {'tokens/s':>10} {'of fastest loop':>16} {'padding':>8}")
    for name, rates in runs.items():
        median = statistics.median(rates)
        print(f"{name:40} {median:10.0f} {median / best:16.2f} {padding.get(name, '-'):>8}")


if __name__ == "__main__":
    main()
