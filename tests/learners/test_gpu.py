"""Tests of the learner on a GPU against the same learner on a CPU."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.utils.import_utils import is_flash_attn_2_available

from gleanrl.algorithms.batch import Batch
from gleanrl.algorithms.microbatch import micro_batches
from gleanrl.config.settings import CriticSettings, LearnerSettings, LossSettings
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.models import FLASH
from gleanrl.learners.supervised import fine_tune
from gleanrl.learners.torch import TorchLearner
from tests.builders import tiny_model
from tests.learners.many import asked, engine_of, led
from tests.learners.test_megatron import summed
from tests.learners.test_sharded import GROUPS, STEPS, batch_of
from tests.learners.test_supervised import make_examples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "gspo, masked": ({"name": "gspo", "correction": "mask"}, {"old_logprobs": "recompute"}),
    "reference and entropy": ({"kl_coefficient": 0.1, "entropy_coefficient": 0.01}, {}),
    "checkpointing": ({}, {"activation_checkpointing": True, "offload_activations": True}),
    "own critic": ({}, {"critic": CriticSettings(model="own")}),
}


def make(device: torch.device, loss: LossSettings, ranks: Ranks | None = None, **options: Any) -> TorchLearner:
    own = {key: options.pop(key) for key in ("critic", "compute_dtype") if key in options}
    return TorchLearner(
        tiny_model(0, torch.float32, kv_heads=2).to(device),
        LearnerSettings.model_validate({"tokens_per_microbatch": 100, "attn_implementation": "sdpa", **options}),
        loss,
        total_steps=STEPS,
        groups_per_step=GROUPS,
        pad_token=0,
        temperature=0.9,
        **own,
        **engine_of(ranks),
    )


def gradients(engine: Any) -> dict[str, Tensor]:
    """Return the whole gradients of all parameters on the CPU."""
    found: dict[str, Tensor] = {}
    for name, parameter in engine.backend.model.named_parameters():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        found[name] = gradient.cpu().clone()
    return found


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """Assert that tensors agree to ``tolerance`` times the largest element of each tensor."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        apart = (ours[name] - tensor).abs().max()
        assert apart <= tolerance * tensor.abs().max().clamp_min(1e-6), name


def assign_advantages(batch: Batch) -> Batch:
    """Return the batch with values and returns for a critic."""
    samples = [replace(s, values=0.1 * s.advantages, returns=s.advantages * s.mask) for s in batch.samples]
    own = iter(samples)
    return Batch(tuple(replace(part, samples=tuple(next(own) for _ in part.samples)) for part in batch.parts))


def test_a_micro_batch_is_unchanged_after_the_copy_to_the_gpu() -> None:
    (micro, *_) = micro_batches(batch_of(0, LossSettings()).samples, 10_000)
    moved = micro.to(DEVICE)
    for field in fields(micro):
        ours, theirs = getattr(moved, field.name), getattr(micro, field.name)
        if isinstance(theirs, Tensor):
            assert ours.device.type == DEVICE.type
            assert torch.equal(ours.cpu(), theirs), field.name
        else:
            assert ours == theirs


@pytest.mark.parametrize("name", CASES)
def test_an_update_in_float32_equals_that_on_a_cpu(name: str) -> None:
    """Gradients agree to 1e-4 of each tensor's largest element; losses, norms and log-probs agree to 1e-4."""
    loss_options, options = CASES[name]
    loss, told, scores, found = LossSettings.model_validate(loss_options), [], [], []
    for device in (torch.device("cpu"), DEVICE):
        learner = make(device, loss, compute_dtype=torch.float32, **options)
        batch = assign_advantages(batch_of(0, loss)) if "critic" in options else batch_of(0, loss)
        learner.engine.backward(batch.samples)
        found.append(gradients(learner.engine))
        learner.engine.discard()
        scores.append(learner.engine.score(batch.samples))
        told.append(asyncio.run(learner.update(batch)))
    close(found[1], found[0], 1e-4)
    for ours, theirs in zip(scores[1], scores[0], strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert ours.entropy == pytest.approx(theirs.entropy, abs=1e-4)
    for metric in ("loss/policy", "learner/grad_norm", "tokens/trained"):
        assert told[1][metric] == pytest.approx(told[0][metric], rel=1e-4, abs=1e-5), metric


def test_bfloat16_passes_train_float32_weights() -> None:
    """With bfloat16, a GPU's default, norms agree to 5 % and log-probs to 0.1, and rewarded tokens gain probability."""
    loss = LossSettings()
    exact, learner = make(DEVICE, loss, compute_dtype=torch.float32), make(DEVICE, loss, lr=3e-3)
    batch = batch_of(0, loss)
    before = learner.engine.score(batch.samples)
    rounded = False
    for ours, theirs in zip(before, exact.engine.score(batch.samples), strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=0.1)
        rounded |= bool(np.abs(ours.logprobs - theirs.logprobs).max() > 1e-4)
    assert rounded == (DEVICE.type == "cuda")
    first = asyncio.run(learner.update(batch))
    assert first["learner/grad_norm"] == pytest.approx(asyncio.run(exact.update(batch))["learner/grad_norm"], rel=0.05)
    for _ in range(10):
        asyncio.run(learner.update(batch))
    assert {str(tensor.dtype) for tensor in learner.weights().values()} == {"torch.float32"}
    after = learner.engine.score(batch.samples)
    gained = [
        float((s.advantages * s.mask * (new.logprobs - old.logprobs)).sum())
        for s, old, new in zip(batch.samples, before, after, strict=True)
    ]
    assert sum(gained) > 0


def test_fine_tuning_in_bfloat16_halves_the_loss() -> None:
    model = tiny_model(hidden=32).to(DEVICE)
    told = fine_tune(model, make_examples(), steps=60, batch=12, lr=1e-2, seed=0)
    assert told["loss/last"] < told["loss/first"] / 2


@pytest.mark.skipif(not is_flash_attn_2_available(), reason="needs the flash-attn package")
def test_flash_attention_gives_the_log_probs_of_the_plain_kernel() -> None:
    samples = batch_of(0, LossSettings()).samples
    plain, flash = (make(DEVICE, LossSettings(), attn_implementation=name) for name in ("sdpa", "auto"))
    assert flash.engine.backend.model.config._attn_implementation == FLASH  # type: ignore[attr-defined]
    for ours, theirs in zip(flash.engine.score(samples), plain.engine.score(samples), strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=0.1)
    assert asyncio.run(flash.update(batch_of(0, LossSettings())))["learner/grad_norm"] > 0


def spread(ranks: Ranks | None, **options: Any) -> dict[str, Any]:
    """Return the gradients of a batch, the gradient norms of two updates, and the names of the weights."""
    loss = LossSettings(kl_coefficient=0.1)
    device = torch.device("cpu") if ranks is None else ranks.device
    learner = make(device, loss, ranks, compute_dtype=torch.float32, **options)
    learner.engine.backward(batch_of(0, loss).samples)
    found = asked(learner.engine, summed if options.get("backend") == "megatron" else gradients)
    learner.engine.discard()
    told = [asyncio.run(learner.update(batch_of(step, loss))) for step in range(2)]
    whole = {name: tensor.cpu().clone() for name, tensor in learner.weights().items()}
    return {"gradients": found, "norms": [each["learner/grad_norm"] for each in told], "names": set(whole)}


OFFLOADED = {"activation_checkpointing": True, "offload_activations": True, "offload_state": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp, 2": (2, {}),
    "fsdp, offloaded": (2, OFFLOADED),
    "megatron, 1": (1, {"backend": "megatron"}),
    "megatron, tensor 2": (2, {"backend": "megatron", "tensor_parallel": 2}),
    "megatron, pipeline 2": (2, {"backend": "megatron", "pipeline_parallel": 2}),
    "megatron, data 2": (2, {"backend": "megatron"}),
    "megatron, distributed optimizer": (2, {"backend": "megatron", "distributed_optimizer": True}),
    "megatron, 2 x 2 x 2": (8, {"backend": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2}),
}


def peak_of(ranks: Ranks, **options: Any) -> tuple[int, int]:
    """Return the largest number of bytes on rank 0's GPU in an update, and the number of the model's parameters."""
    model = tiny_model(0, torch.float32, hidden=1024, kv_heads=2)
    size = sum(parameter.numel() for parameter in model.parameters())
    settings = LearnerSettings.model_validate(options)
    given = {"total_steps": STEPS, "groups_per_step": GROUPS, "pad_token": 0, "temperature": 0.9}
    learner = TorchLearner(model.to(ranks.device), settings, LossSettings(), **given, **engine_of(ranks))
    for step in range(2):
        torch.cuda.reset_peak_memory_stats()
        asyncio.run(learner.update(batch_of(step, LossSettings())))
    return torch.cuda.max_memory_allocated(), size


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_offloading_takes_most_of_the_state_from_the_gpu() -> None:
    (kept, size), (offloaded, _) = (led(2, partial(peak_of, offload_state=on), cuda=True) for on in (False, True))
    print(f"peak of {size} parameters on two ranks: {kept} bytes, {offloaded} with offload_state")
    assert kept - offloaded > 0.6 * 16 * size / 2  # weights, gradients and two moments in float32


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_over_nccl_have_the_gradients_of_one_process(layout: str) -> None:
    count, options = LAYOUTS[layout]
    if torch.cuda.device_count() < count and DEVICE.type == "cuda":
        pytest.skip(f"needs {count} CUDA devices")
    if "backend" in options:
        pytest.importorskip("megatron.core", reason="needs megatron-core: make megatron installs it")
    one, many = spread(None), led(count, partial(spread, **options), cuda=DEVICE.type == "cuda")
    if not options.get("distributed_optimizer"):  # with it, a rank has the sums of its share only
        close(many["gradients"], one["gradients"], 1e-4)
    assert many["norms"][0] == pytest.approx(one["norms"][0], rel=1e-4)
    assert many["norms"][1] == pytest.approx(one["norms"][1], rel=1e-2)  # Adam's first step amplifies rounding
    assert many["names"] == one["names"]
