"""Tests of ``head_logprobs``, which avoids whole logits: values, gradients and memory against plain log-softmax."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gleanrl.learners import fused_head
from gleanrl.learners.fused_head import head_logprobs
from tests.strategies import examples

Values = tuple[Tensor, Tensor]


class Largest(TorchDispatchMode):
    """Records the largest number of elements of any tensor that an operation returns, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)), 0)
        return out


@contextmanager
def blocks(rows: int, columns: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_head, "BLOCKS", {"cpu": (rows, columns)})
        yield


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor

    def twin(self) -> Case:
        """Return a copy with the same values as separate leaf tensors."""
        leaves = (None if t is None else t.detach().clone().requires_grad_() for t in self.inputs)
        return Case(*leaves, self.targets)  # type: ignore[misc]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.hidden, self.weight, self.bias

    @property
    def grads(self) -> list[Tensor | None]:
        return [t.grad for t in self.inputs if t is not None]


def make_case(
    seed: int, rows: int, vocabulary: int, *, scale: float = 1.0, bias: bool = True, size: int = 5, double: bool = True
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if double else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    return Case(
        normal(rows, size), scale * normal(vocabulary, size), normal(vocabulary) if bias else None, targets
    ).twin()


def plain(case: Case, temperature: float) -> Values:
    logits = case.hidden @ case.weight.T
    log_p = ((logits if case.bias is None else logits + case.bias) / temperature).log_softmax(-1)
    return log_p.gather(-1, case.targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def pull(values: Values, weights: tuple[Tensor | None, Tensor | None]) -> None:
    """Backward of the weighted sum; a weight of None leaves its value out of the graph."""
    terms = [(w * v).sum() for w, v in zip(weights, values, strict=True) if w is not None]
    torch.stack(terms).sum().backward()


@settings(max_examples=examples(80))
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 12),
    vocabulary=st.integers(1, 30),
    block=st.tuples(st.integers(1, 14), st.integers(1, 35)),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    scale=st.sampled_from([0.1, 1.0, 50.0]),
    bias=st.booleans(),
    through=st.sampled_from(["both", "logp", "entropy"]),
)
def test_values_and_gradients_equal_plain_log_softmax(
    seed: int,
    rows: int,
    vocabulary: int,
    block: tuple[int, int],
    temperature: float,
    scale: float,
    bias: bool,
    through: str,
) -> None:
    case = make_case(seed, rows, vocabulary, scale=scale, bias=bias)
    twin = case.twin()
    of_logp, of_entropy = torch.randn(2, rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights = (None if through == "entropy" else of_logp, None if through == "logp" else of_entropy)
    with blocks(*block):
        ours = head_logprobs(*case.inputs, case.targets, temperature)
        pull(ours, weights)
    theirs = plain(twin, temperature)
    pull(theirs, weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(case.grads, twin.grads, rtol=1e-8, atol=1e-9)


@settings(max_examples=examples(30))
@given(seed=st.integers(0, 2**31), columns=st.integers(1, 40), temperature=st.sampled_from([0.6, 1.0]))
def test_large_logits_do_not_overflow(seed: int, columns: int, temperature: float) -> None:
    """Float32 logits of about ten thousand, positive and negative, with the largest in any block of columns."""
    case = make_case(seed, 7, 40, scale=5e3, bias=False, double=False)
    exact = Case(case.hidden.double(), case.weight.double(), None, case.targets).twin()
    with blocks(3, columns):
        ours = head_logprobs(*case.inputs, case.targets, temperature)
        pull(ours, (torch.ones(7), torch.ones(7)))
    theirs = plain(exact, temperature)
    assert float(theirs[0].detach().min()) < -1e3
    torch.testing.assert_close(ours[0].double(), theirs[0], rtol=1e-4, atol=0.05)
    assert all(torch.isfinite(value).all() for value in (*ours, *(g for g in case.grads if g is not None)))


@pytest.mark.parametrize("columns", [1, 2, 6])
def test_a_token_that_a_bias_excludes_adds_nothing(columns: int) -> None:
    case = make_case(0, rows=4, vocabulary=6, double=False)
    assert case.bias is not None
    case.targets.clamp_(min=2)
    fewer = Case(case.hidden, case.weight[2:], case.bias[2:], case.targets - 2).twin()
    with torch.no_grad():
        case.bias[:2] = -torch.inf
    weights = torch.ones(4), torch.full((4,), 0.1)
    with blocks(3, columns):
        ours = head_logprobs(*case.inputs, case.targets)
        pull(ours, weights)
    theirs = plain(fewer, 1.0)
    pull(theirs, weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    of_hidden, *of_head = case.grads
    torch.testing.assert_close([of_hidden, *(g[2:] for g in of_head)], fewer.grads, rtol=1e-5, atol=1e-6)  # type: ignore[index]
    assert not any(g[:2].any() for g in of_head)  # type: ignore[index]


def test_gradients_equal_finite_differences() -> None:
    case = make_case(0, 4, 7)
    with blocks(3, 2):
        assert torch.autograd.gradcheck(
            lambda h, w, b: head_logprobs(h, w, b, case.targets, 0.7), case.inputs, fast_mode=False
        )


@pytest.mark.parametrize("trained", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_required_gradients_are_computed(trained: tuple[bool, bool, bool]) -> None:
    case = make_case(1, 6, 11)
    whole = case.twin()
    for tensor, wanted in zip(case.inputs, trained, strict=True):
        assert tensor is not None
        tensor.requires_grad_(wanted)
    for one in (case, whole):
        with blocks(4, 4):
            pull(head_logprobs(*one.inputs, one.targets, 0.9), (torch.arange(6.0).double(), torch.ones(6).double()))
    for ours, theirs, wanted in zip(case.grads, whole.grads, trained, strict=True):
        if wanted:
            torch.testing.assert_close(ours, theirs)
        else:
            assert ours is None


def test_zero_rows_give_empty_values_and_zero_gradients() -> None:
    case = make_case(2, 0, 9)
    logp, entropy = head_logprobs(*case.inputs, case.targets)
    assert logp.shape == entropy.shape == (0,)
    (logp.sum() + entropy.sum()).backward()
    assert all(grad is not None and not grad.any() for grad in case.grads)


def test_a_second_derivative_is_refused() -> None:
    case = make_case(3, 3, 5)
    logp, _ = head_logprobs(*case.inputs, case.targets)
    (slope,) = torch.autograd.grad((logp**2).sum(), case.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_autocast_rounds_the_logits_as_a_linear_layer_and_keeps_the_rest_in_float32() -> None:
    case = make_case(4, 9, 50, size=16, double=False)
    twin = case.twin()
    weights = (torch.linspace(-1, 1, 9), torch.linspace(1, 2, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with blocks(4, 50):  # one block of columns: the same products as the linear layer
            ours = head_logprobs(*case.inputs, case.targets, 0.8)
            pull(ours, weights)
        logits = torch.nn.functional.linear(twin.hidden, twin.weight, twin.bias)
        assert logits.dtype == torch.bfloat16
    log_p = (logits.float() / 0.8).log_softmax(-1)
    theirs = log_p.gather(-1, twin.targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    pull(theirs, weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for mine, other in zip(case.grads, twin.grads, strict=True):
        assert mine is not None
        assert other is not None
        assert mine.dtype == torch.float32
        assert float((mine - other).norm() / other.norm()) < 0.01


def test_gradients_of_bfloat16_weights_are_summed_in_float32() -> None:
    """A sum of many equal terms that is kept in bfloat16 stops growing at 256 terms."""
    ones = torch.ones(2048, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    with blocks(1, 2):
        head_logprobs(ones, weight, None, torch.zeros(2048, dtype=torch.long))[0].sum().backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [1024.0, -1024.0]


@pytest.mark.parametrize("frozen", [False, True])
def test_no_tensor_of_tokens_times_vocabulary_is_created(frozen: bool) -> None:
    rows, vocabulary, size = 96, 640, 8
    case = make_case(5, rows, vocabulary, size=size)
    case.weight.requires_grad_(not frozen)

    def largest(way: Any) -> int:
        with Largest() as seen:
            pull(way(), (torch.ones(rows).double(), torch.ones(rows).double()))
        return seen.elements

    with blocks(32, 64):
        assert largest(lambda: head_logprobs(*case.inputs, case.targets, 1.2)) <= max(32 * 64, vocabulary * size)
    assert largest(lambda: plain(case, 1.2)) == rows * vocabulary
