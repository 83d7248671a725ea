"""Supervised fine-tuning: trains a model to predict the marked tokens of examples.

A run uses it for the warm start before RL. It also trains baselines to compare RL with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch
from torch import nn

from gleanrl.algorithms.batch import unscored_sample
from gleanrl.algorithms.microbatch import micro_batches
from gleanrl.learners.engine import microbatch_budget
from gleanrl.learners.freed_memory import keep_freed_memory, return_freed_memory
from gleanrl.learners.logprobs import can_pack_rows, trained_logprobs
from gleanrl.learners.optim import adamw, finish_gradient, zero_gradients
from gleanrl.learners.packed_attention import packed_attention
from gleanrl.types import BoolArray, IntArray
from gleanrl.utils.seeding import derive

WARMUP_STEPS = 20
LOWEST_RATE = 0.1  # learning rate at the end of the cosine decay, as a share of ``lr``
TOKENS_PER_MICROBATCH = 16384  # largest number of tokens in a micro-batch, including padding


def fine_tune(
    model: nn.Module,
    examples: Sequence[tuple[IntArray, BoolArray]],
    *,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
    progress: Callable[[int, int, float], None] | None = None,
    deadline_s: float | None = None,
    compute_dtype: torch.dtype | None = None,
    observed: Sequence[BoolArray] | None = None,
    observation_coefficient: float = 0.0,
) -> dict[str, float]:
    """Train ``model`` in place to predict the marked tokens of ``examples``.

    The optimizer is AdamW with betas (0.9, 0.95) and no weight decay. The learning rate has a linear warm-up of 20
    steps and a cosine decay to a tenth of ``lr``. The loss is the mean over the trained tokens of a batch, and the
    gradient norm is clipped to 1. Every example is used once before any is used twice. Without a deadline, the same
    ``seed`` gives the same weights.

    Args:
        examples: for each example, its token ids int32[n], and a mask bool[n] that is True at the tokens to predict.
            Examples without a token to predict are left out.
        steps: number of optimizer updates.
        batch: number of examples in each update.
        progress: called after each step with (steps done, ``steps``, mean loss of the step in nats per token).
        compute_dtype: dtype of forward passes. None means bfloat16 on a GPU and float32 on a CPU.
        deadline_s: seconds after which training stops even if fewer than ``steps`` updates were made, but not before
            the first one. The learning rate then decays with the elapsed time if that is further along than the steps.
            None = no deadline.
        observed: for each example, a mask bool[n] that is True at the tokens of the environment's answers.
        observation_coefficient: factor of the mean of -log p over these tokens of a batch, which is added to the loss.

    Returns:
        A dict of ``loss/first`` and ``loss/last`` (means over the first and the last tenth of the steps, in nats per
        token), ``steps`` (updates made), ``tokens`` (input tokens of all updates), ``seconds`` and ``tokens_per_s``.

    Raises:
        ValueError: if no example has a token to predict.
    """
    samples = []
    for number, (tokens, mask) in enumerate(examples):
        mask = np.array(mask, np.bool_)
        mask[:1] = False  # the first token cannot be predicted, because there is no token before it
        if not mask.any():
            continue
        seen_mask = observed[number] if observed is not None and observation_coefficient else np.zeros_like(mask)
        end = int((mask | seen_mask).nonzero()[0][-1]) + 1
        sample = unscored_sample(np.asarray(tokens[:end], np.int32), mask[:end])
        samples.append(replace(sample, observed=seen_mask[:end] if seen_mask.any() else None))
    if not samples:
        raise ValueError("no example has a token to train on")
    device, training = next(model.parameters()).device, model.training
    dtype = compute_dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    budget = microbatch_budget(TOKENS_PER_MICROBATCH, device)
    if device.type == "cpu":
        keep_freed_memory()
    model.eval()  # turn dropout off, because RL trains without it too
    packs = can_pack_rows(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(model, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    seen, started = 0, perf_counter()  # seen: number of input tokens of all updates so far
    zero_gradients(parameters)
    generator = np.random.default_rng(derive(seed, "supervised"))
    queue: list[int] = []  # indices of the next samples; each pass over all samples is in a new random order
    for step in range(steps):
        while len(queue) < batch:
            queue += generator.permutation(len(samples)).tolist()
        rows, queue = queue[:batch], queue[batch:]
        elapsed = perf_counter() - started
        if step and deadline_s is not None and elapsed >= deadline_s:
            break
        done = max(step / steps, elapsed / deadline_s if deadline_s else 0.0)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = lr * (warmup * (LOWEST_RATE + (1 - LOWEST_RATE) * cosine))
        micros = micro_batches([samples[row] for row in rows], budget, share=packs)
        trained = sum(micro.old.numel() for micro in micros)
        # The gradient is divided by the number of trained tokens later.
        factor = observation_coefficient * trained / max(sum(m.targets.numel() for m in micros) - trained, 1)
        total = 0.0
        with packed_attention(model) if packs else nullcontext():
            for whole in micros:
                micro = whole.to(device)
                with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                    given = micro.tokens, micro.index, micro.targets
                    logp, _ = trained_logprobs(model, *given, temperature=1.0, packing=micro.packing)
                count = micro.old.numel()  # the observation tokens come after the trained ones
                loss = -logp[:count].sum()
                total += float(loss.detach())
                if count < logp.numel():
                    loss = loss - factor * logp[count:].sum()
                loss.backward()
        if math.isfinite(finish_gradient(parameters, trained, max_norm=1.0)):
            optimizer.step()
        zero_gradients(parameters)
        seen += sum(micro.real for micro in micros)
        losses.append(total / trained)
        if progress is not None:
            progress(step + 1, steps, losses[-1])
    for parameter in parameters:
        parameter.grad = None
    del optimizer
    if device.type == "cpu":
        return_freed_memory()
    model.train(training)
    seconds = perf_counter() - started
    tenth = max(1, len(losses) // 10)
    return {
        "loss/first": float(np.mean(losses[:tenth])),
        "loss/last": float(np.mean(losses[-tenth:])),
        "steps": float(len(losses)),
        "tokens": float(seen),
        "seconds": seconds,
        "tokens_per_s": seen / seconds,
    }
