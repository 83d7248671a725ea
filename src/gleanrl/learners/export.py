"""A Hugging Face model directory of what was trained, which transformers and vLLM load unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils import logging

from gleanrl.learners.lora import is_adapted
from gleanrl.utils import atomic


def export(folder: Path, model: Any, weights: Mapping[str, Tensor], tokenizer: Any = None) -> None:
    """Write ``weights`` under the config of ``model``, and the tokenizer, whole or not at all.

    Raises `UserError` on a full disk.
    """
    base = model.get_base_model() if is_adapted(model) else model
    needed = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    with atomic.directory(folder, needed=needed) as partial:
        with _without_progress_bar():
            base.save_pretrained(partial, state_dict=dict(weights))
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """transformers draws one a shard, into the middle of the run's own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
