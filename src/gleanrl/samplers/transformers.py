"""Samples from a transformers model in this process. Each conversation keeps its keys and values between turns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import torch
from transformers import PreTrainedModel

from gleanrl.samplers.burst import Decoder
from gleanrl.samplers.choose import choose_engine
from gleanrl.samplers.sessions import Recorder, SessionSampler


class TransformersSampler(SessionSampler):
    """Samples from a copy of a Hugging Face causal LM; implements `gleanrl.protocols.Sampler`.

    Args:
        model: any decoder with full attention; its weights are copied, so that it can keep training.
        max_rows, max_context, deterministic, inflight, device_lock: see `SessionSampler`. With ``inflight``, keys and
            values of older weights stay in use too.
        dtype: the dtype of the copy; None is float32 on a CPU and bfloat16 on a GPU.
        prefill_tokens: tokens computed in one pass; None is 512 on a CPU, where more only costs padding, and 4096 on a
            GPU.
        timeline: ``record(kind, start, end, **tags)`` is called for each "prefill" and "decode".

    Raises:
        UserError: the model cannot be served exactly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int = 256,
        max_context: int,
        deterministic: bool = True,
        inflight: bool = False,
        dtype: torch.dtype | None = None,
        prefill_tokens: int | None = None,
        device_lock: Callable[[Any], AbstractAsyncContextManager[Any]] | None = None,
        timeline: Recorder | None = None,
    ) -> None:
        if dtype is None:
            dtype = torch.float32 if model.device.type == "cpu" else torch.bfloat16
        if prefill_tokens is None:
            prefill_tokens = 512 if model.device.type == "cpu" else 4096
        record = timeline.record if timeline is not None else None
        decoder = Decoder(choose_engine(model, max_context, dtype), prefill_tokens=prefill_tokens, record=record)
        super().__init__(
            lambda: decoder,
            max_rows=max_rows,
            max_context=max_context,
            deterministic=deterministic,
            inflight=inflight,
            device_lock=device_lock,
        )
        self._decoder = decoder
