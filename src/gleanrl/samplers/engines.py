"""Engines of the transformers sampler, which compute next-token logits with their own copy of the weights.

`choose_engine` selects one for a model. `FusedEngine` computes models of the Llama family (Llama, Mistral, Qwen2,
Qwen3) without calling their modules, in few large operations per layer. In a model of a million parameters, most of the
time of a decoding step is the overhead of module calls; `benchmarks/sampler.py` measures the saving. `ModuleEngine`
calls the model itself, and works for other Hugging Face decoders.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from gleanrl.samplers.canary import check_fit
from gleanrl.samplers.kv_cache import Feed, KeyValueStore
from gleanrl.utils.errors import UserError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Types of rotary position embedding whose frequencies do not depend on the sequence length.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
# The three forward passes of `probe`: for each pass, the number of tokens that it appends to each of two sequences. The
# sequences differ in length, and the last pass appends one token to each, like a decoding step.
_PROBE = ((2, 3), (2, 1), (1, 1))
# Largest error of the logits that `probe` accepts, as a share of their standard deviation, by the engine's dtype.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
# Unused entries after each row of a weight that lies in memory as [inputs, outputs]. Rows that start a multiple of a
# large power of two apart displace each other in the processor's cache; a decoding step of a model of 135 M
# parameters then takes 2 to 5 % longer.
_GAP = 16
_HEAD_BLOCK = 1024  # number of tokens whose rows of the head `FusedEngine` multiplies at once
# FLOP of attention that take as long as one more call of it, on a CPU and on a GPU.
_CALL_FLOP = (2_000_000, 300_000_000)


class CannotServe(Exception):
    """Raised if an engine cannot compute a model exactly. The message gives the reason."""


class Engine(Protocol):
    """Computes logits with its own copy of a model's weights. Keys and values are kept in a `KeyValueStore`."""

    @property
    def device(self) -> torch.device: ...

    def load(self, weights: Mapping[str, Any]) -> None:
        """Copy ``weights``, by Hugging Face parameter name; convert their dtype and device.

        Raises:
            ValueError: if a weight is missing or has another shape. Nothing is copied then.
        """
        ...

    def logits(self, feed: Feed, store: KeyValueStore) -> torch.Tensor:
        """Compute the tokens of ``feed``, append their keys and values to ``store``, and return next-token logits.

        The result is float32 ``[B, vocabulary]``: the logits after the last token of each of the feed's B rows.
        """
        ...


def copy_weights(targets: Mapping[str, torch.Tensor], weights: Mapping[str, Any]) -> None:
    """Copy ``weights`` into the tensors ``targets`` of the same names; convert their dtype and device.

    Raises:
        ValueError: if a weight is missing or has another shape. Nothing is copied then.
    """
    check_fit(targets, weights)
    with torch.no_grad():
        for name, weight in weights.items():
            if name in targets:
                targets[name].copy_(weight)


def choose_engine(model: PreTrainedModel, max_context: int, dtype: torch.dtype) -> Engine:
    """Make the fastest engine that computes ``model`` exactly, with a copy of its weights in ``dtype``.

    Raises:
        UserError: if no engine computes the model exactly for contexts of ``max_context`` tokens, for example because
            its attention window is shorter. The message gives the reason.
    """
    config = model.config.get_text_config()
    own = getattr(config, "max_position_embeddings", None)
    if own is not None and max_context > own:
        raise UserError(f"a context of {max_context} tokens is longer than the model's {own} positions")
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        raise UserError(f"the transformers sampler serves attention layers only, not {sorted(kinds)}")
    window = getattr(config, "sliding_window", None)
    windowed = "sliding_attention" in kinds or (not kinds and getattr(config, "use_sliding_window", True))
    if window is not None and windowed and max_context > window:
        raise UserError(
            f"the model's attention window is {window} tokens and the transformers sampler keeps whole contexts; "
            f"set model.max_context to {window} or less"
        )
    reason: Exception | None = None
    for build in (FusedEngine, ModuleEngine):
        try:
            engine = build(model, max_context, dtype)
            probe(engine, model, dtype)
            return engine
        except CannotServe as error:
            reason = error
    raise UserError(f"the transformers sampler cannot serve a {type(model).__name__} exactly: {reason}")


@torch.inference_mode()
def probe(engine: Engine, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Compare the logits of ``engine`` with those of ``model`` on two short sequences of random tokens.

    The engine gets the sequences in several feeds, and so uses its cache. The model computes each in one pass.

    Raises:
        CannotServe: if the logits differ by more than rounding in ``dtype``, or the engine raises an error.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    random = np.random.default_rng(0)
    rows = [random.integers(vocabulary, size=sum(step[row] for step in _PROBE)).astype(np.int32) for row in (0, 1)]
    answer, store, done = torch.empty(0), KeyValueStore(), [0, 0]
    try:
        store.reserve(len(rows), max(row.size for row in rows))
        for step in _PROBE:
            pieces = [row[start : start + count] for row, start, count in zip(rows, done, step, strict=True)]
            answer = engine.logits(Feed(range(len(rows)), done, pieces, engine.device), store)
            done = [start + count for start, count in zip(done, step, strict=True)]
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, NotImplementedError) as error:
        raise CannotServe(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    was_training = model.training
    model.eval()
    last = []
    for row in rows:
        tokens = torch.tensor(row).to(model.device).long()[None]
        last.append(cast(Any, model)(tokens, use_cache=False).logits[0].float()[-1])
    model.train(was_training)
    expected = torch.stack(last)
    spread = float(expected.std()) or 1.0
    error = float((answer - expected).abs().max()) / spread
    if not error <= _TOLERANCE[dtype]:
        raise CannotServe(f"its cached pass differs from its full pass by {error:.2g} of the logits' spread")


# --- the Llama family -------------------------------------------------------------------------------
@dataclass(slots=True)
class _Layer:
    """Weights of one decoder layer. ``qkv`` is the weights of three projections, concatenated.

    A weight is None if the model does not have it.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class FusedEngine:
    """Computes models of the Llama family without calling their modules.

    It is fast for five reasons. Tokens are packed, and rows of different lengths share a call of attention only where
    this costs less padding than another call. The queries, keys and values are one matrix product. With grouped-query
    attention, the query heads of a group become further queries of one head, so that keys and values are not repeated.
    The last layer computes only the last token of each row, because no other logits are needed. On a CPU, float32
    weights have the layout by which products are fastest; for the head this takes a second copy of it.

    Raises:
        CannotServe: if the model is of another family, or has a weight or a setting that this class does not support.
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
        self._waste = _CALL_FLOP[self.device.type != "cpu"] // (4 * self._heads * self._dim)
        positions = torch.arange(max(max_context, 16), device=self.device)
        angles = torch.outer(positions, rope.inv_freq.float())
        if 2 * angles.shape[1] != self._dim:
            raise CannotServe("its rotary embedding covers part of a head")
        self._cos = (angles.cos() * rope.attention_scaling).to(dtype)[:, None]  # [positions, 1, dim / 2]
        self._sin = (angles.sin() * rope.attention_scaling).to(dtype)[:, None]

        weights = dict(model.named_parameters())
        targets: dict[str, torch.Tensor] = {}  # for each parameter, the view of its part of a concatenated weight

        # On a CPU, products of few rows are a tenth faster if float32 weights lie in memory as [inputs, outputs].
        by_inputs = self.device.type == "cpu" and dtype == torch.float32

        def fused(*names: str, multiplied: bool = False) -> torch.Tensor:
            sizes = [weights[name].shape[0] for name in names]
            shape = (sum(sizes), *weights[names[0]].shape[1:])
            if multiplied and by_inputs:
                whole = torch.empty(shape[1], shape[0] + _GAP)[:, : shape[0]].t()
            else:
                whole = torch.empty(shape, dtype=dtype, device=self.device)
            targets.update(zip(names, whole.split(sizes), strict=True))
            return whole

        def optional(*names: str) -> torch.Tensor | None:
            return fused(*names) if names[0] in weights else None

        self._embedding = fused("model.embed_tokens.weight")
        self._layers: list[_Layer] = []
        for index in range(config.num_hidden_layers):
            prefix = f"model.layers.{index}"
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            layer = _Layer(
                input_norm=fused(f"{prefix}.input_layernorm.weight"),
                qkv=fused(*(f"{attention}.{part}_proj.weight" for part in "qkv"), multiplied=True),
                qkv_bias=optional(*(f"{attention}.{part}_proj.bias" for part in "qkv")),
                query_norm=optional(f"{attention}.q_norm.weight"),
                key_norm=optional(f"{attention}.k_norm.weight"),
                output=fused(f"{attention}.o_proj.weight", multiplied=True),
                output_bias=optional(f"{attention}.o_proj.bias"),
                mlp_norm=fused(f"{prefix}.post_attention_layernorm.weight"),
                gate=fused(f"{mlp}.gate_proj.weight", multiplied=True),
                up=fused(f"{mlp}.up_proj.weight", multiplied=True),
                down=fused(f"{mlp}.down_proj.weight", multiplied=True),
            )
            self._layers.append(layer)
        self._norm = fused("model.norm.weight")
        head = optional("lm_head.weight")
        # A model without weights of its own for the output head multiplies by those of the embedding.
        self._head = self._embedding if head is None else head
        if unknown := sorted(set(weights) - set(targets)):
            raise CannotServe(f"weight {unknown[0]} is not fused")
        self.targets: Mapping[str, torch.Tensor] = targets
        # A copy of the head as [inputs, outputs], in blocks, because a product by the whole head in this layout is
        # slow: its rows lie too far apart.
        self._head_blocks: list[torch.Tensor] = []
        if by_inputs:
            self._head_blocks = [torch.empty(rows.shape[::-1]) for rows in self._head.split(_HEAD_BLOCK)]
        self.load(weights)

    def load(self, weights: Mapping[str, Any]) -> None:
        copy_weights(self.targets, weights)
        if self._head_blocks:
            for block, rows in zip(self._head_blocks, self._head.split(_HEAD_BLOCK), strict=True):
                block.copy_(rows.t())

    def logits(self, feed: Feed, store: KeyValueStore) -> torch.Tensor:
        """See `Engine.logits`. Letters in shapes are those of `Feed` and `Grid`; "hidden" is the width of the model."""
        heads, kv_heads, dim = self._heads, self._kv_heads, self._dim
        x = F.embedding(feed.tokens, self._embedding)  # [N, hidden]
        cos, sin = self._cos[feed.positions], self._sin[feed.positions]
        # The query heads of a group become further queries of one head: [L, 1, T * (heads / kv_heads), E].
        grids = [(grid, self._grouped(grid.mask)) for grid in feed.grids(self._waste)]
        for index, layer in enumerate(self._layers):
            projected = F.linear(self._rms(x, layer.input_norm), layer.qkv, layer.qkv_bias).view(x.shape[0], -1, dim)
            rotated, values = projected.split([heads + kv_heads, kv_heads], 1)
            if layer.query_norm is not None and layer.key_norm is not None:
                queries, keys = rotated.split([heads, kv_heads], 1)
                rotated = torch.cat([self._rms(queries, layer.query_norm), self._rms(keys, layer.key_norm)], 1)
            left, right = rotated.chunk(2, -1)
            rotated = torch.empty_like(rotated)
            new_left, new_right = rotated.chunk(2, -1)
            torch.mul(left, cos, out=new_left).addcmul_(right, sin, value=-1)
            torch.mul(right, cos, out=new_right).addcmul_(left, sin)
            queries, keys = rotated.split([heads, kv_heads], 1)  # [N, heads, dim], [N, kv_heads, dim]
            keys, values = store.append(index, feed, keys, values)
            if index == len(self._layers) - 1:  # in the last layer, only the last token of each row is needed
                x, queries = x[feed.last], queries[feed.last]
                if feed.tokens.shape[0] > feed.size:
                    grids = [(grid, self._grouped(grid.mask)) for grid in feed.grids(self._waste, last=True)]
            attended = torch.empty_like(queries)
            for grid, mask in grids:
                arranged = grid.arrange(queries[grid.tokens]).view(grid.size, grid.columns, kv_heads, -1, dim)
                result = F.scaled_dot_product_attention(
                    arranged.transpose(1, 2).reshape(grid.size, kv_heads, -1, dim),
                    grid.select(keys),
                    grid.select(values),
                    attn_mask=mask,
                )
                result = result.view(grid.size, kv_heads, grid.columns, -1, dim).transpose(1, 2)
                attended[grid.tokens] = grid.pack(result.reshape(grid.size, grid.columns, heads, dim))
            attended = attended.view(x.shape[0], -1)
            x += F.linear(attended, layer.output, layer.output_bias)
            normed = self._rms(x, layer.mlp_norm)
            gate = F.silu(F.linear(normed, layer.gate), inplace=True)
            x += F.linear(gate.mul_(F.linear(normed, layer.up)), layer.down)
        x = self._rms(x, self._norm)
        if not self._head_blocks:
            return F.linear(x, self._head).float()
        logits = x.new_empty(feed.size, self._head.shape[0])
        for block, out in zip(self._head_blocks, logits.split(_HEAD_BLOCK, 1), strict=True):
            torch.mm(x, block, out=out)
        return logits

    def _grouped(self, mask: torch.Tensor) -> torch.Tensor:
        mask = mask.to(self._embedding.dtype)[:, None]
        return mask.repeat_interleave(self._heads // self._kv_heads, 2)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)


# --- any other decoder ------------------------------------------------------------------------------
class ModuleEngine:
    """Calls a copy of the model, with explicit positions and a 4-D mask, because rows of the cache differ in length.

    It is exact for every model whose ``forward`` accepts positions, a 4-D mask and a cache. For tiny models it is
    slower than `FusedEngine`.

    Raises:
        CannotServe: if ``forward`` does not accept these arguments.
    """

    def __init__(self, model: PreTrainedModel, max_context: int, dtype: torch.dtype) -> None:
        del max_context
        accepted = inspect.signature(model.forward).parameters
        if not {"position_ids", "past_key_values", "attention_mask"} <= set(accepted):
            raise CannotServe("its forward takes no position_ids, attention_mask or past_key_values")
        own = {id(p): torch.nn.Parameter(torch.empty_like(p, dtype=dtype), False) for p in model.parameters()}
        self._model: Any = copy.deepcopy(cast(torch.nn.Module, model), own).to(dtype=dtype).eval()
        try:
            self._model.set_attn_implementation("sdpa")
        except ValueError:
            self._model.set_attn_implementation("eager")
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._layers = model.config.get_text_config().num_hidden_layers
        self.targets: Mapping[str, torch.Tensor] = dict(self._model.named_parameters())
        self.device = model.device
        self.load(dict(model.named_parameters()))

    def load(self, weights: Mapping[str, Any]) -> None:
        copy_weights(self.targets, weights)

    def logits(self, feed: Feed, store: KeyValueStore) -> torch.Tensor:
        cache = Cache(layers=[_RaggedLayer(layer, feed, store) for layer in range(self._layers)])
        output = self._model(
            input_ids=feed.grid.arrange(feed.tokens),
            position_ids=feed.grid.positions,
            attention_mask=feed.grid.mask[:, None].to(self._model.dtype),
            past_key_values=cache,
            use_cache=True,
            **self._last_only,
        )
        # Rows are padded on the left, so the last token of every row is in the last column.
        return output.logits[:, -1].float()


class _RaggedLayer(CacheLayerMixin):
    """Presents one layer of a `KeyValueStore` to a model as a cache layer of transformers, for one forward pass."""

    is_sliding = False

    def __init__(self, layer: int, feed: Feed, store: KeyValueStore) -> None:
        super().__init__()
        self._layer, self._feed, self._store = layer, feed, store
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grid = self._feed.grid
        keys, values = (grid.pack(new.transpose(1, 2)) for new in (key_states, value_states))
        keys, values = self._store.append(self._layer, self._feed, keys, values)
        return grid.select(keys), grid.select(values)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._feed.extent, 0

    def get_seq_length(self) -> int:
        return self._feed.extent - self._feed.grid.columns

    def get_max_length(self) -> int:
        return -1
