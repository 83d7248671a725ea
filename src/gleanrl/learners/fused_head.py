"""Computes log-probs and entropies from hidden states without storing the logits of all tokens.

`gleanrl.learners.logprobs` uses it if the logits would be large. The logits [T, V] are computed in blocks of rows and
columns, and each block is discarded after use. The forward pass keeps a running maximum and two running sums per row
(online softmax: Milakov and Gimelshein, 2018). The backward pass computes each block again (as Cut Cross-Entropy does:
Wijmans et al., 2024). Recomputation takes a fourth matrix product, where stored logits need three (one forward, two
backward). In return, memory does not grow with the product of tokens and vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows and columns of a block of logits on a CPU: 8 MiB in float32, which fits into the last-level cache.
BLOCKS = {"cpu": (2048, 1024)}
# Rows and columns of a block on other devices, where fewer and larger kernels are faster: 128 MiB in float32.
BLOCK = (8192, 4096)
# Initial running maximum, and lower bound of logits in the sums: far below any logit of a possible token, but finite,
# because the difference of two infinite values would be NaN, and so would 0 times the logit of a token that a model
# excludes with -inf.
LOWEST = -1e30


def head_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute the log-probs of ``targets`` and the entropies, [T] each, from hidden states.

    The distribution of a token is softmax((hidden @ weight.T + bias) / temperature). Matrix products are computed in
    the dtype of ``hidden``, or in that of autocast if it is on, as in a linear layer. The softmax, the sums over blocks
    and the results are float64 for float64 hidden states, otherwise float32. Gradients flow into ``hidden``, ``weight``
    and ``bias``; second derivatives are not supported.

    Args:
        hidden: float [T, H], hidden states before the head.
        weight: float [V, H], weight of the head.
        bias: float [V], bias of the head; None if it has none.
        targets: int64 [T], token ids.
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
                    # Add the block [R, C] of scaled logits x to three running values of each row, in place: the
                    # maximum m, the sum s of exp(x - m), and the sum u of exp(x - m) (x - m). If the maximum rises by
                    # d, the old sums become s e^-d and (u - d s) e^-d.
                    new = torch.maximum(highest[rows], scaled.amax(-1))
                    fall = highest[rows] - new
                    shrink = fall.exp()
                    shifted = scaled.sub_(new[:, None]).clamp_(min=LOWEST)
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
                if to_weight is not None:
                    # Sums over row blocks are added up in ``exact``. If the weight has another dtype, they need a
                    # separate tensor, which is converted at the end.
                    place_of_sums = to_weight[columns]
                    sums = place_of_sums if to_weight.dtype == exact else torch.zeros_like(place_of_sums, dtype=exact)
                for rows in blocks:
                    scaled = _scaled(hidden[rows], part, offset, ctx.temperature, exact)
                    # ``slope`` [R, C] becomes the gradient of the scaled logits. With respect to these, the derivative
                    # of a target's log-prob is onehot(target) - p, and that of the entropy is -p (log p + entropy),
                    # where p is the softmax. The term onehot(target) is added last.
                    log_p = scaled.sub_(normaliser[rows, None])
                    slope = log_p.exp()
                    if grad_entropy is not None:
                        level = entropy[rows, None] * grad_entropy[rows, None]
                        if grad_logp is not None:
                            level = torch.addcmul(grad_logp[rows, None], entropy[rows, None], grad_entropy[rows, None])
                        slope.mul_(log_p.clamp_(min=LOWEST).mul_(-grad_entropy[rows, None]).sub_(level))
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
        if to_bias is not None and bias is not None:
            to_bias = to_bias.to(bias.dtype)
        return to_hidden, to_weight, to_bias, None, None


def _scaled(hidden: Tensor, part: Tensor, offset: Tensor | None, temperature: float, exact: torch.dtype) -> Tensor:
    """Return (hidden @ part.T + offset) / temperature as a new tensor [R, C] of dtype ``exact``.

    ``hidden`` [R, H] is a block of rows, and ``part`` [C, H] and ``offset`` [C] are a block of the head's weight and
    bias.
    """
    if hidden.dtype == exact:  # one kernel computes the product and applies the temperature
        out = hidden.new_empty(hidden.shape[0], part.shape[0])
        inverse = 1.0 / temperature
        if offset is None:
            return out.addmm_(hidden, part.t(), beta=0, alpha=inverse)
        return torch.addmm(offset, hidden, part.t(), beta=inverse, alpha=inverse, out=out)
    product = torch.nn.functional.linear(hidden, part, offset).to(exact)
    return product if temperature == 1.0 else product.div_(temperature)


def _add_product(sums: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """Add ``scale * left @ right`` to ``sums`` in place.

    The product is computed in the dtype of its factors, and the addition in that of ``sums``.
    """
    if sums.dtype == left.dtype:
        sums.addmm_(left, right, alpha=scale)
    else:
        sums.add_(left @ right, alpha=scale)


def _inside(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return which of ``targets`` [R] lie in the block ``columns`` of the vocabulary, and their indices in that block.

    The first tensor is bool [R], the second int64 [R]. A target outside the block gets an arbitrary valid index.
    """
    place = targets - columns.start
    last = columns.stop - columns.start - 1
    return (place >= 0) & (place <= last), place.clamp_(0, last)


def _blocks(hidden: Tensor, weight: Tensor) -> tuple[list[slice], list[slice]]:
    """Return the slices of rows and the slices of the vocabulary that cut the logits into blocks.

    The widths of the vocabulary's slices differ by at most 1, because products with a narrow last slice would be slow.
    """
    height, width = BLOCKS.get(hidden.device.type, BLOCK)
    size = weight.shape[0]
    count = -(-size // width)
    rows = [slice(start, start + height) for start in range(0, hidden.shape[0], height)]
    return rows, [slice(size * i // count, size * (i + 1) // count) for i in range(count)]
