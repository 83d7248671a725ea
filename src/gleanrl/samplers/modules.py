"""Runs any Hugging Face decoder: the model's own forward pass over a cache whose rows differ in length."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from gleanrl.samplers.engine import CannotServe
from gleanrl.samplers.kv_cache import Feed, KeyValueStore


class ModuleEngine:
    """Runs a copy of the model itself, with explicit positions and a 4-D mask.

    It is slower than a fused engine for tiny models, and exact for every model that takes positions, a 4-D mask and a
    cache.
    """

    def __init__(self, model: PreTrainedModel, max_context: int, dtype: torch.dtype) -> None:
        accepted = inspect.signature(model.forward).parameters
        if not {"position_ids", "past_key_values", "attention_mask"} <= set(accepted):
            raise CannotServe("its forward takes no position_ids, attention_mask or past_key_values")
        self._model: Any = copy.deepcopy(cast(torch.nn.Module, model)).to(dtype=dtype).eval().requires_grad_(False)
        try:
            self._model.set_attn_implementation("sdpa")
        except ValueError:
            self._model.set_attn_implementation("eager")
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._layers = model.config.get_text_config().num_hidden_layers
        self.targets: Mapping[str, torch.Tensor] = dict(self._model.named_parameters())
        self.device = model.device

    def logits(self, feed: Feed, store: KeyValueStore) -> torch.Tensor:
        cache = Cache(layers=[_RaggedLayer(layer, feed, store) for layer in range(self._layers)])
        output = self._model(
            input_ids=feed.to_grid(feed.tokens),
            position_ids=feed.grid_positions,
            attention_mask=feed.mask[:, None].to(self._model.dtype),
            past_key_values=cache,
            use_cache=True,
            **self._last_only,
        )
        # Rows are aligned right, so every row's last token is in the last column.
        return output.logits[:, -1].float()


class _RaggedLayer(CacheLayerMixin):
    """One layer's view of the store during one forward pass."""

    is_sliding = False

    def __init__(self, layer: int, feed: Feed, store: KeyValueStore) -> None:
        super().__init__()
        self._layer, self._feed, self._store = layer, feed, store
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (self._feed.from_grid(new.transpose(1, 2)) for new in (key_states, value_states))
        return self._store.append(self._layer, self._feed, keys, values)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._feed.extent, 0

    def get_seq_length(self) -> int:
        return self._feed.extent - self._feed.columns

    def get_max_length(self) -> int:
        return -1


def causal_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the model's own logits, float32 ``[n, vocabulary]`` for int64[n] ``tokens``; the reference for engines."""
    return cast(Any, model)(tokens[None], use_cache=False).logits[0].float()
