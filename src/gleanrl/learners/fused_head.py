"""Computes log-probs and entropies from hidden states, for vocabularies whose logits do not fit into memory.

The logits are computed in blocks of rows and vocabulary, and each block is discarded after use. The forward pass keeps
a running maximum and two running sums per row (online softmax: Milakov and Gimelshein, 2018). The backward pass
computes each block again (as Cut Cross-Entropy does: Wijmans et al., 2024). This costs a fourth matrix product in
addition to the three that logits in memory need, but memory does not grow with tokens times vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCKS = {"cpu": (2048, 1024)}  # rows and columns of a block of logits: 8 MiB in float32, part of the last cache
BLOCK = (8192, 4096)  # the same on other devices, where fewer and larger kernels are faster: 128 MiB in float32
LOWEST = -1e30  # below any logit but finite, so that differences to it are never NaN


def head_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute log-probs of ``targets`` and entropies under softmax((hidden @ weight.T + bias) / temperature).

    ``hidden`` float [T, H], ``weight`` [V, H], ``bias`` [V], ``targets`` int64 [T]; both results [T]. Products are
    computed in the dtype of ``hidden``, or in that of autocast if it is on, as in a linear layer. The softmax and all
    sums over blocks are float32, or float64 for float64 inputs. ``hidden``, ``weight`` and ``bias`` get gradients,
    which cannot be differentiated again.
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
        blocks, vocabulary = _blocks(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns in vocabulary:
                part, offset = (
                    weight[columns].to(hidden.dtype),
                    None if bias is None else bias[columns].to(hidden.dtype),
                )
                for rows in blocks:
                    scaled = _scaled(hidden[rows], part, offset, temperature, exact)
                    inside, place = _inside(targets[rows], columns)
                    chosen[rows] += scaled.gather(-1, place[:, None]).squeeze(-1).masked_fill_(~inside, 0.0)
                    # Add the block [R, C] to the running maximum m, the sum s of exp(x - m) and the sum u of
                    # exp(x - m) (x - m), each [R], in place. A new maximum m + d changes the sums to s e^-d and
                    # (u - d s) e^-d.
                    new = torch.maximum(highest[rows], scaled.amax(-1))
                    fall = highest[rows] - new
                    shrink = fall.exp()
                    shifted = scaled.sub_(new[:, None])
                    weights = shifted.exp()
                    moment[rows].addcmul_(fall, total[rows]).mul_(shrink).add_(torch.linalg.vecdot(weights, shifted))
                    total[rows].mul_(shrink).add_(weights.sum(-1))
                    highest[rows] = new
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
        blocks, vocabulary = _blocks(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns in vocabulary:
                part, offset = (
                    weight[columns].to(hidden.dtype),
                    None if bias is None else bias[columns].to(hidden.dtype),
                )
                sums = None
                if to_weight is not None:  # sums of a dtype other than the weight's get their own tensor
                    place_of_sums = to_weight[columns]
                    sums = place_of_sums if to_weight.dtype == exact else torch.zeros_like(place_of_sums, dtype=exact)
                for rows in blocks:
                    scaled = _scaled(hidden[rows], part, offset, ctx.temperature, exact)
                    # Gradient of the scaled logits [R, C], at first without the target's term:
                    # d logp = onehot - p; d entropy = -p (log p + entropy).
                    log_p = scaled.sub_(normaliser[rows, None])
                    slope = log_p.exp()
                    if grad_entropy is not None:
                        level = entropy[rows, None] * grad_entropy[rows, None]
                        if grad_logp is not None:
                            level = torch.addcmul(grad_logp[rows, None], entropy[rows, None], grad_entropy[rows, None])
                        slope.mul_(log_p.mul_(-grad_entropy[rows, None]).sub_(level))
                    elif grad_logp is not None:
                        slope.mul_(-grad_logp[rows, None])
                    else:
                        slope.zero_()
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
        to_hidden = None if to_hidden is None else to_hidden.to(hidden.dtype)
        to_bias = None if to_bias is None else to_bias.to(bias.dtype)
        return to_hidden, to_weight, to_bias, None, None


def _scaled(hidden: Tensor, part: Tensor, offset: Tensor | None, temperature: float, exact: torch.dtype) -> Tensor:
    """Return (hidden @ part.T + offset) / temperature as a new tensor [R, C] of dtype ``exact``."""
    if hidden.dtype == exact:  # the product applies the temperature, without a second pass
        out = hidden.new_empty(hidden.shape[0], part.shape[0])
        inverse = 1.0 / temperature
        if offset is None:
            return out.addmm_(hidden, part.t(), beta=0, alpha=inverse)
        return torch.addmm(offset, hidden, part.t(), beta=inverse, alpha=inverse, out=out)
    product = torch.nn.functional.linear(hidden, part, offset).to(exact)
    return product if temperature == 1.0 else product.div_(temperature)


def _add_product(sums: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """Add scale * left @ right to ``sums``. The product has the dtype of its factors, the addition that of ``sums``."""
    if sums.dtype == left.dtype:
        sums.addmm_(left, right, alpha=scale)
    else:
        sums.add_(left @ right, alpha=scale)


def _inside(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return which of ``targets`` [R] lie in ``columns``, and their places there (some valid place for the others)."""
    place = targets - columns.start
    last = columns.stop - columns.start - 1
    return (place >= 0) & (place <= last), place.clamp_(0, last)


def _blocks(hidden: Tensor, weight: Tensor) -> tuple[list[slice], list[slice]]:
    """Return slices of rows and of the vocabulary. The latter are equally wide, as a narrow last one would be slow."""
    height, width = BLOCKS.get(hidden.device.type, BLOCK)
    size = weight.shape[0]
    count = -(-size // width)
    rows = [slice(start, start + height) for start in range(0, hidden.shape[0], height)]
    return rows, [slice(size * i // count, size * (i + 1) // count) for i in range(count)]
