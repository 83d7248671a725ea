"""Log-probs of selected positions against the plain way, values and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.learners import logprobs
from gleanrl.learners.logprobs import selected_log_softmax, trained_logprobs
from tests.builders import VOCABULARY, tiny_model


def plain(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(targets), distribution.entropy()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 30),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    scale=st.sampled_from([0.1, 1.0, 50.0]),
    block=st.sampled_from([1, 40, 1 << 20]),
)
def test_values_and_gradients_equal_the_plain_way(
    seed: int, rows: int, temperature: float, scale: float, block: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(rows, 13, generator=generator, dtype=torch.float64)).requires_grad_()
    twin = logits.detach().clone().requires_grad_()
    targets = torch.randint(0, 13, (rows,), generator=generator)
    weights = torch.randn(2, rows, generator=generator, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "ROWS_AT_ONCE", block)
        ours = selected_log_softmax(logits, targets, temperature)
        sum((w * v).sum() for w, v in zip(weights, ours, strict=True)).backward()  # type: ignore[union-attr]
    theirs = plain(twin, targets, temperature)
    sum((w * v).sum() for w, v in zip(weights, theirs, strict=True)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(logits.grad, twin.grad, rtol=1e-9, atol=1e-10)


def test_gradients_by_finite_differences() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, 2, 2])
    assert torch.autograd.gradcheck(lambda x: selected_log_softmax(x, targets, 0.7), (logits,))


def test_bfloat16_logits_are_computed_in_float32() -> None:
    torch.manual_seed(0)
    logits, targets = (8 * torch.randn(6, 50)).bfloat16(), torch.arange(6)
    logp, entropy = selected_log_softmax(logits, targets)
    torch.testing.assert_close((logp, entropy), plain(logits.float(), targets, 1.0), rtol=1e-5, atol=1e-5)


def test_the_head_sees_trained_positions_only_and_forgets_it() -> None:
    model = tiny_model(dtype=torch.float64)
    tokens = torch.randint(0, VOCABULARY, (3, 11))
    index = torch.tensor([0, 4, 12, 13, 32])
    targets = torch.tensor([1, 2, 3, 4, 5])
    seen: list[int] = []
    watch = model.lm_head.register_forward_hook(lambda _, args, out: seen.append(out.shape[-2] * out.shape[0]))
    logp, entropy = trained_logprobs(model, tokens, index, targets, 1.3)
    assert seen == [5]
    logits = model(input_ids=tokens).logits
    assert seen == [5, 33]
    watch.remove()
    expected = plain(logits.flatten(0, 1)[index], targets, 1.3)
    torch.testing.assert_close((logp, entropy), expected, rtol=1e-10, atol=1e-10)
