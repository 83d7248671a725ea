"""Matrix products by weights that change rarely, such as those of linear layers.

On a CPU, oneDNN packs a weight into the layout in which its instructions read it. Without it, each product by a plain
weight packs it first, or reads it in a slower order. Measured on one thread (AVX-512) at the shapes of a model of 135 M
parameters, with weights from memory: products of 8 rows by a packed weight are 1.8 (float32) and 1.9 (bfloat16) times
as fast, of 32 rows 1.35 times, of 512 rows 1.12 and 1.04 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this installation of torch multiplies by packed weights of ``dtype`` on a CPU.

    The operators are those with which torch's compiler packs weights. They are not documented, so they are tried.
    """
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    x, weight, bias = (torch.arange(n, dtype=dtype).remainder(3).view(shape) for n, shape in _TRIED)
    try:
        found = linear_packed(x, pack(weight), bias)
    except (AttributeError, RuntimeError):  # an older version, or a processor without bfloat16
        return False
    return torch.equal(found, F.linear(x, weight, bias))  # of small whole numbers, so that rounding plays no part


def bfloat16_is_slow() -> bool:
    """Return whether products in bfloat16 take many times as long as in float32 on this machine's CPU.

    So it is on x86 processors without AVX-512, for which oneDNN has only reference code: on one thread with AVX2,
    1.2 GFLOP/s instead of 75. False where it is not known.
    """
    try:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except (AttributeError, RuntimeError):  # an installation of torch without oneDNN
        return False


_TRIED = ((6, (2, 3)), (15, (5, 3)), (5, (5,)))


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight``, ``[outputs, inputs]`` on a CPU, in oneDNN's layout: a tensor only for `linear_packed`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def linear_packed(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``F.linear(x, weight, bias)`` for a weight that `pack` has packed. It has no gradient."""
    if bias is not None:
        bias = bias.contiguous()  # the operator ignores its strides
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _computed_rows(count: int) -> int:
    """Return the number of rows, at least ``count``, with which a product of ``count`` rows is computed.

    For each number of rows oneDNN compiles code, in about 0.6 ms and 0.4 MB that are not released. So it gets at most
    eight different numbers between two powers of two, which adds at most an eighth to the rows.
    """
    step = 1 << max(0, (count - 1).bit_length() - 4)
    return -(-count // step) * step


class Product:
    """``F.linear`` by the rows of one or several weights, packed where the device can.

    Args:
        shapes: ``[outputs, inputs]`` of each weight; all have the same inputs.
        dtype: dtype of the product.
        device: device of the product.
        kept: a tensor in which another owner keeps the same weights; without packing, the product uses it.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        kept: torch.Tensor | None = None,
    ) -> None:
        self._sizes = [shape[0] for shape in shapes]
        self._new = lambda: torch.empty(sum(self._sizes), shapes[0][1], dtype=dtype, device=device)
        self._packs = device.type == "cpu" and can_pack(dtype)
        # With packed weights, a plain copy exists only until all of its weights are there.
        self._plain = None if self._packs else kept
        self._packed: torch.Tensor | None = None
        self._loaded: set[int] = set()

    def start(self) -> None:
        """Forget the weights of a load that did not end, before the first `load` of new ones."""
        self._loaded.clear()

    def load(self, index: int, weight: torch.Tensor) -> None:
        """Copy a weight, the ``index``-th of those in the product; convert its dtype and device.

        A product must have all of its weights, or all new ones, before its next use.
        """
        if self._plain is None:
            self._plain = self._new()
        self._plain.split(self._sizes)[index].copy_(weight)
        self._loaded.add(index)
        if self._packs and len(self._loaded) == len(self._sizes):
            self._packed, self._plain = pack(self._plain), None
            self._loaded.clear()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._packed is not None:
            count = len(x)
            padded = F.pad(x, (0, 0, 0, more)) if (more := _computed_rows(count) - count) else x
            return linear_packed(padded, self._packed, bias)[:count]
        assert self._plain is not None, "no weights were loaded"
        return F.linear(x, self._plain, bias)
