"""A sampler without a model, whose completions are computed by a function.

With it, tests of the training loop are fast and have exact expected results. Demonstrations are recorded with it too,
to play the answers of an expert.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from gleanrl.protocols import Completion, SamplingParams
from gleanrl.types import IntArray
from gleanrl.utils.seeding import derive

Script = Callable[[IntArray, int], Sequence[int]]
"""A function ``script(prompt, seed)`` that returns the tokens of the answer, at least one.

``seed`` differs between sessions and between turns, but is the same in every run. Tokens after a stop token or beyond
``max_tokens`` are cut off.
"""


class ScriptedSampler:
    """Implements `gleanrl.protocols.Sampler` with a script, and otherwise behaves like a real sampler.

    A completion includes its stop token and has the version of the present weights. `publish` waits until open sessions
    have closed, unless ``inflight`` is True. For assertions, the attribute ``calls`` lists ``(prompt, params,
    version)`` of each completion, and ``published`` lists ``(version, weights)`` of each publication, both in order.

    Args:
        script: a function that returns the tokens of a completion; see `Script`.
        version: version of the weights before the first publication.
        inflight: whether `publish` returns at once although sessions are open.
        logprob: log-prob of every sampled token.
        delay: seconds that each completion takes, or a function of the session's seed and the number of the turn
            (from 0) that returns the seconds.
    """

    def __init__(
        self,
        script: Script,
        *,
        version: int = 0,
        inflight: bool = False,
        logprob: float = -0.5,
        delay: float | Callable[[int, int], float] = 0.0,
    ) -> None:
        self.calls: list[tuple[IntArray, SamplingParams, int]] = []
        self.published: list[tuple[int, Mapping[str, Any]]] = []
        self.open_sessions = 0
        self._script, self._logprob, self._delay = script, logprob, delay
        self.altered: str | None = None  # value of `Completion.altered` in later completions
        self._version, self._inflight = version, inflight
        self._changed = asyncio.Condition()
        self._draining = False
        self._closed = False

    @property
    def version(self) -> int:
        return self._version

    def stats(self) -> dict[str, float]:
        return {"sampled_turns": float(len(self.calls))}

    @asynccontextmanager
    async def session(self, seed: int) -> AsyncIterator[_ScriptedSession]:
        if self._closed:
            raise RuntimeError("the sampler has closed")
        if self._draining:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._draining)
        self.open_sessions += 1
        try:
            yield _ScriptedSession(self, seed)
        finally:
            self.open_sessions -= 1
            if self._draining:
                async with self._changed:
                    self._changed.notify_all()

    async def publish(self, weights: Mapping[str, Any], version: int) -> None:
        async with self._changed:
            self._draining = not self._inflight
            try:
                await self._changed.wait_for(lambda: self._inflight or not self.open_sessions)
                self.published.append((version, weights))
                self._version = version
            finally:
                self._draining = False
                self._changed.notify_all()

    async def rest(self) -> None:
        pass

    async def close(self) -> None:
        self._closed = True


class _ScriptedSession:
    def __init__(self, sampler: ScriptedSampler, seed: int) -> None:
        self._sampler, self._seed, self._turn = sampler, seed, 0

    async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion:
        sampler, turn = self._sampler, self._turn
        self._turn += 1
        prompt, version = np.array(prompt, np.int32), sampler.version
        sampler.calls.append((prompt, params, version))
        delay = sampler._delay(self._seed, turn) if callable(sampler._delay) else sampler._delay
        if delay:
            await asyncio.sleep(delay)
        answer = sampler._script(prompt, derive(self._seed, turn) if params.seed is None else params.seed)
        if not answer:
            raise ValueError("the script answered nothing; a sampler samples at least one token")
        stop = next((i for i, token in enumerate(answer) if token in params.stop_tokens), None)
        end = min(len(answer) if stop is None else stop + 1, params.max_tokens)
        tokens = np.array(answer[:end], np.int32)
        logprobs = np.full(end, sampler._logprob, np.float32)
        finish = "stop" if stop is not None and stop < end else "length"
        return Completion(tokens, logprobs, version, finish, sampler.altered)
