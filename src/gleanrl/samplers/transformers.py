"""Samples from a transformers model in this process. Each conversation keeps its keys and values between turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from gleanrl.samplers.engines import Engine, choose_engine, copy_weights
from gleanrl.samplers.kv_cache import Feed, KeyValueStore
from gleanrl.samplers.sessions import Request, Row, SessionSampler, Worker
from gleanrl.schedule.device_lock import TakeDevice
from gleanrl.schedule.timeline import SpanRecorder
from gleanrl.types import IntArray


class TransformersSampler(SessionSampler):
    """Samples from a copy of a Hugging Face causal LM; implements `gleanrl.protocols.Sampler`.

    Args:
        model: any decoder with full attention; its weights are copied, so that training it has no effect here.
        max_rows, max_context, deterministic, inflight, device_lock: see `SessionSampler`. With ``inflight``, keys and
            values of older weights stay in use too.
        dtype: the dtype of the copy; None is float32 on a CPU and bfloat16 on a GPU.
        prefill_tokens: maximum number of tokens in one pass; None is 512 on a CPU, where more would only add padding,
            and 4096 on a GPU.
        timeline: ``record(kind, start, end, **tags)`` is called for each "prefill" and "decode".

    Raises:
        UserError: if the model cannot be served exactly.
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
        device_lock: TakeDevice | None = None,
        timeline: SpanRecorder | None = None,
    ) -> None:
        cpu = model.device.type == "cpu"
        if dtype is None:
            dtype = torch.float32 if cpu else torch.bfloat16
        if prefill_tokens is None:
            prefill_tokens = 512 if cpu else 4096
        self.decoder = Decoder(choose_engine(model, max_context, dtype), prefill_tokens, timeline)
        super().__init__(
            lambda: self.decoder,
            max_rows=max_rows,
            max_context=max_context,
            deterministic=deterministic,
            inflight=inflight,
            device_lock=device_lock,
        )


class Decoder(Worker):
    """Runs bursts on an engine, and keeps the keys and values of all conversations."""

    def __init__(self, engine: Engine, prefill_tokens: int, timeline: SpanRecorder | None) -> None:
        super().__init__(timeline)
        self.engine = engine
        self.store = KeyValueStore()
        self._prefill_tokens = prefill_tokens

    @torch.inference_mode()
    def burst(
        self,
        requests: Sequence[Request],
        version: int,
        interrupted: Callable[[int], bool],
        deliver: Callable[[list[Request]], None],
    ) -> list[Request]:
        """See `Worker.burst`. Every request's row must have an index."""
        self.counters.bursts += 1
        first: dict[bytes, Request] = {}
        leaders: dict[Request, Request] = {}  # request -> earlier one of the same prompt, both with empty rows
        for request in requests:
            if request.version >= 0:
                continue
            request.version = version
            self.counters.prompt_tokens += request.prompt.size
            # The last token of the prompt is fed again, because its logits must be computed.
            row, reach = request.row, min(request.row.length, request.prompt.size - 1)
            differs = np.flatnonzero(row.tokens[:reach] != request.prompt[:reach])
            row.length = int(differs[0]) if differs.size else reach
            if row.length == 0 and request.prompt.size > 1:
                leader = first.setdefault(request.prompt.tobytes(), request)
                if leader is not request:
                    leaders[request] = leader
        waiting = [r for r in requests if r not in leaders and r.pending().size > 1]
        decoding = [r for r in requests if r not in leaders and r.pending().size == 1]
        if waiting:
            started = perf_counter()
            fed = sum(request.pending().size for request in waiting)
            self._prefill(waiting)
            for follower, leader in leaders.items():
                self.store.copy(leader.row.index, follower.row.index, follower.prompt.size - 1)
                follower.row.extend(follower.prompt[:-1])
            decoding += [*_unanswered(waiting, deliver), *leaders]
            self.counters.prefill_s += self._span("prefill", started, tokens=fed, rows=len(waiting))
            self.counters.prefill_tokens += fed
        started, steps = perf_counter(), 0
        while decoding and not (steps and interrupted(len(decoding))):
            self._advance(decoding)
            decoding = _unanswered(decoding, deliver)
            steps += 1
        if steps:
            self.counters.decode_steps += steps
            self.counters.decode_s += self._span("decode", started, steps=steps)
        return decoding

    def load(self, weights: Mapping[str, Any]) -> None:
        copy_weights(self.engine.targets, weights)

    def _prefill(self, requests: Sequence[Request]) -> None:
        """Feed all missing tokens, a bounded number at a time, and sample a token for each row.

        Requests with about equally many missing tokens share a pass, which keeps padding small.
        """
        most = self._prefill_tokens
        for request in requests:
            while (pending := request.pending()).size > most:
                self._feed([request.row], [pending[:most]])
        chunk: list[Request] = []
        size = 0
        for request in sorted(requests, key=lambda request: request.pending().size):
            missing = request.pending().size
            if chunk and size + missing > most:
                self._advance(chunk)
                chunk, size = [], 0
            chunk.append(request)
            size += missing
        self._advance(chunk)

    def _advance(self, requests: Sequence[Request]) -> None:
        """Feed each row its missing tokens and sample one token for it."""
        requests = sorted(requests, key=lambda request: request.row.index)
        logits = self._feed([request.row for request in requests], [request.pending() for request in requests])
        device = logits.device
        temperature = torch.tensor([request.params.temperature for request in requests], device=device)
        uniforms = torch.tensor(
            [request.uniforms[len(request.tokens)] for request in requests], dtype=torch.float64, device=device
        )
        tokens, logprobs = draw(logits, temperature, uniforms)
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
            if token in request.params.stop_tokens:
                request.finish = "stop"
            elif len(request.tokens) == request.limit:
                request.finish = "length"
        self.counters.sampled_tokens += len(requests)

    def _feed(self, rows: Sequence[Row], tokens: Sequence[IntArray]) -> torch.Tensor:
        indices, starts = [row.index for row in rows], [row.length for row in rows]
        feed = Feed(indices, starts, tokens, self.engine.device)
        self.store.reserve(max(indices) + 1, feed.extent)
        logits = self.engine.logits(feed, self.store)
        for row, piece in zip(rows, tokens, strict=True):
            row.extend(piece)
        return logits


def _unanswered(requests: Sequence[Request], deliver: Callable[[list[Request]], None]) -> list[Request]:
    """Deliver the answered requests; return the others that are not cancelled."""
    if answered := [request for request in requests if request.finish]:
        deliver(answered)
    return [request for request in requests if not (request.finish or request.cancelled)]


def draw(logits: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row by inverting the cumulative distribution of ``softmax(logits / temperature)``.

    Args:
        logits: float32 ``[B, V]``.
        temperature: float32 ``[B]``; 0 selects the most likely token, and its log-prob is that at temperature 1.
        uniforms: float64 ``[B]`` in ``[0, 1)``; a row's draw depends on its own uniform and logits alone.

    Returns:
        tokens int64 ``[B]``, and their log-probs float32 ``[B]`` under the distribution that they were drawn from.
    """
    greedy = temperature == 0
    logprobs = (logits / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    # float64, so that rounding can neither select a token of probability zero nor pass the last token.
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    drawn = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
