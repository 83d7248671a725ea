"""Samples from a model of transformers in this process.

The keys and values of each conversation stay cached between its turns, so that a turn computes only its new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from gleanrl.samplers.engines import Engine, choose_engine
from gleanrl.samplers.kv_cache import Feed, KeyValueStore
from gleanrl.samplers.sessions import Request, Row, SessionSampler, Worker, common_length
from gleanrl.schedule.device_lock import TakeDevice
from gleanrl.schedule.timeline import SpanRecorder
from gleanrl.types import IntArray

_DRAWN_AT_ONCE = 1 << 18  # number of probabilities that `draw` computes at once on a CPU


class TransformersSampler(SessionSampler):
    """Samples from a copy of a Hugging Face causal LM; implements `gleanrl.protocols.Sampler`.

    Args:
        model: a decoder whose attention covers the whole context. Its weights are copied, so training it has no effect
            on the sampler until weights are published.
        max_rows: largest number of open sessions. Further sessions wait in the order in which they were requested.
        max_context: largest length of prompt and completion together, in tokens.
        deterministic: whether to sample only when every open session waits for a completion, so that results do not
            depend on timing.
        inflight: whether `publish` loads new weights while sessions are open. Cached keys and values that older weights
            computed then stay in use.
        device_lock: sampling runs inside ``async with device_lock("sample")``. None = it does not wait for the device.
        dtype: dtype of the copy. None means float32 on a CPU and bfloat16 on a GPU.
        prefill_tokens: largest number of tokens in one prefill pass. None means 4096 on a GPU, and 512 on a CPU, where
            larger passes would only add padding.
        timeline: records the spans "prefill" and "decode" of each burst. None = no spans are recorded.

    Raises:
        UserError: if no engine computes the model exactly (see `gleanrl.samplers.engines.choose_engine`).
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
    """The `Worker` that computes bursts with an `Engine`, and stores the keys and values of all conversations."""

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
        """See `Worker.burst`. The row of every request must have an index.

        A new request reuses its row's cached tokens as far as they are the beginning of its prompt. Among new requests
        with the same prompt and empty rows, as at the start of a group, only the first is prefilled, and its keys and
        values are copied to the others.
        """
        self.counters.bursts += 1
        first: dict[bytes, Request] = {}
        # For a new request with an empty row: the earlier request with the same prompt whose keys and values it copies.
        leaders: dict[Request, Request] = {}
        for request in requests:
            if request.version >= 0:
                continue
            request.version = version
            self.counters.prompt_tokens += request.prompt.size
            # The last token of the prompt is fed even if it is cached, because its logits are needed.
            row = request.row
            row.length = common_length(row.tokens[: row.length], request.prompt[:-1])
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
        self.engine.load(weights)

    def _prefill(self, requests: Sequence[Request]) -> None:
        """Feed the tokens of ``requests`` that are not cached yet, and sample the first token of each completion.

        Each pass has at most ``prefill_tokens`` tokens. Requests with similar numbers of missing tokens share a pass,
        which keeps padding small.
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
        """Feed the missing tokens of all ``requests`` in one pass, and sample one token for each."""
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
    """Deliver the complete requests, and return the incomplete ones that are not cancelled."""
    if answered := [request for request in requests if request.finish]:
        deliver(answered)
    return [request for request in requests if not (request.finish or request.cancelled)]


def draw(logits: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token for each row by inverting the cumulative distribution of ``softmax(logits / temperature)``.

    The token of a row depends only on the logits, temperature and uniform number of this row.

    Args:
        logits: float32 ``[B, V]``.
        temperature: float32 ``[B]``. 0 selects the most likely token and returns its log-prob at temperature 1.
        uniforms: float64 ``[B]``, uniform random numbers in ``[0, 1)``.

    Returns:
        The tokens, int64 ``[B]``, and their log-probs, float32 ``[B]``, under the distribution that they were sampled
        from.
    """
    # On a CPU, few rows at a time: their probabilities then stay in the processor's cache.
    rows = max(1, _DRAWN_AT_ONCE // logits.shape[-1]) if logits.device.type == "cpu" else logits.shape[0]
    tokens, logprobs = [], []
    for part, heat, uniform in zip(logits.split(rows), temperature.split(rows), uniforms.split(rows), strict=True):
        greedy = (heat == 0)[:, None]
        scaled = part / torch.where(greedy, 1.0, heat[:, None])
        highest = scaled.amax(-1, keepdim=True)
        # The sum is float64 and the uniform is scaled by its last entry, so that rounding neither selects a token of
        # probability 0 nor an index beyond the last token.
        cumulative = (scaled - highest).exp_().cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        token = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
        if greedy.any():
            token = torch.where(greedy, scaled.argmax(-1, keepdim=True), token)
        tokens.append(token[:, 0])
        logprobs.append((scaled.gather(-1, token) - highest - total.log().float())[:, 0])
    return torch.cat(tokens), torch.cat(logprobs)
