"""Computes the Llama family (Llama, Mistral, Qwen2, Qwen3) without the model's modules: few large operations per layer.

Tokens stay packed, so that padding costs nothing outside attention. Projections that share an input are one
matrix product. Grouped query heads are folded into the query axis, so that keys are never repeated. The last
layer computes only the tokens whose logits are needed. For a model of a million parameters the modules' overhead
is most of a decoding step; `benchmarks/sampler.py` measures the saving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from gleanrl.samplers.engine import CannotServe, copy_weights
from gleanrl.samplers.kv_cache import Feed, KeyValueStore

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the length


@dataclass(slots=True)
class _Layer:
    """Weights of one decoder layer. ``qkv`` and ``gate_up`` hold several stacked projections."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class FusedEngine:
    """Runs a forward pass of its own over its own copy of the weights.

    Raises:
        CannotServe: the model is of another family, or has a weight or a setting that this pass does not support.
    """

    def __init__(self, model: PreTrainedModel, max_context: int, dtype: torch.dtype) -> None:
        config = model.config
        rope = getattr(getattr(model, "model", None), "rotary_emb", None)
        if config.model_type not in FAMILIES or rope is None:
            raise CannotServe(f"{config.model_type} is not of the Llama family")
        if config.hidden_act != "silu" or rope.rope_type not in _FIXED_ROPE:
            raise CannotServe(f"activation {config.hidden_act} or rope {rope.rope_type} is not fused")
        self.device = model.device
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._eps = config.rms_norm_eps
        positions = torch.arange(max(max_context, 16), device=self.device)
        angles = torch.outer(positions, rope.inv_freq.float())
        if 2 * angles.shape[1] != self._dim:
            raise CannotServe("its rotary embedding covers part of a head")
        self._cos = (angles.cos() * rope.attention_scaling).to(dtype)[:, None]  # [positions, 1, dim / 2]
        self._sin = (angles.sin() * rope.attention_scaling).to(dtype)[:, None]
        self._build(dict(model.named_parameters()), config.num_hidden_layers, dtype)

    def _build(self, weights: dict[str, torch.Tensor], layers: int, dtype: torch.dtype) -> None:
        """Allocate fused tensors, map each parameter to its part of them, and fill them."""
        targets: dict[str, torch.Tensor] = {}

        def fused(*names: str) -> torch.Tensor:
            sizes = [weights[name].shape[0] for name in names]
            whole = torch.empty(sum(sizes), *weights[names[0]].shape[1:], dtype=dtype, device=self.device)
            targets.update(zip(names, whole.split(sizes), strict=True))
            return whole

        def optional(*names: str) -> torch.Tensor | None:
            return fused(*names) if names[0] in weights else None

        def layer(prefix: str) -> _Layer:
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            return _Layer(
                input_norm=fused(f"{prefix}.input_layernorm.weight"),
                qkv=fused(*(f"{attention}.{part}_proj.weight" for part in "qkv")),
                qkv_bias=optional(*(f"{attention}.{part}_proj.bias" for part in "qkv")),
                query_norm=optional(f"{attention}.q_norm.weight"),
                key_norm=optional(f"{attention}.k_norm.weight"),
                output=fused(f"{attention}.o_proj.weight"),
                output_bias=optional(f"{attention}.o_proj.bias"),
                mlp_norm=fused(f"{prefix}.post_attention_layernorm.weight"),
                gate_up=fused(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
                down=fused(f"{mlp}.down_proj.weight"),
            )

        self._embedding = fused("model.embed_tokens.weight")
        self._layers = [layer(f"model.layers.{i}") for i in range(layers)]
        self._norm = fused("model.norm.weight")
        tied = "lm_head.weight" not in weights
        self._head = self._embedding if tied else fused("lm_head.weight")
        if unknown := sorted(set(weights) - set(targets)):
            raise CannotServe(f"weight {unknown[0]} is not fused")
        self.targets: Mapping[str, torch.Tensor] = targets
        copy_weights(targets, weights)

    def logits(self, feed: Feed, store: KeyValueStore) -> torch.Tensor:
        x = F.embedding(feed.tokens, self._embedding)
        cos, sin = self._cos[feed.positions], self._sin[feed.positions]
        folded = self._heads // self._kv_heads
        mask = feed.mask.to(x.dtype)[:, None].repeat_interleave(folded, 2)  # [B, 1, T * folded, E]
        for index, layer in enumerate(self._layers):
            queries, keys, values = self._project(layer, x, cos, sin)
            keys, values = store.append(index, feed, keys, values)
            if index == len(self._layers) - 1:
                x, attended = x[feed.last], self._attend_last(feed, queries, keys, values, mask)
            else:
                attended = self._attend(feed, queries, keys, values, mask)
            x = x + F.linear(attended, layer.output, layer.output_bias)
            gate, up = F.linear(self._rms(x, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(self._rms(x, self._norm), self._head).float()

    def _project(
        self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated queries ``[N, heads, dim]``, and rotated keys and values ``[N, kv_heads, dim]``."""
        both = F.linear(self._rms(x, layer.input_norm), layer.qkv, layer.qkv_bias).view(x.shape[0], -1, self._dim)
        rotated, values = both.split([self._heads + self._kv_heads, self._kv_heads], 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = rotated.split([self._heads, self._kv_heads], 1)
            rotated = torch.cat([self._rms(queries, layer.query_norm), self._rms(keys, layer.key_norm)], 1)
        left, right = rotated.chunk(2, -1)
        rotated = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
        queries, keys = rotated.split([self._heads, self._kv_heads], 1)
        return queries, keys, values

    def _attend(
        self, feed: Feed, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attend with queries ``[N, heads, dim]`` over ``[B, kv_heads, E, dim]``; return ``[N, heads * dim]``."""
        grid = feed.to_grid(queries).view(feed.size, feed.columns, self._kv_heads, -1, self._dim)
        stacked = grid.transpose(1, 2).reshape(feed.size, self._kv_heads, -1, self._dim)
        out = F.scaled_dot_product_attention(stacked, keys, values, attn_mask=mask)
        out = out.view(feed.size, self._kv_heads, feed.columns, -1, self._dim).transpose(1, 2)
        return feed.from_grid(out.reshape(feed.size, feed.columns, -1))

    def _attend_last(
        self, feed: Feed, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attend with each row's last query only; return ``[B, heads * dim]``."""
        stacked = queries[feed.last].view(feed.size, self._kv_heads, -1, self._dim)
        out = F.scaled_dot_product_attention(stacked, keys, values, attn_mask=mask[:, :, -stacked.shape[2] :])
        return out.reshape(feed.size, -1)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)
