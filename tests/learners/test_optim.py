"""Tests of the learning-rate schedule, gradient scaling and clipping, and the optimizer's weight decay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.config.settings import LearnerSettings
from gleanrl.learners.optim import adamw, finish_gradient, learning_rate, zero_gradients
from tests.builders import tiny_model


def rates(total: int, **settings: Any) -> list[float]:
    return [learning_rate(LearnerSettings.model_validate(settings), step, total) for step in range(total)]


def test_the_learning_rate_warms_up_and_decays_as_configured() -> None:
    assert rates(4, lr=1.0) == [1.0] * 4
    assert rates(5, lr=1.0, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(5, lr=1.0, decay="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates(5, lr=2.0, decay="cosine", min_lr_ratio=0.5) == pytest.approx(
        [2.0, 1 + (1 + math.sqrt(0.5)) / 2, 1.5, 1 + (1 - math.sqrt(0.5)) / 2, 1.0]
    )


@given(
    total=st.integers(1, 40),
    warmup=st.integers(0, 50),
    decay=st.sampled_from(["constant", "linear", "cosine"]),
    lowest=st.floats(0, 1),
)
def test_the_rate_rises_then_never_rises_again(total: int, warmup: int, decay: str, lowest: float) -> None:
    values = rates(total, lr=1.0, warmup_steps=warmup, decay=decay, min_lr_ratio=lowest)
    top = min(warmup, total)
    assert values[:top] == sorted(values[:top])
    assert values[top:] == sorted(values[top:], reverse=True)
    assert all(lowest - 1e-9 <= value <= 1 for value in values[top:])


@pytest.mark.parametrize("length", [0.01, 30.0])
def test_a_gradient_is_divided_then_clipped(length: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2)]
    directions = torch.tensor([[1.0, -2.0, 2.0], [0.0, 4.0, 0.0]], dtype=torch.float64) / 5
    for parameter, direction in zip(parameters, directions, strict=True):
        parameter.grad = 8 * length * direction
    assert finish_gradient(parameters, 8.0, max_norm=1.5) == pytest.approx(length)
    for parameter, direction in zip(parameters, directions, strict=True):
        torch.testing.assert_close(parameter.grad, direction * min(length, 1.5), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_gradient_gives_a_non_finite_norm_and_is_not_scaled(poison: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([poison, 1.0])
    assert not math.isfinite(finish_gradient([parameter], 2.0, max_norm=1.0))
    assert parameter.grad[1] == 1.0


def test_weight_decay_applies_to_trained_matrices_only() -> None:
    model = tiny_model()
    model.model.embed_tokens.weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw(model, lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    zero_gradients([p for p in model.parameters() if p.requires_grad])
    optimizer.step()
    for name, parameter in model.named_parameters():
        decayed = parameter.requires_grad and parameter.ndim >= 2
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if decayed else 1.0))
