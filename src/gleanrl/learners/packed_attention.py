"""Attention for packed rows on a CPU: each token attends to itself and to the earlier tokens of its sample.

A packed row (`gleanrl.algorithms.microbatch.Packing`) holds several samples without padding, and the prefixes that they
have in common only once. A mask [L, L] over the row would make every token pay for all others. Here, attention is
computed in blocks of the parts that see each other: a causal block for each part itself, and a full block for the
tokens that follow a part on the keys of that part. The blocks of a query are joined by their log-sum-exp, as in flash
attention, so that the result is that of one softmax.

`use_packed_attention` selects it for a model of transformers. Without a packing it is the implementation "sdpa".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from gleanrl.algorithms.microbatch import Packing, PaddedParts

NAME, SDPA = "gleanrl_packed", "sdpa"
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def use_packed_attention(model: Any) -> None:
    """Select this attention for ``model`` in place. Raises ValueError if its implementation is not "sdpa"."""
    if model.config._attn_implementation not in (NAME, SDPA):
        raise ValueError(f"a model with attention {model.config._attn_implementation!r} cannot use packed rows")
    model.set_attn_implementation(NAME)


@contextmanager
def packed_attention(model: Any) -> Iterator[None]:
    """Select this attention for ``model`` inside the ``with`` block. Raises what `use_packed_attention` raises."""
    before = model.config._attn_implementation
    use_packed_attention(model)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' attention functions do.

    ``query`` is [B, heads, L, D], ``key`` and ``value`` are [B, KV heads, L, D], and the output is [B, L, heads, D].
    """
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    return attend(query, key, value, packing, scaling).transpose(1, 2), None


def attend(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None = None) -> Tensor:
    """Compute the attention of a packed row, [1, heads, L, D].

    ``query`` is [1, heads, L, D], ``key`` and ``value`` are [1, KV heads, L, D].
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.autocast("cpu", enabled=False):
        return _PackedAttention.apply(query, key, value, packing, scale)  # type: ignore[no-any-return]


AttentionInterface.register(NAME, _forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        # The output is [1, L, heads, D] in memory, as the next layer reads it.
        out = query.new_empty(query.shape[0], *query.shape[2:0:-1], query.shape[3], dtype=exact).transpose(1, 2)
        weight = query.new_empty(query.shape[:3], dtype=exact)  # log-sum-exp of the scores of each query
        for part in packing.parts:
            part_out, part_weight = _flash(
                *(tensor[:, :, part] for tensor in (query, key, value)), 0.0, True, scale=scale
            )
            out[:, :, part], weight[:, :, part] = part_out, part_weight
        for part in packing.batches:
            part_out, part_weight = _flash(
                *(_rows(tensor, part.index) for tensor in (query, key, value)), 0.0, True, scale=scale
            )
            _put(out, part_out, part)
            _put(weight, part_weight, part)
        for later, part in packing.shared:
            more, more_weight = _flash(query[:, :, later], key[:, :, part], value[:, :, part], 0.0, False, scale=scale)
            before = weight[:, :, later]
            after = torch.logaddexp(before, more_weight)
            joined = out[:, :, later].mul_((before - after).exp_()[..., None])
            joined.addcmul_(more.to(exact), (more_weight - after).exp_()[..., None])
            before.copy_(after)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, weight)
        ctx.packing, ctx.scale = packing, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute the gradient of each block with the output and log-sum-exp of the whole softmax.

        The gradient of a softmax needs these two only to get each key's probability and the mean of its gradient,
        so with those of the whole softmax it gives the block's part of the whole gradient.
        """
        query, key, value, out, weight = ctx.saved_tensors
        (grad,) = grads
        packing: Packing = ctx.packing
        results = [torch.empty_like(tensor, dtype=weight.dtype) for tensor in (query, key, value)]
        for part in packing.parts:
            given = (tensor[:, :, part] for tensor in (grad, query, key, value, out, weight))
            for result, add in zip(results, _gradients(*given, causal=True, scale=ctx.scale), strict=True):
                result[:, :, part] = add
        for part in packing.batches:
            # The output of a padded query is not used, so its gradient is 0.
            to_out = _rows(grad, part.index) * part.real[:, None, :, None]
            given = (_rows(tensor, part.index) for tensor in (query, key, value, out, weight))
            for result, add in zip(results, _gradients(to_out, *given, causal=True, scale=ctx.scale), strict=True):
                _put(result, add, part)
        for later, part in packing.shared:
            of_queries = (slice(None), slice(None), later)
            of_keys = (slice(None), slice(None), part)
            adds = _gradients(
                grad[of_queries],
                query[of_queries],
                key[of_keys],
                value[of_keys],
                out[of_queries],
                weight[of_queries],
                causal=False,
                scale=ctx.scale,
            )
            for result, place, add in zip(results, (of_queries, of_keys, of_keys), adds, strict=True):
                result[place] += add
        return *(result.to(query.dtype) for result in results), None, None


def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, weight: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Return what a block adds to the gradients of its queries, keys and values.

    Torch's flash attention for a CPU takes three times as long in bfloat16 as in float32, where the products below are
    faster. Query heads that share a head of keys become further queries of this head, so keys are not repeated.

    Args:
        grad: [n, heads, m, D], gradient of the output, as ``query`` and ``out``.
        key: [n, KV heads, k, D], as ``value``.
        weight: float32 [n, heads, m], log-sum-exp of the scores of each query.
        causal: whether a query attends only to the keys up to its own place, where m = k.
    """
    if query.dtype != torch.bfloat16:
        return _flash_backward(grad, query, key, value, out, weight, 0.0, causal, scale=scale)  # type: ignore[no-any-return]
    size, keys = query.shape[2], key.shape[2]
    mean = (grad.float() * out.float()).sum(-1)  # of the gradients of a query's probabilities
    # Products with these columns subtract the log-sum-exp and the mean before they round to bfloat16.
    queries, to_out = _with_columns(query * scale, -weight, key), _with_columns(grad, -mean, key)
    keys_one, values_one = (nn.functional.pad(tensor.flatten(0, 1), (0, 2), value=1.0) for tensor in (key, value))
    probabilities = torch.bmm(queries, keys_one.mT)
    if causal:
        probabilities.view(-1, size, keys).add_(probabilities.new_full((size, keys), -torch.inf).triu_(1))
    probabilities.exp_()
    to_scores = torch.bmm(to_out, values_one.mT).mul_(probabilities)
    to_query = torch.bmm(to_scores, key.flatten(0, 1)).view(query.shape)
    to_key = torch.bmm(to_scores.mT, queries[..., :-2]).view(key.shape)
    return to_query * scale, to_key, torch.bmm(probabilities.mT, to_out[..., :-2]).view(value.shape)


def _with_columns(tensor: Tensor, more: Tensor, key: Tensor) -> Tensor:
    """Append ``more`` [n, heads, m] to a bfloat16 ``tensor`` [n, heads, m, D], as the sum of two columns.

    The result is [n * KV heads, heads / KV heads * m, D + 2].
    """
    high = more.bfloat16()
    columns = torch.stack([high, (more - high).bfloat16()], -1)
    return torch.cat([tensor, columns], -1).reshape(key.shape[0] * key.shape[1], -1, tensor.shape[3] + 2)


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Gather parts as padded rows: [1, heads, L, ...] at ``index`` [n, m] to [n, heads, m, ...]."""
    return tensor[0][:, index].transpose(0, 1)


def _put(result: Tensor, rows: Tensor, part: PaddedParts) -> None:
    """Write the tokens of padded rows [n, heads, m, ...] to their places in ``result`` [1, heads, L, ...]."""
    result[0][:, part.index[part.real]] = rows.transpose(0, 1)[:, part.real].to(result.dtype)
