"""Computes the log-probs and entropies of trained tokens in little memory.

A model's head and the softmax over the vocabulary cost as much as many layers, and most tokens of an agent's trajectory
are context. Therefore the head is applied only to positions that predict a trained token. The log-softmax is not stored
for the backward pass, which computes it again from the logits, a few rows at a time. Large logits are not stored
either, if they are the output of a linear layer without further operations: `gleanrl.learners.fused_head` then computes
them in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable

from gleanrl.algorithms.batch import unscored_sample
from gleanrl.algorithms.microbatch import LONGEST_PART, MIN_SHARED, Packing, micro_batches
from gleanrl.learners.fused_head import LOWEST, head_logprobs
from gleanrl.learners.packed_attention import packed_attention

# If there are at least this many logits, they are computed in blocks and not stored. At this size that saves 0.5 GiB
# (logits and their gradient in float32) and takes a fifth more time.
LARGE = 1 << 26
PROBE_LOGIT = 1e4  # the probe's largest logit; far above any soft cap
# Largest difference allowed between the probe's logits and the head's output, as a share of the largest logit. It is
# above the rounding of bfloat16 and below the effect of any soft cap.
PROBE_TOLERANCE = 1e-3
# Largest difference in nats that `can_pack_rows` allows between the log-probs of samples in a packed row and those of
# the same samples in separate rows. It is far above the rounding of float32, and far below the effect of a model that
# ignores the packing or the positions.
PACKING_TOLERANCE = 1e-4
# Number of logits in a block of rows. On a CPU: 4 MiB in float32, about the cache of a core.
LOGITS_AT_ONCE = {"cpu": 1 << 20}
# The same on other devices, where fewer and larger kernels are faster: 128 MiB in float32.
MOST_LOGITS_AT_ONCE = 1 << 25
# Whether a model's logits are exactly its head's output, without a soft cap, a scale or another operation.
_PLAIN: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def trained_logprobs(
    model: nn.Module,
    tokens: Tensor,
    index: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probs of T trained tokens and the entropies of their distributions, float [T] each.

    The distribution of a token is softmax(logits / temperature).

    Args:
        model: any causal language model of transformers.
        tokens: int64 [B, L], input token ids, padded on the right or, with a ``packing``, packed.
        index: int64 [T], positions in the flattened [B * L] at which the model predicts the trained tokens.
        targets: int64 [T], ids of the trained tokens.
        packing: describes a packed row. The model must be one that `can_pack_rows` accepts. None if no row is packed.
    """
    layout = packing.arguments() if packing is not None else {}
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    # `head_logprobs` does not call the head, but multiplies by its weight. This is not possible if the head is a
    # subclass of Linear, which may compute something else (with quantised weights or adapters), or if its weight is
    # sharded, so that this process has only a part of it.
    linear = type(head) is nn.Linear and type(head.weight) is nn.Parameter and "forward" not in vars(head)
    if linear and index.numel() * head.out_features >= LARGE and _PLAIN.get(model, True):
        hidden = _hidden_states(model, head, index, input_ids=tokens, **layout)
        if hidden is not None:
            return head_logprobs(hidden, head.weight, head.bias, targets, temperature)

    def select(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].flatten(0, 1).index_select(0, index)[None], *args[1:])  # [1, T, H]

    # Positions are selected at the head's input, so that the model itself applies its soft cap or scale to the logits.
    hook = head.register_forward_pre_hook(select)
    try:
        logits = model(input_ids=tokens, use_cache=False, **layout).logits
    finally:
        hook.remove()
    return selected_log_softmax(logits.flatten(0, -2), targets, temperature)


def _hidden_states(model: Any, head: nn.Linear, index: Tensor, **inputs: Tensor) -> Tensor | None:
    """Return the head's inputs [T, H] at ``index``; None if the model changes the head's output to get its logits.

    The model runs as a whole, but its head receives only a single state without gradient, so that the head takes almost
    no time. In the first call for a model, the head receives a probe [1, 3, H] instead, and the model's logits are
    compared with the head's output for the probe. The three states are zeros, an arbitrary state, and the same state
    scaled until its logits reach `PROBE_LOGIT`. Zeros reveal a term that is added to the logits. The scaled state
    reveals a scale or a soft cap, which hardly changes small logits.
    """
    states: list[Tensor] = []
    given: list[Tensor] = []

    def take(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states.append(args[0].flatten(0, 1).index_select(0, index))
        if model in _PLAIN:
            given.append(args[0][:1, :1].detach())
        else:
            with torch.no_grad():
                state = torch.arange(1, head.in_features + 1, device=head.weight.device).cos().to(args[0].dtype)
                reach = nn.functional.linear(state, head.weight).abs().amax().clamp_min(1e-6)
                long = (state * (PROBE_LOGIT / reach)).to(state.dtype)
                given.append(torch.stack([torch.zeros_like(state), state, long])[None])
        return (given[-1], *args[1:])

    hook = head.register_forward_pre_hook(take)
    try:
        logits = model(use_cache=False, **inputs).logits.detach()
    finally:
        hook.remove()
    if model not in _PLAIN:
        with torch.no_grad():
            expected = nn.functional.linear(given[0], head.weight, head.bias)
            plain = len(given) == 1 and logits.shape == expected.shape
            if plain:
                largest = expected.double().abs().amax(-1)
                apart = (logits.double() - expected.double()).abs().amax(-1)
                # False for a head of zeros: all its logits are 0, so that a scale or a soft cap would have no effect.
                reached = largest[0, -1] > PROBE_LOGIT / 2
                plain = bool(reached & (apart <= PROBE_TOLERANCE * largest).all())
        _PLAIN[model] = plain
    return states[0] if _PLAIN[model] else None


def selected_log_softmax(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, group: distributed.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the log-probs of ``targets`` and the entropies, [T] each, under softmax(logits / temperature).

    ``logits`` is [T, V] of any float dtype, ``targets`` int64 [T]. The results are float64 if the logits are, otherwise
    float32. The softmax is not stored for the backward pass.

    With a ``group`` of processes, each has the logits of a part of the vocabulary, with one column at least, and
    ``targets`` are indices into its own part. A target in the part of another process is negative or too large. All
    processes get the same results.
    """
    return _SelectedLogSoftmax.apply(logits, targets, temperature, group)  # type: ignore[no-any-return]


class _SelectedLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, group: distributed.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
        highest, total, moment, chosen = (logits.new_empty(logits.shape[0], dtype=exact) for _ in range(4))
        inside = None  # whether a target is in this process's part of the vocabulary
        if group is not None:
            inside = (targets >= 0) & (targets < logits.shape[-1])
            targets = targets.clamp(0, logits.shape[-1] - 1)
        for rows in _blocks(logits):
            scaled = logits[rows].to(exact) / temperature
            chosen[rows] = scaled.gather(-1, targets[rows, None]).squeeze(-1)
            highest[rows] = scaled.clamp_(min=LOWEST).amax(-1)
            shifted = scaled.sub_(highest[rows, None])
            weights = shifted.exp()
            total[rows] = weights.sum(-1)
            moment[rows] = torch.linalg.vecdot(weights, shifted)
        if inside is not None:
            # If the maximum rises by d, a sum s of exp(x - m) becomes s e^-d, and u of exp(x - m) (x - m) becomes
            # (u - d s) e^-d.
            fall = highest.clone()
            distributed.all_reduce(highest, distributed.ReduceOp.MAX, group)
            fall -= highest
            sums = torch.stack([total, moment.addcmul_(fall, total), chosen])
            sums[:2] *= fall.exp()
            sums[2] *= inside
            distributed.all_reduce(sums, group=group)
            total, moment, chosen = sums
        log_total = total.log()
        normaliser, entropy = log_total + highest, log_total - moment / total
        ctx.save_for_backward(logits, targets, normaliser, entropy, inside)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return chosen - normaliser, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute the gradient of the logits.

        With respect to the scaled logits (logits / temperature), the derivative of a target's log-prob is
        onehot(target) - p, and that of the entropy is -p (log p + entropy), where p is the softmax.
        """
        logits, targets, normaliser, entropy, inside = ctx.saved_tensors
        grad_logp, grad_entropy = grads
        of_targets = grad_logp if inside is None or grad_logp is None else grad_logp * inside
        out = torch.empty_like(logits)
        for rows in _blocks(logits):
            log_p = logits[rows].to(normaliser.dtype) / ctx.temperature - normaliser[rows, None]
            p = log_p.exp()
            slope = torch.zeros_like(p[:, :1])
            if grad_logp is not None:
                slope = slope - grad_logp[rows, None]
            if grad_entropy is not None:
                slope = slope - grad_entropy[rows, None] * (log_p.clamp_(min=LOWEST) + entropy[rows, None])
            grad = p.mul_(slope)
            if of_targets is not None:
                grad.scatter_add_(-1, targets[rows, None], of_targets[rows, None])
            out[rows] = grad.div_(ctx.temperature)
        return out, None, None, None


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Return slices of rows with a number of logits that suits their device."""
    logits_at_once = LOGITS_AT_ONCE.get(logits.device.type, MOST_LOGITS_AT_ONCE)
    step = max(1, logits_at_once // max(1, logits.shape[-1]))
    return (slice(start, start + step) for start in range(0, logits.shape[0], step))


# --- packed rows --------------------------------------------------------------------------------
@torch.no_grad()
def can_pack_rows(model: Any) -> bool:
    """Return whether ``model`` gives exact log-probs for packed rows, with `packed_attention` in place of its own.

    The function computes three samples in a packed row and in separate rows, and compares their log-probs. It returns
    False for a model with layers that do not attend to the whole context, because attention of packed rows has no
    windows, for a model that is not on a CPU, for which this attention is made, and for one whose rotary embeddings
    depend on the longest position in the row (longrope, dynamic), which would be that of another sample.
    """
    try:
        config = model.config.get_text_config()
        layer_types = getattr(config, "layer_types", None) or ()
        windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        if set(layer_types) - {"full_attention"} or (windowed and not layer_types):
            return False
        ropes = getattr(config, "rope_parameters", None) or {}  # by layer type if these differ
        if {"longrope", "dynamic"} & {rope.get("rope_type") for rope in (ropes, *ropes.values()) if type(rope) is dict}:
            return False
        if next(model.parameters()).device.type != "cpu":
            return False
        with packed_attention(model):
            # A sample that is long enough to be cut into parts, and two short ones that leave it after different
            # prefixes.
            tokens = np.arange(1, LONGEST_PART + 2 * MIN_SHARED) * 7919 % int(config.vocab_size)
            short = [np.concatenate([tokens[:prefix], tokens[:5]]) for prefix in (MIN_SHARED, 2 * MIN_SHARED)]
            inputs = [row.astype(np.int32) for row in (tokens, *short)]
            samples = [unscored_sample(row, np.arange(row.size) > 0) for row in inputs]
            found = []
            for share in (True, False):
                logprobs: dict[int, Tensor] = {}
                for micro in micro_batches(samples, 2 * tokens.size, share=share):
                    given = micro.tokens, micro.index, micro.targets
                    logp, _ = trained_logprobs(model, *given, temperature=1.0, packing=micro.packing)
                    sizes = [samples[index].tokens.size - 1 for index in micro.samples]
                    logprobs |= dict(zip(micro.samples, logp.split(sizes), strict=True))
                found.append(torch.cat([logprobs[index] for index in range(len(samples))]))
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError):
        return False  # the model does not accept explicit positions, or does not pass the packing on to its attention
    return bool((found[0] - found[1]).abs().max() < PACKING_TOLERANCE)
