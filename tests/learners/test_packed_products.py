"""Linear layers by packed weights: values and gradients, and weights that change."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from gleanrl.learners import logprobs
from gleanrl.learners.fused_head import head_logprobs
from gleanrl.learners.optim import adamw
from gleanrl.learners.packed_products import PackedLinear, packed_products, use_packed_products
from gleanrl.utils.products import can_pack

pytestmark = pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this installation does not pack bfloat16")

SIZES: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(192, 256), nn.SiLU(), nn.Linear(256, 128, bias=False))
    use_packed_products(model)
    assert all(type(layer) is PackedLinear for layer in (model[0], model[2]))
    return model


def gradients(model: nn.Module, x: Tensor, to_out: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    model(x).backward(to_out)
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


@contextmanager
def cast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16), packed_products():
        yield


def test_values_and_gradients_are_as_near_to_float64_as_those_of_plain_layers() -> None:
    model = make_model()
    plain = copy.deepcopy(model)
    for layer in plain:
        if isinstance(layer, nn.Linear):
            layer.__class__ = nn.Linear
    exact = copy.deepcopy(plain).double()
    x, to_out = torch.randn(3, 100, 192), torch.randn(3, 100, 128)
    with cast():
        packed = [model(x), *gradients(model, x, to_out.bfloat16())]
        usual = [plain(x), *gradients(plain, x, to_out.bfloat16())]
    for found, by_plain, expected in zip(
        packed, usual, [exact(x.double()), *gradients(exact, x.double(), to_out.double())], strict=True
    ):
        error, allowed = ((each.double() - expected).norm() / expected.norm() for each in (found, by_plain))
        assert error < 1.1 * allowed + 1e-4
        assert error < 0.02


def test_a_changed_weight_is_packed_again() -> None:
    model = make_model()
    x = torch.randn(5, 192)
    optimizer = adamw(model, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)

    def same_as_a_new_layer() -> bool:
        new = make_model()
        new.load_state_dict(model.state_dict())
        with cast(), torch.no_grad():
            return torch.equal(model(x), new(x))

    with cast():
        before = model(x)
        before.float().sum().backward()
    optimizer.step()
    with cast():
        assert not torch.equal(model(x), before)
    assert same_as_a_new_layer()
    model.load_state_dict({name: 2 * weight for name, weight in model.state_dict().items()})
    assert same_as_a_new_layer()
    model[2].weight = nn.Parameter(torch.randn(128, 256))
    assert same_as_a_new_layer()


def test_gradients_are_of_the_weights_of_the_forward_pass() -> None:
    model = make_model()
    x = torch.randn(5, 192, requires_grad=True)
    with cast():
        out = model(x).float().sum()
    with torch.no_grad():
        model[2].weight.zero_()
    out.backward()
    assert x.grad is not None
    assert x.grad.abs().max() > 0


def test_frozen_weights_pass_the_gradient_on() -> None:
    model = make_model().requires_grad_(False)
    x = torch.randn(5, 192, requires_grad=True)
    with cast():
        model(x).float().sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() > 0
    assert model[0].weight.grad is None


def test_without_autocast_a_layer_is_a_usual_one() -> None:
    model = make_model()
    x = torch.randn(5, 192)
    expected = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
    assert torch.equal(model[0](x), expected)
    assert model.double()(x.double()).dtype == torch.float64


def test_the_head_stays_a_plain_layer_so_that_large_logits_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    use_packed_products(model)
    assert any(type(module) is PackedLinear for module in model.modules())
    monkeypatch.setattr(logprobs, "LARGE", 0)
    rows: list[int] = []

    def watched(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        rows.append(hidden.shape[0])
        return head_logprobs(hidden, *arguments)

    monkeypatch.setattr(logprobs, "head_logprobs", watched)
    with cast():
        logprobs.trained_logprobs(model, torch.arange(12)[None], torch.arange(8), torch.arange(8), 1.0)
    assert rows == [8]


def test_inputs_are_kept_only_for_weights_with_a_gradient() -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    model = make_model().requires_grad_(False)
    x = torch.randn(5, 192, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), cast():
        model[2](model[0](x)).float().sum().backward()
    assert kept == []
    assert x.grad is not None


def test_a_weight_in_float64_is_not_cast_as_under_autocast() -> None:
    model = make_model().double()
    with cast():
        assert model(torch.randn(5, 192).double()).dtype == torch.float64


def test_an_input_may_be_a_single_vector() -> None:
    model = make_model()
    x, to_out = torch.randn(192), torch.randn(128).bfloat16()
    with cast():
        one, many = gradients(model, x, to_out), gradients(model, x[None], to_out[None])
    for found, expected in zip(one, many, strict=True):
        torch.testing.assert_close(found, expected.view(found.shape), rtol=0.02, atol=0.02 * float(expected.std()))
