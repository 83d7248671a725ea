"""Computes log-probs and entropies from hidden states, for vocabularies whose logits do not fit into memory.

The head's product is computed in blocks of rows and vocabulary, which are discarded. The forward pass keeps a running
maximum and two running sums per row (online softmax: Milakov and Gimelshein, 2018). The backward pass computes each
block again (as Cut Cross-Entropy does: Wijmans et al., 2024). This costs a fourth matrix product in addition to the
three that logits in memory need, and memory does not grow with tokens times vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCKS = {"cpu": (2048, 1024)}  # rows and columns of logits at once: 8 MiB in float32, a share of the last cache
BLOCK = (8192, 4096)  # of other devices, where few large kernels count: 128 MiB in float32
LOWEST = -1e30  # below any logit, and finite: differences to it never make NaN


def head_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs of ``targets`` int64 [T] and entropies under softmax((hidden @ weight.T + bias) / temperature).

    ``hidden`` float [T, H], ``weight`` [V, H], ``bias`` [V]; both results [T]. Products are made in the dtype of
    ``hidden``, or in autocast's where that is on, as a linear layer's would be; the softmax and all sums over blocks
    are float32 (float64 inputs stay so). Gradients reach ``hidden``, ``weight`` and ``bias``, once differentiable.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    return _HeadLogprobs.apply(hidden, weight, bias, targets, temperature)  # type: ignore[no-any-return]


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        highest = hidden.new_full(hidden.shape[:1], LOWEST, dtype=exact)
        total, moment, chosen = (torch.zeros_like(highest) for _ in range(3))
        with torch.autocast(hidden.device.type, enabled=False):
            for columns in _vocabulary(weight):
                part, offset = _part(weight, bias, columns, hidden.dtype)
                for rows in _rows(hidden):
                    scaled = _scaled(hidden[rows], part, offset, temperature, exact)
                    inside, place = _inside(targets[rows], columns)
                    chosen[rows] += scaled.gather(-1, place[:, None]).squeeze(-1).masked_fill_(~inside, 0.0)
                    _absorb(scaled, highest[rows], total[rows], moment[rows])
        log_total = total.log()
        normaliser, entropy = highest + log_total, log_total - moment / total
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return chosen - normaliser, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        grad_logp, grad_entropy = grads
        exact, inverse = normaliser.dtype, 1.0 / ctx.temperature
        wanted = ctx.needs_input_grad[:3]
        to_hidden = torch.zeros_like(hidden, dtype=exact) if wanted[0] else None
        to_weight = torch.zeros_like(weight) if wanted[1] else None
        to_bias = torch.zeros_like(bias, dtype=exact) if wanted[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for columns in _vocabulary(weight):
                part, offset = _part(weight, bias, columns, hidden.dtype)
                sums = None if to_weight is None else _accumulator(to_weight[columns], exact)
                for rows in _rows(hidden):
                    scaled = _scaled(hidden[rows], part, offset, ctx.temperature, exact)
                    of_rows = (None if g is None else g[rows, None] for g in (grad_logp, grad_entropy))
                    slope = _slope(scaled.sub_(normaliser[rows, None]), entropy[rows, None], *of_rows)
                    if grad_logp is not None:
                        inside, place = _inside(targets[rows], columns)
                        slope.scatter_add_(-1, place[:, None], (grad_logp[rows] * inside)[:, None])
                    if to_bias is not None:
                        to_bias[columns] += slope.sum(0).mul_(inverse)
                    slope = slope.to(hidden.dtype)
                    if to_hidden is not None:
                        _add_product(to_hidden[rows], slope, part, inverse)
                    if sums is not None:
                        _add_product(sums, slope.t(), hidden[rows], inverse)
                if to_weight is not None and sums is not None and sums.dtype != to_weight.dtype:
                    to_weight[columns] = sums
        to_hidden, to_bias = (
            None if sums is None else sums.to(of.dtype) for sums, of in ((to_hidden, hidden), (to_bias, bias))
        )
        return to_hidden, to_weight, to_bias, None, None


def _absorb(scaled: Tensor, highest: Tensor, total: Tensor, moment: Tensor) -> None:
    """Take a block [R, C] into the running maximum m, sum of exp(x - m) and sum of exp(x - m) (x - m), each [R].

    All in place, ``scaled`` too. Under a new maximum m + d the sums become s e^-d and (u - d s) e^-d.
    """
    new = torch.maximum(highest, scaled.amax(-1))
    fall = highest - new
    shrink = fall.exp()
    shifted = scaled.sub_(new[:, None])
    weights = shifted.exp()
    moment.addcmul_(fall, total).mul_(shrink).add_(torch.linalg.vecdot(weights, shifted))
    total.mul_(shrink).add_(weights.sum(-1))
    highest.copy_(new)


def _slope(log_p: Tensor, entropy: Tensor, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> Tensor:
    """Gradient by the scaled logits of a block [R, C], without the target's part; the others [R, 1].

    d logp = onehot - p; d entropy = -p (log p + entropy).
    """
    p = log_p.exp()
    if grad_entropy is None:
        return p.zero_() if grad_logp is None else p.mul_(-grad_logp)
    level = entropy * grad_entropy if grad_logp is None else torch.addcmul(grad_logp, entropy, grad_entropy)
    return p.mul_(log_p.mul_(-grad_entropy).sub_(level))


def _scaled(hidden: Tensor, part: Tensor, offset: Tensor | None, temperature: float, exact: torch.dtype) -> Tensor:
    """(hidden @ part.T + offset) / temperature, [R, C], a tensor of its own in ``exact``."""
    if hidden.dtype == exact:  # the temperature costs no pass of its own
        out = hidden.new_empty(hidden.shape[0], part.shape[0])
        inverse = 1.0 / temperature
        if offset is None:
            return out.addmm_(hidden, part.t(), beta=0, alpha=inverse)
        return torch.addmm(offset, hidden, part.t(), beta=inverse, alpha=inverse, out=out)
    product = torch.nn.functional.linear(hidden, part, offset).to(exact)
    return product if temperature == 1.0 else product.div_(temperature)


def _add_product(sums: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """``sums`` += scale * left @ right, in the dtype of ``sums`` beyond each product."""
    if sums.dtype == left.dtype:
        sums.addmm_(left, right, alpha=scale)
    else:
        sums.add_(left @ right, alpha=scale)


def _accumulator(place: Tensor, exact: torch.dtype) -> Tensor:
    """``place`` itself if it may be added to, else zeros like it."""
    return place if place.dtype == exact else torch.zeros_like(place, dtype=exact)


def _part(weight: Tensor, bias: Tensor | None, columns: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return weight[columns].to(dtype), None if bias is None else bias[columns].to(dtype)


def _inside(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Which of ``targets`` [R] lie in ``columns``, and where there; what lies outside gets a valid place too."""
    place = targets - columns.start
    last = columns.stop - columns.start - 1
    return (place >= 0) & (place <= last), place.clamp_(0, last)


def _vocabulary(weight: Tensor) -> Iterator[slice]:
    """Even slices: a narrow last one would be a slow product."""
    size = weight.shape[0]
    count = -(-size // BLOCKS.get(weight.device.type, BLOCK)[1])
    return (slice(size * i // count, size * (i + 1) // count) for i in range(count))


def _rows(hidden: Tensor) -> Iterator[slice]:
    step = BLOCKS.get(hidden.device.type, BLOCK)[0]
    return (slice(start, start + step) for start in range(0, hidden.shape[0], step))
