"""Linear layers that multiply by packed weights, for training in bfloat16 on a CPU.

Under autocast, torch casts the float32 weight of a linear layer to bfloat16 and multiplies by it as it is. oneDNN is
faster by a weight in its own layout (`gleanrl.utils.products`), and its sums are more exact: for a model of 135 M
parameters, the error of the gradient against float32 is 5 % of the norm instead of 9 %. A weight is packed once for all
micro-batches of an update, and so is its transpose for the backward pass; they take 4 bytes per parameter until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gleanrl.utils.products import can_pack, linear_packed, pack

_SMALLEST = 1 << 14  # number of weights of a layer below which packing saves nothing
_kept: ContextVar[dict[nn.Module, _Packed] | None] = ContextVar("packed weights of layers", default=None)


@contextmanager
def packed_products() -> Iterator[None]:
    """Let `PackedLinear` layers pack their weights inside the ``with`` block, in which no weight may change.

    Weights are not compared with their packed copies: an optimizer with fused operations changes them unseen.
    """
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


class PackedLinear(nn.Linear):
    """A linear layer whose weights are packed within `packed_products`, under autocast to bfloat16 on a CPU."""

    def forward(self, input: Tensor) -> Tensor:  # the name of `nn.Linear`
        kept, weight = _kept.get(), self.weight
        if (
            kept is None
            or input.device.type != "cpu"
            or not torch.is_autocast_enabled("cpu")
            or torch.get_autocast_dtype("cpu") != torch.bfloat16
            or type(weight) is not nn.Parameter  # a subclass may be a shard of the weight
            or torch.float64 in (weight.dtype, input.dtype)  # autocast leaves it as it is
            or input.dim() < 2
        ):
            return F.linear(input, weight, self.bias)
        if self not in kept:
            kept[self] = _Packed(weight)
        with torch.autocast("cpu", enabled=False):
            bias = None if self.bias is None else self.bias.to(torch.bfloat16)
            return _Linear.apply(input.to(torch.bfloat16), weight, bias, kept[self])  # type: ignore[no-any-return]


def use_packed_products(model: nn.Module) -> None:
    """Make the linear layers of ``model`` `PackedLinear`, in place, if this installation can pack bfloat16.

    The head remains a plain layer, because `gleanrl.learners.logprobs` multiplies by blocks of its weight.
    """
    if can_pack(torch.bfloat16):
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
        for module in model.modules():
            if type(module) is nn.Linear and module is not head and module.weight.numel() >= _SMALLEST:
                module.__class__ = PackedLinear


class _Packed:
    """A weight in bfloat16, packed, and its transpose, which is packed when it is first needed."""

    def __init__(self, weight: Tensor) -> None:
        self._plain: Tensor | None = weight.detach().to(torch.bfloat16)
        self.weight = pack(self._plain)
        self.transpose: Tensor | None = None

    def pack_transpose(self) -> None:
        if self._plain is not None:
            self.transpose, self._plain = pack(self._plain.mT.contiguous()), None


class _Linear(torch.autograd.Function):
    """``F.linear`` of an input and a bias in bfloat16; ``weight`` only receives the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, packed: _Packed) -> Tensor:
        if ctx.needs_input_grad[1]:  # under adapters, weights have no gradient
            ctx.save_for_backward(x)
        ctx.dtype = weight.dtype
        if ctx.needs_input_grad[0]:  # packed now, and not in the backward pass, because the weight may change
            packed.pack_transpose()
            ctx.transpose = packed.transpose
        return linear_packed(x, packed.weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (to_out,) = grads
        rows, to_weight = to_out.flatten(0, -2), None
        to_x = linear_packed(to_out, ctx.transpose) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            (x,) = ctx.saved_tensors
            to_weight = (rows.mT @ x.flatten(0, -2)).to(ctx.dtype)
        return to_x, to_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None
