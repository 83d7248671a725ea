"""Engines of the transformers sampler, which compute next-token logits with their own copy of the weights.

`choose_engine` selects one for a model. `FusedEngine` computes models of the Llama family (Llama, Mistral, Qwen2,
Qwen3) without calling their modules, in few large operations per layer. In a model of a million parameters, most of the
time of a decoding step is the overhead of module calls; `benchmarks/sampler.py` measures the saving. `ModuleEngine`
calls the model itself, and works for other Hugging Face decoders.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from gleanrl.samplers.canary import check_fit
from gleanrl.samplers.kv_cache import Feed, KeyValueStore
from gleanrl.utils.errors import UserError
from gleanrl.utils.products import Product

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Types of rotary position embedding whose frequencies do not depend on the sequence length.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
# The three forward passes of `probe`: for each pass, the number of tokens that it appends to each of eight sequences.
# The sequences differ in length, and the last pass appends one token to each, like a decoding step. Rounding can be ten
# times as large in one sequence as in another, so two of them would say little.
_PROBE = ((2, 3, 1, 4, 3, 2, 1, 4), (2, 1, 3, 1, 1, 3, 2, 1), (1, 1, 1, 1, 1, 1, 1, 1))
# Largest root mean square error of the logits that `probe` accepts, as a share of their standard deviation, by the
# engine's dtype. Rounding to bfloat16 gives 0.03 to 0.08 (SmolLM2-135M, before and after training), and up to four
# times as much in the worst of 100,000 logits, which therefore says little. One wrong norm gives 0.9, and positions
# that are off by one 0.46.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.03}
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
    """Compare the logits of ``engine`` with those of ``model`` on eight short sequences of random tokens.

    The engine gets the sequences in several feeds, and so uses its cache. The model computes each in one pass.

    Raises:
        CannotServe: if the logits differ by more than rounding in ``dtype``, or the engine raises an error.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    random = np.random.default_rng(0)
    rows = [random.integers(vocabulary, size=sum(counts)).astype(np.int32) for counts in zip(*_PROBE, strict=True)]
    answer, store, done = torch.empty(0), KeyValueStore(), [0] * len(rows)
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
    error = float((answer - expected).square().mean().sqrt()) / spread
    if not error <= _TOLERANCE[dtype]:
        raise CannotServe(f"its cached pass differs from its full pass by {error:.2g} of the logits' spread")


# --- the Llama family -------------------------------------------------------------------------------
@dataclass(slots=True)
class _Layer:
    """Weights of one decoder layer. ``qkv`` is the weights of three projections, concatenated.

    A weight is None if the model does not have it.
    """

    input_norm: torch.Tensor
    qkv: Product
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Product
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate: Product
    up: Product
    down: Product


class FusedEngine:
    """Computes models of the Llama family without calling their modules.

    It is fast for five reasons. Tokens are packed, and rows of different lengths share a call of attention only where
    this costs less padding than another call. The queries, keys and values are one matrix product. With grouped-query
    attention, the query heads of a group become further queries of one head, so that keys and values are not repeated.
    The last layer computes only the last token of each row, because no other logits are needed. On a CPU, weights are
    packed for its matrix products (see `gleanrl.utils.products`); for a tied head this takes a second copy of it.

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
        self._shapes = {name: weight.to("meta") for name, weight in weights.items()}
        # For each parameter, the tensors and products that take its weights.
        self._targets: dict[str, list[Callable[[torch.Tensor], Any]]] = {name: [] for name in weights}

        def fused(*names: str) -> torch.Tensor:
            sizes = [weights[name].shape[0] for name in names]
            whole = torch.empty(sum(sizes), *weights[names[0]].shape[1:], dtype=dtype, device=self.device)
            for name, part in zip(names, whole.split(sizes), strict=True):
                self._targets[name].append(part.copy_)
            return whole

        self._products: list[Product] = []

        def product(*names: str, kept: torch.Tensor | None = None) -> Product:
            made = Product([weights[name].shape for name in names], dtype, self.device, kept)
            self._products.append(made)
            for index, name in enumerate(names):
                self._targets[name].append(partial(made.load, index))
            return made

        def optional(*names: str) -> torch.Tensor | None:
            return fused(*names) if names[0] in weights else None

        self._embedding = fused("model.embed_tokens.weight")
        self._layers: list[_Layer] = []
        for index in range(config.num_hidden_layers):
            prefix = f"model.layers.{index}"
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            layer = _Layer(
                input_norm=fused(f"{prefix}.input_layernorm.weight"),
                qkv=product(*(f"{attention}.{part}_proj.weight" for part in "qkv")),
                qkv_bias=optional(*(f"{attention}.{part}_proj.bias" for part in "qkv")),
                query_norm=optional(f"{attention}.q_norm.weight"),
                key_norm=optional(f"{attention}.k_norm.weight"),
                output=product(f"{attention}.o_proj.weight"),
                output_bias=optional(f"{attention}.o_proj.bias"),
                mlp_norm=fused(f"{prefix}.post_attention_layernorm.weight"),
                gate=product(f"{mlp}.gate_proj.weight"),
                up=product(f"{mlp}.up_proj.weight"),
                down=product(f"{mlp}.down_proj.weight"),
            )
            self._layers.append(layer)
        self._norm = fused("model.norm.weight")
        if "lm_head.weight" in weights:
            self._head = product("lm_head.weight")
        else:  # the output head has the weights of the embedding
            self._head = product("model.embed_tokens.weight", kept=self._embedding)
        if unknown := sorted(name for name, targets in self._targets.items() if not targets):
            raise CannotServe(f"weight {unknown[0]} is not fused")
        self.load(weights)

    def load(self, weights: Mapping[str, Any]) -> None:
        check_fit(self._shapes, weights)
        for product in self._products:
            product.start()
        with torch.no_grad():
            for name, weight in weights.items():
                for load in self._targets.get(name, ()):
                    load(weight)

    def logits(self, feed: Feed, store: KeyValueStore) -> torch.Tensor:
        """See `Engine.logits`. Letters in shapes are those of `Feed` and `Grid`; "hidden" is the width of the model."""
        heads, kv_heads, dim = self._heads, self._kv_heads, self._dim
        x = F.embedding(feed.tokens, self._embedding)  # [N, hidden]
        cos, sin = self._cos[feed.positions], self._sin[feed.positions]
        # The query heads of a group become further queries of one head: [L, 1, T * (heads / kv_heads), E].
        grids = [(grid, self._grouped(grid.mask)) for grid in feed.grids(self._waste)]
        for index, layer in enumerate(self._layers):
            projected = layer.qkv(self._rms(x, layer.input_norm), layer.qkv_bias).view(x.shape[0], -1, dim)
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
            x += layer.output(attended, layer.output_bias)
            normed = self._rms(x, layer.mlp_norm)
            gate = F.silu(layer.gate(normed), inplace=True)
            x += layer.down(gate.mul_(layer.up(normed)))
        x = self._rms(x, self._norm)
        return self._head(x).float()

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
        own: dict[int, Any] = {}
        for tensor in model.state_dict(keep_vars=True).values():
            own[id(tensor)] = tensor.to(dtype=dtype, copy=True) if tensor.is_floating_point() else tensor.clone()
        # Buffers that are not saved keep their dtype, as in a model that transformers loads in ``dtype``. The
        # frequencies of rotary positions are one: rounded to bfloat16, they turn position 1,000 by more than 1 rad.
        for parameter in model.parameters():
            own[id(parameter)] = torch.nn.Parameter(torch.empty_like(parameter, dtype=dtype), False)
        self._model: Any = copy.deepcopy(cast(torch.nn.Module, model), own).eval()
        try:
            self._model.set_attn_implementation("sdpa")
        except ValueError:
            self._model.set_attn_implementation("eager")
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._layers = model.config.get_text_config().num_hidden_layers
        self._targets = dict(self._model.named_parameters())
        self.device = model.device
        self.load(dict(model.named_parameters()))

    def load(self, weights: Mapping[str, Any]) -> None:
        check_fit(self._targets, weights)
        with torch.no_grad():
            for name, weight in weights.items():
                if name in self._targets:
                    self._targets[name].copy_(weight)

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
