"""Chooses the engine that serves a model: the fastest one that a probe shows to be exact."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from gleanrl.samplers.engine import CannotServe, Engine
from gleanrl.samplers.fused import FusedEngine
from gleanrl.samplers.kv_cache import Feed, KeyValueStore
from gleanrl.samplers.modules import ModuleEngine, causal_logits
from gleanrl.types import IntArray
from gleanrl.utils.errors import UserError

_PROBE = ((2, 3), (2, 1), (1, 1))  # tokens of two rows in three feeds: ragged starts, then a decoding step
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}  # of the logits' spread


def choose_engine(model: PreTrainedModel, max_context: int, dtype: torch.dtype) -> Engine:
    """Return the fastest engine that computes ``model`` exactly up to ``max_context`` positions.

    Raises:
        UserError: no engine does; the message says why.
    """
    _check_context(model, max_context)
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
    """Check that two short conversations, fed in pieces, give the same logits as the model's own full pass.

    Raises:
        CannotServe: the logits differ, or the engine fails on this model.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    random = np.random.default_rng(0)
    rows = [random.integers(vocabulary, size=sum(step[row] for step in _PROBE)).astype(np.int32) for row in (0, 1)]
    try:
        answer = _fed_in_pieces(engine, rows)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, NotImplementedError) as error:
        raise CannotServe(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    was_training = model.training
    model.eval()
    expected = torch.stack([causal_logits(model, torch.tensor(row).to(model.device).long())[-1] for row in rows])
    model.train(was_training)
    spread = float(expected.std()) or 1.0
    error = float((answer - expected).abs().max()) / spread
    if not error <= _TOLERANCE[dtype]:
        raise CannotServe(f"its cached pass differs from its full pass by {error:.2g} of the logits' spread")


def _fed_in_pieces(engine: Engine, rows: list[IntArray]) -> torch.Tensor:
    store, done = KeyValueStore(), [0] * len(rows)
    store.reserve(len(rows), max(row.size for row in rows))
    answer = torch.empty(0)
    for step in _PROBE:
        pieces = [row[start : start + count] for row, start, count in zip(rows, done, step, strict=True)]
        answer = engine.logits(Feed(range(len(rows)), done, pieces, engine.device), store)
        done = [start + count for start, count in zip(done, step, strict=True)]
    return answer


def _check_context(model: PreTrainedModel, max_context: int) -> None:
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
