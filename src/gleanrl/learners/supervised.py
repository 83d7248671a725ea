"""Supervised training on masked tokens: the warm start before RL, and baselines to compare RL with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

from gleanrl.algorithms.batch import Sample
from gleanrl.algorithms.microbatch import micro_batches
from gleanrl.learners.logprobs import trained_logprobs
from gleanrl.learners.optim import adamw, finish_gradient, zero_gradients
from gleanrl.types import BoolArray, IntArray
from gleanrl.utils.seeding import derive

WARMUP_STEPS = 20
LOWEST_RATE = 0.1  # where the cosine schedule ends, as a share of the full rate
TOKENS_PER_MICROBATCH = 16384


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
) -> dict[str, float]:
    """Train ``model`` in place to predict the masked tokens of ``examples``; the same seed gives the same weights.

    Uses AdamW with betas (0.9, 0.95), a linear warm-up of 20 steps, a cosine decay to a tenth of the rate, a gradient
    norm of at most 1, and the mean loss over the trained tokens of a batch. Every example is used once before any is
    used twice.

    Args:
        examples: tokens int32[n] and mask bool[n] of those to predict; examples with an empty mask are left out.
        steps: number of optimizer updates, each on ``batch`` examples.
        progress: called after each step with (steps done, steps, loss).
        compute_dtype: dtype of forward passes; default bfloat16 on a GPU and float32 elsewhere.
        deadline_s: stop after this many seconds if that comes before ``steps``; the rate then decays with time.

    Returns:
        loss/first and loss/last (means over the first and the last tenth of the steps, nats a token), steps, tokens
        (number through the model), seconds, tokens_per_s.

    Raises:
        ValueError: if no example has a token to predict.
    """
    samples = []
    for tokens, mask in examples:
        mask = np.array(mask, np.bool_)
        mask[:1] = False  # the first token cannot be predicted
        if not mask.any():
            continue
        end = int(mask.nonzero()[0][-1]) + 1
        nothing: Any = np.zeros(end, np.float32)
        samples.append(
            Sample(
                tokens=np.asarray(tokens[:end], np.int32),
                mask=mask[:end],
                behaviour=nothing,
                advantages=nothing,
                weights=nothing,
                off_policy=False,
                version=-1,
                trajectory=0,
                group=0,
            )
        )
    if not samples:
        raise ValueError("no example has a token to train on")
    device, training = next(model.parameters()).device, model.training
    dtype = compute_dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    model.eval()  # no dropout, as in RL
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(model, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    seen, started = 0, perf_counter()  # seen: number of tokens through the model
    zero_gradients(parameters)
    generator = np.random.default_rng(derive(seed, "supervised"))
    queue: list[int] = []  # passes over all samples, each in its own random order
    for step in range(steps):
        while len(queue) < batch:
            queue += generator.permutation(len(samples)).tolist()
        rows, queue = queue[:batch], queue[batch:]
        elapsed = perf_counter() - started
        if deadline_s is not None and elapsed >= deadline_s:
            break
        done = max(step / steps, elapsed / deadline_s if deadline_s else 0.0)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = lr * (warmup * (LOWEST_RATE + (1 - LOWEST_RATE) * cosine))
        micros = micro_batches([samples[row] for row in rows], TOKENS_PER_MICROBATCH)
        total = 0.0
        for whole in micros:
            micro = whole.to(device)
            with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                logp, _ = trained_logprobs(model, micro.tokens, micro.index, micro.targets, temperature=1.0)
            loss = -logp.sum()
            loss.backward()
            total += float(loss.detach())
        trained = sum(micro.targets.numel() for micro in micros)
        if math.isfinite(finish_gradient(parameters, trained, max_norm=1.0)):
            optimizer.step()
        zero_gradients(parameters)
        seen += sum(micro.real for micro in micros)
        losses.append(total / trained)
        if progress is not None:
            progress(step + 1, steps, losses[-1])
    for parameter in parameters:
        parameter.grad = None
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
