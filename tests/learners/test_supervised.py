"""Tests of ``fine_tune``: supervised training on masked tokens, its metrics, determinism and deadline."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gleanrl.learners.freed_memory import keep_freed_memory, return_freed_memory
from gleanrl.learners.supervised import fine_tune
from gleanrl.types import BoolArray, IntArray
from tests.builders import VOCABULARY, tiny_model


def make_examples(count: int = 24) -> list[tuple[IntArray, BoolArray]]:
    """Examples whose last two, trained tokens are the successor of the token before; all others are noise."""
    random = np.random.default_rng(0)
    examples: list[tuple[IntArray, BoolArray]] = []
    for _ in range(count):
        question = int(random.integers(1, VOCABULARY - 2))
        context = random.integers(1, VOCABULARY, int(random.integers(2, 9)))
        tokens = np.array([*context, question, question + 1, question + 1], np.int32)
        mask = np.zeros(tokens.size, np.bool_)
        mask[-2:] = True
        examples.append((tokens, mask))
    return examples


def weights_after(seed: int, **options: object) -> list[torch.Tensor]:
    model = tiny_model(hidden=32)
    fine_tune(model, make_examples(), **{"steps": 5, "batch": 7, "lr": 1e-2, "seed": seed, **options})  # type: ignore[arg-type]
    return [parameter.detach() for parameter in model.parameters()]


def test_training_learns_the_examples_and_reports_its_progress() -> None:
    calls: list[tuple[int, int, float]] = []
    model = tiny_model(hidden=32)
    metrics = fine_tune(
        model, make_examples(), steps=60, batch=8, lr=1e-2, seed=0, progress=lambda *call: calls.append(call)
    )
    assert metrics["loss/first"] > 3
    assert metrics["loss/last"] < 0.7 < metrics["loss/first"]
    assert [(done, of) for done, of, _ in calls] == [(step, 60) for step in range(1, 61)]
    assert metrics["steps"] == 60
    assert metrics["tokens_per_s"] == pytest.approx(metrics["tokens"] / metrics["seconds"])
    tokens, mask = make_examples()[0]
    logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    assert logits[:-1][mask[1:]].argmax(-1).tolist() == tokens[1:][mask[1:]].tolist()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_seed_decides_everything() -> None:
    first, again, other = weights_after(1), weights_after(1), weights_after(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_one_step_is_the_gradient_of_the_mean_over_masked_tokens() -> None:
    examples = make_examples(3)
    model, plain = tiny_model(dtype=torch.float64), tiny_model(dtype=torch.float64)
    fine_tune(model, examples, steps=1, batch=3, lr=1e-2, seed=0)
    losses: list[torch.Tensor] = []
    for tokens, mask in examples:
        ids = torch.from_numpy(tokens.astype(np.int64))
        logp = plain(ids[None]).logits[0].log_softmax(-1)
        losses += [-logp[t - 1, ids[t]] for t in mask.nonzero()[0]]
    torch.stack(losses).mean().backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.AdamW(plain.parameters(), lr=1e-2 / 20, betas=(0.9, 0.95), weight_decay=0.0).step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        clear = theirs.grad.abs() > 1e-6  # Adam's first step is the sign of the gradient
        torch.testing.assert_close(ours[clear], theirs[clear], rtol=1e-6, atol=1e-7)


def test_a_deadline_stops_early() -> None:
    metrics = fine_tune(tiny_model(), make_examples(), steps=100_000, batch=8, lr=1e-3, seed=0, deadline_s=0.3)
    assert 1 <= metrics["steps"] < 100_000
    assert metrics["seconds"] < 5


def test_a_deadline_that_has_already_passed_allows_one_step() -> None:
    metrics = fine_tune(tiny_model(), make_examples(), steps=9, batch=8, lr=1e-3, seed=0, deadline_s=0.0)
    assert metrics["steps"] == 1
    assert metrics["loss/first"] == metrics["loss/last"] > 0


def test_nothing_to_learn_is_an_error() -> None:
    with pytest.raises(ValueError, match="no example"):
        fine_tune(tiny_model(), [(np.arange(3, dtype=np.int32), np.zeros(3, np.bool_))], steps=1, batch=1, lr=1, seed=0)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries decide by themselves")
def test_freed_memory_is_kept_up_to_a_limit() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    keep_freed_memory()
    large = torch.ones(2**26)  # 256 MiB
    before = resident()
    del large
    return_freed_memory(kept=2**40)
    assert resident() > before - 2**27
    return_freed_memory()
    assert resident() < before - 2**27


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries decide by themselves")
def test_memory_that_each_update_needs_is_kept_and_growth_is_returned() -> None:
    code = """
import os, torch
from pathlib import Path
from gleanrl.learners.freed_memory import keep_freed_memory, return_freed_memory
def after_update(blocks):
    tensors = [torch.ones(2**20) for _ in range(blocks)]  # 4 MiB each
    tensors.clear()
    return_freed_memory(kept=2**20)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
keep_freed_memory()
sizes = [after_update(64) for _ in range(5)]
grown = after_update(128)
print(min(sizes) > max(sizes) - 2**26, grown < min(sizes) - 2**27)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries decide by themselves")
def test_memory_in_use_does_not_count_as_freed() -> None:
    """A process of its own, in which the model's weights are allocated before freed memory is kept."""
    code = """
import os, torch
from pathlib import Path
from gleanrl.learners.freed_memory import keep_freed_memory, return_freed_memory
weights = torch.ones(2**26)  # 256 MiB
keep_freed_memory()
blocks = [torch.ones(2**20) for _ in range(32)]  # 128 MiB
del blocks
last = torch.ones(1000)
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
return_freed_memory(kept=200 * 2**20)
print(before - resident() < 2**26)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
