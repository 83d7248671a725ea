"""Tests of a learner with ``trains=False``: it has no optimizer or gradients and loads any checkpoint's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl.config.settings import CriticSettings, LossSettings
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.torch import TorchLearner
from tests.builders import tiny_model
from tests.learners.many import led
from tests.learners.test_sharded import make
from tests.learners.test_torch import make_batch, make_learner, update

pytestmark = pytest.mark.xdist_group("ranks")  # tests.learners.many.led

LOSS = LossSettings(kl_coefficient=0.1)
Weights = dict[str, torch.Tensor]


def looking(loss: LossSettings = LOSS, **options: Any) -> TorchLearner:
    seed = 0 if "lora_rank" in options else 1  # adapters need their own base model
    return make_learner(loss=loss, trains=False, model=tiny_model(seed), **options)


def same(ours: TorchLearner, theirs: Weights) -> None:
    assert ours.weights().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.weights().items())


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}, {"critic": CriticSettings(model="own")}])
def test_an_untrained_learner_loads_a_checkpoint_s_weights_without_optimizer_or_critic(
    options: dict[str, Any], tmp_path: Path
) -> None:
    trained, samples = make_learner(loss=LOSS, **options), make_batch(0, LOSS).samples
    if "critic" not in options:
        update(trained, make_batch(0, LOSS))
    trained.save(tmp_path / "one")
    learner = looking(**options)
    learner.load(tmp_path / "one")
    same(learner, dict(trained.weights()))
    assert learner.engine.score(samples)[0].logprobs == pytest.approx(trained.engine.score(samples)[0].logprobs)
    engine: Any = learner.engine
    assert all(parameter.grad is None for parameter in engine.backend.model.parameters())
    assert not hasattr(engine, "optimizer")
    assert engine.backend.reference is None
    assert engine.backend.critic is None


def test_an_untrained_learner_keeps_its_given_reference(tmp_path: Path) -> None:
    trained, samples = make_learner(loss=LOSS), make_batch(0, LOSS).samples
    trained.save(tmp_path)
    learner = looking(reference=tiny_model(2))
    before = learner.engine.score(samples, reference=True)[0].logprobs
    learner.load(tmp_path)
    same(learner, dict(trained.weights()))
    assert learner.engine.score(samples, reference=True)[0].logprobs == pytest.approx(before)


def spread(ranks: Ranks, folder: Path) -> Weights:
    learner = make(ranks, LOSS, torch.float32, critic=CriticSettings(model="own"))
    learner.save(folder)
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


@pytest.mark.slow
def test_an_untrained_learner_loads_the_weights_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    weights = led(2, spread, tmp_path / "two")
    learner = looking()
    learner.load(tmp_path / "two")
    same(learner, weights)
