"""The synchronous half of the sampler: takes conversations and returns sampled tokens, on one thread.

A *burst* takes requests, computes the tokens that their rows do not hold yet (prefill), and then repeatedly samples a
token for each row (decode) until all requests are answered or the caller interrupts. Unfinished requests continue in
the next burst. A request is delivered the moment it is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch

from gleanrl.protocols import SamplingParams
from gleanrl.samplers.drawing import draw
from gleanrl.samplers.engine import Engine, copy_weights
from gleanrl.samplers.kv_cache import Feed, KeyValueStore
from gleanrl.types import IntArray

Record = Callable[..., None]  # record(kind, start, end, **tags), times of perf_counter


class Row:
    """One conversation's place in the store, and the tokens that it holds there."""

    def __init__(self, ordinal: int, max_context: int) -> None:
        self.ordinal = ordinal  # the order in which sessions opened
        self.index = -1  # in the store; -1 until the conversation first computes something
        self.tokens = np.zeros(max_context, np.int32)
        self.length = 0

    def keep_common(self, prompt: IntArray) -> None:
        """Keep the common prefix with ``prompt``, without the prompt's last token, whose logits must be computed."""
        reach = min(self.length, prompt.size - 1)
        differs = np.flatnonzero(self.tokens[:reach] != prompt[:reach])
        self.length = int(differs[0]) if differs.size else reach

    def extend(self, tokens: IntArray) -> None:
        self.tokens[self.length : self.length + tokens.size] = tokens
        self.length += tokens.size


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and how to continue it; filled with the sampled tokens."""

    row: Row
    prompt: IntArray
    params: SamplingParams
    limit: int  # tokens, at least 1, that params and the context allow
    uniforms: np.ndarray  # float64[limit]
    version: int = -1  # of the weights that sampled the first token, hence the oldest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    cancelled: bool = False

    def pending(self) -> IntArray:
        """Return the tokens of prompt and answer that the row does not hold yet."""
        held = self.row.length
        if held < self.prompt.size:
            return self.prompt[held:]  # only before the first token is sampled
        return np.array(self.tokens[held - self.prompt.size :], np.int32)

    def take(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.params.stop_tokens:
            self.finish = "stop"
        elif len(self.tokens) == self.limit:
            self.finish = "length"


@dataclass(slots=True)
class Counters:
    """Running totals. ``prefill_tokens`` counts the prompt tokens that were computed; the rest was held already."""

    prompt_tokens: int = 0
    prefill_tokens: int = 0
    sampled_tokens: int = 0
    bursts: int = 0
    decode_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Decoder:
    """Runs bursts. Only one thread may be inside at a time."""

    def __init__(self, engine: Engine, *, prefill_tokens: int = 2048, record: Record | None = None) -> None:
        self.engine = engine
        self.store = KeyValueStore()
        self.counters = Counters()
        self._prefill_tokens = prefill_tokens
        self._record = record

    @torch.inference_mode()
    def burst(
        self,
        requests: Sequence[Request],
        version: int,
        interrupted: Callable[[int], bool],
        deliver: Callable[[list[Request]], None],
    ) -> list[Request]:
        """Work until all requests are answered or ``interrupted(rows still decoding)``; return the unanswered ones.

        Every row must have its place in the store. ``deliver`` is called on this thread.
        """
        self.counters.bursts += 1
        new = [request for request in requests if request.version < 0]
        for request in new:
            request.version = version
            request.row.keep_common(request.prompt)
        leaders = _same_openings(new)
        self.counters.prompt_tokens += sum(request.prompt.size for request in new)
        waiting = [r for r in requests if r not in leaders and r.pending().size > 1]
        decoding = [r for r in requests if r not in leaders and r.pending().size == 1]
        if waiting:
            started = perf_counter()
            fed = self._prefill(waiting)
            for follower, leader in leaders.items():
                self._adopt(follower, leader)
            decoding += [*self._settle(waiting, deliver), *leaders]
            self.counters.prefill_s += self._span("prefill", started, tokens=fed, rows=len(waiting))
            self.counters.prefill_tokens += fed
        started, steps = perf_counter(), 0
        while decoding and not (steps and interrupted(len(decoding))):
            self._advance(decoding)
            decoding = self._settle(decoding, deliver)
            steps += 1
        if steps:
            self.counters.decode_steps += steps
            self.counters.decode_s += self._span("decode", started, steps=steps)
        return decoding

    def load(self, weights: Mapping[str, Any]) -> None:
        """See `gleanrl.samplers.sessions.Worker.load`."""
        copy_weights(self.engine.targets, weights)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _adopt(self, follower: Request, leader: Request) -> None:
        """Copy the leader's keys and values of an equal prompt, except for the last token."""
        self.store.copy(leader.row.index, follower.row.index, follower.prompt.size - 1)
        follower.row.extend(follower.prompt[:-1])

    def _prefill(self, requests: Sequence[Request]) -> int:
        """Feed all missing tokens, a bounded number at a time, and sample a token for each row."""
        most, fed = self._prefill_tokens, sum(request.pending().size for request in requests)
        for request in requests:
            while (pending := request.pending()).size > most:
                self._feed([request.row], [pending[:most]])
        for chunk in _chunks(requests, most):
            self._advance(chunk)
        return fed

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
            request.take(token, logprob)
        self.counters.sampled_tokens += len(requests)

    def _feed(self, rows: Sequence[Row], tokens: Sequence[IntArray]) -> torch.Tensor:
        indices, starts = [row.index for row in rows], [row.length for row in rows]
        feed = Feed(indices, starts, tokens, self.engine.device)
        self.store.reserve(max(indices) + 1, feed.extent)
        logits = self.engine.logits(feed, self.store)
        for row, piece in zip(rows, tokens, strict=True):
            row.extend(piece)
        return logits

    def _settle(self, requests: Sequence[Request], deliver: Callable[[list[Request]], None]) -> list[Request]:
        """Deliver the answered requests; return the others."""
        if answered := [request for request in requests if request.finish]:
            deliver(answered)
        return [request for request in requests if not (request.finish or request.cancelled)]

    def _span(self, kind: str, started: float, **tags: Any) -> float:
        ended = perf_counter()
        if self._record is not None:
            self._record(kind, started, ended, **tags)
        return ended - started


def _same_openings(requests: Sequence[Request]) -> dict[Request, Request]:
    """Map each request with an empty row to an earlier such request with the same prompt, as in a group."""
    first: dict[bytes, Request] = {}
    leaders: dict[Request, Request] = {}
    for request in requests:
        if request.row.length == 0 and request.prompt.size > 1:
            leader = first.setdefault(request.prompt.tobytes(), request)
            if leader is not request:
                leaders[request] = leader
    return leaders


def _chunks(requests: Sequence[Request], most: int) -> Iterator[list[Request]]:
    """Yield requests with about equally many missing tokens, together at most ``most`` tokens each time."""
    chunk: list[Request] = []
    size = 0
    for request in sorted(requests, key=lambda request: request.pending().size):
        if chunk and size + request.pending().size > most:
            yield chunk
            chunk, size = [], 0
        chunk.append(request)
        size += request.pending().size
    yield chunk
