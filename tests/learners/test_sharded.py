"""Tests of the sharded learner in real processes: its gradients, losses and weights equal those of one process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen2ForCausalLM

from gleanrl.algorithms.batch import Batch
from gleanrl.config.settings import CriticSettings, LearnerSettings, LossSettings
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.torch import TorchLearner
from gleanrl.utils.errors import UserError
from tests.builders import tiny_model
from tests.learners.many import asked, ended, engine_of, led
from tests.learners.test_torch import LOSSES, make_batch, recomputed
from tests.strategies import NIGHTLY

pytestmark = pytest.mark.xdist_group("ranks")  # tests.learners.many.led

GROUPS, STEPS = 4, 20
Weights = dict[str, Tensor]


def make(ranks: Ranks | None, loss: LossSettings, dtype: torch.dtype, **options: Any) -> TorchLearner:
    own = {key: options.pop(key) for key in ("critic", "seed", "compute_dtype", "published_dtype") if key in options}
    return TorchLearner(
        options.pop("model", None) or tiny_model(0, dtype),
        LearnerSettings.model_validate(options),
        loss,
        total_steps=STEPS,
        groups_per_step=GROUPS,
        pad_token=0,
        temperature=0.9,
        **own,
        **engine_of(ranks),
    )


def batch_of(seed: int, loss: LossSettings) -> Batch:
    batch = make_batch(seed, loss)
    return Batch(tuple(replace(part, samples=tuple(map(recomputed, part.samples))) for part in batch.parts))


# --- gradients ----------------------------------------------------------------------------------
def gradients_of(engine: Any) -> Weights:
    named = dict(engine.backend.model.named_parameters())
    if engine.backend.critic is not None:
        named |= {f"critic.{name}": p for name, p in engine.backend.critic.module.named_parameters()}
    whole = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in named.items()}
    return {name: gradient.clone() for name, gradient in whole.items()}


def all_gradients(ranks: Ranks | None, cases: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return, for each case and batch, the undivided gradients and the statistics of the backward pass.

    There are two batches; unless `NIGHTLY`, cases take them in turn.
    """
    found: dict[str, Any] = {}
    for case, (name, options) in enumerate(cases.items()):
        loss = LossSettings.model_validate(options)
        given = {"tokens_per_microbatch": 60, "old_logprobs": "recompute"}
        learner = make(ranks, loss, torch.float64, **given)
        for seed in range(2) if NIGHTLY else [case % 2]:
            seen = learner.engine.backward(batch_of(seed, loss).samples, version=5, untouched=True)
            gradients = asked(learner.engine, gradients_of)
            found[f"{name} {seed}"] = (gradients, seen)
            learner.engine.discard()
    return found


COUNTS = [2, pytest.param(4, marks=pytest.mark.heavy)]  # processes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", COUNTS)
def test_gradients_equal_those_of_one_process(count: int) -> None:
    """Covers every aggregation, loss and correction; the ranks' shares are uneven and may be empty."""
    one, many = all_gradients(None, LOSSES), led(count, all_gradients, LOSSES)
    assert one.keys() == many.keys()
    for name, (gradients, seen) in one.items():
        others, told = many[name]
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(others[parameter], gradient, rtol=1e-9, atol=1e-11, msg=f"{name} {parameter}")
        assert told.trained == seen.trained
        assert told.loss == pytest.approx(seen.loss, rel=1e-9, abs=1e-11)
        assert told.left_out_tokens == seen.left_out_tokens
        assert told.left_out_sequences == pytest.approx(seen.left_out_sequences)
        assert told.statistics.metrics() == pytest.approx(seen.statistics.metrics(), rel=1e-9)


# --- whole runs ---------------------------------------------------------------------------------
def train(
    ranks: Ranks | None, loss: LossSettings, steps: range, options: dict[str, Any], folder: Any = None, then: Any = None
) -> dict[str, Any]:
    """Train, from the checkpoint in ``folder`` if given, and save in ``then``; return losses, norms and weights."""
    learner = make(ranks, loss, **{"dtype": torch.float32, **options})
    if folder is not None:
        learner.load(folder)
    told = updates(learner, (batch_of(step, loss) for step in steps))
    if then is not None:
        learner.save(then)
    weights = {name: tensor.clone() for name, tensor in learner.weights().items()}
    held = asked(learner.engine, held_of_a_layer)
    return {**series(told), "weights": weights, "metrics": told[-1], "held": held}


def updates(learner: TorchLearner, batches: Iterable[Batch]) -> list[dict[str, float]]:
    """The metrics of each update, on one event loop, as in a run.

    With a loop of its own each update would run on a new thread, for which torch works out again how to shard each
    operation.
    """

    async def each() -> list[dict[str, float]]:
        return [await learner.update(batch) for batch in batches]

    return asyncio.run(each())


def series(told: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    names = {"losses": "loss/policy", "norms": "learner/grad_norm"}
    return {key: [metrics[name] for metrics in told] for key, name in names.items()}


def held_of_a_layer(engine: Any) -> float:
    """Return the share of a layer's matrices that this process computes with."""
    weight = engine.backend.model.get_parameter("model.layers.0.mlp.up_proj.weight")
    if not isinstance(weight, DTensor) or "tensor" not in (weight.device_mesh.mesh_dim_names or ()):
        return 1.0
    return 1 / weight.device_mesh["tensor"].size()


def close(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=tolerance, abs=tolerance)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=tolerance, abs=tolerance)
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, tensor in ours["weights"].items():
        torch.testing.assert_close(tensor, theirs["weights"][name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", COUNTS)
def test_twenty_steps_equal_those_of_one_process(count: int) -> None:
    loss, options = LossSettings(), {"lr": 1e-3, "updates_per_step": 2, "tokens_per_microbatch": 100}
    one, many = train(None, loss, range(STEPS), options), led(count, train, loss, range(STEPS), options)
    assert len(set(one["losses"])) == STEPS
    close(many, one, 1e-5)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reference": ({"kl_coefficient": 0.1, "entropy_coefficient": 0.01}, {}),
    "lora": ({"kl_coefficient": 0.1}, {"lora_rank": 2}),
    "own critic": ({}, {"critic": CriticSettings(model="own")}),
    "shared critic": ({}, {"critic": CriticSettings(model="shared")}),
    "checkpointing": ({}, {"activation_checkpointing": True}),
    "offloaded": ({}, {"activation_checkpointing": True, "offload_activations": True, "offload_state": True}),
    "recomputed": ({"name": "gspo", "correction": "mask"}, {"old_logprobs": "recompute", "epochs": 2}),
}


def valued(learner: TorchLearner, batch: Batch) -> Batch:
    """Return ``batch`` with the values of the learner's critic, and returns that differ from them."""
    values = learner.engine.values(batch.samples)
    own = iter(
        replace(s, values=v, returns=v + s.advantages * s.mask) for s, v in zip(batch.samples, values, strict=True)
    )
    return Batch(tuple(replace(p, samples=tuple(next(own) for _ in p.samples)) for p in batch.parts))


def train_each(ranks: Ranks | None) -> dict[str, Any]:
    """Train three steps with each of `OPTIONS`; return metrics, weights, scores and the critic's values."""
    found: dict[str, Any] = {}
    for name, (loss_options, options) in OPTIONS.items():
        loss = LossSettings.model_validate(loss_options)
        learner = make(ranks, loss, torch.float64, lr=0.01, **options)
        samples = batch_of(30, loss).samples
        batches = (batch_of(step, loss) for step in range(3))
        if "critic" in options:
            batches = (valued(learner, batch) for batch in batches)
        told = updates(learner, batches)
        found[name] = {
            **series(told),
            "weights": {n: t.clone() for n, t in learner.weights().items()},
            "metrics": {
                k: v for k, v in told[-1].items() if k.split("/")[0] in ("loss", "critic", "tokens", "samples")
            },
            "scores": [score for rows in learner.engine.score(samples) for score in rows],
            "values": learner.engine.values(samples) if "critic" in options else [],
        }
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", COUNTS)
def test_learners_with_every_option_equal_those_of_one_process(count: int) -> None:
    one, many = train_each(None), led(count, train_each)
    for name in OPTIONS:
        close(many[name], one[name], 1e-8)
        assert many[name]["metrics"] == pytest.approx(one[name]["metrics"], rel=1e-6, abs=1e-9)
        for kind in ("scores", "values"):
            for ours, theirs in zip(many[name][kind], one[name][kind], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-6), f"{name} {kind}"


# --- tensor parallel ----------------------------------------------------------------------------
def two_headed(dtype: torch.dtype) -> Any:
    """`tiny_model` with as many key and value heads as query heads, so that its heads can be split."""
    return tiny_model(0, dtype, kv_heads=2)


def train_in_layers(ranks: Ranks | None, folder: Any = None, then: Any = None) -> dict[str, Any]:
    loss = LossSettings(kl_coefficient=0.1, entropy_coefficient=0.01)
    options = {"lr": 0.01, "dtype": torch.float64, "tensor_parallel": 1 if ranks is None else 2}
    options |= {"model": two_headed(torch.float64), "tokens_per_microbatch": 60, "max_grad_norm": 0.5}
    return train(ranks, loss, range(2) if folder is None else range(2, 4), options, folder, then)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", COUNTS)
def test_tensor_parallel_learners_equal_one_process(count: int, tmp_path: Path) -> None:
    """Meshes of 1 x 2 and 2 x 2; their checkpoints load in one process, and the reverse."""
    one = train_in_layers(None, then=tmp_path / "one")
    many = led(count, train_in_layers, None, tmp_path / "many")
    assert (one["held"], many["held"]) == (1.0, 0.5)
    close(many, one, 1e-8)
    on = train_in_layers(None, tmp_path / "one")
    close(train_in_layers(None, tmp_path / "many"), on, 1e-8)
    close(led(count, train_in_layers, tmp_path / "one"), on, 1e-8)


def split_aloud(ranks: Ranks) -> list[str]:
    """Return what torch logs in rank 0 while a learner with tensor parallelism is made, updates and publishes."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch.distributed.tensor._redistribute").addHandler(handler)
    learner = make(ranks, LossSettings(), torch.float32, model=two_headed(torch.float32), tensor_parallel=2)
    asyncio.run(learner.update(batch_of(0, LossSettings())))
    dict(learner.weights())
    return said


def test_tensor_parallelism_prints_no_advice_of_torch() -> None:
    assert ended(2, split_aloud) == ([0, 0], [])


def split_badly(ranks: Ranks) -> list[str]:
    said: list[str] = []
    odd = two_headed(torch.float32).config
    odd.intermediate_size = 33
    for model, options in (
        (tiny_model(), {"tensor_parallel": 3}),
        (tiny_model(), {"tensor_parallel": 2}),
        (Qwen2ForCausalLM(odd), {"tensor_parallel": 2}),
        (two_headed(torch.float32), {"tensor_parallel": 2, "lora_rank": 2}),
    ):
        with pytest.raises(UserError) as caught:
            make(ranks, LossSettings(), torch.float32, model=model, **options)
        said.append(str(caught.value))
    return said


def test_impossible_tensor_parallel_settings_are_refused() -> None:
    ragged, heads, features, adapters = led(2, split_badly)
    assert ragged == "learner.tensor_parallel = 3 does not divide the 2 ranks"
    assert heads == "learner.tensor_parallel = 2 does not divide the model's num_key_value_heads = 1"
    assert features == "learner.tensor_parallel = 2 does not divide the 33 features of mlp.gate_proj"
    assert "lora_rank" in adapters
