"""The asynchronous half of an in-process sampler, which decodes all live episodes in one batch.

`SessionSampler` decides which sessions get a row, when the next burst starts, and when new weights are loaded. A
`Worker` does all tensor work, on its own thread (`gleanrl.samplers.transformers`, `gleanrl.samplers.vllm`).

A *burst* takes requests, computes the tokens that their rows do not hold yet (prefill), and then repeatedly samples a
token for each row (decode) until all requests are answered or the caller interrupts. Unfinished requests continue in
the next burst. A request is delivered the moment it is answered.
"""

from __future__ import annotations

import asyncio
import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, Literal, TypeVar

import numpy as np

from gleanrl.protocols import Completion, SamplingParams
from gleanrl.samplers import answer_limit
from gleanrl.schedule.device_lock import TakeDevice
from gleanrl.schedule.timeline import SpanRecorder
from gleanrl.types import IntArray
from gleanrl.utils.notifier import Notifier

T = TypeVar("T")

_STEPS_PER_BURST = 256  # a burst releases the device lock after this many decoding steps


class Row:
    """One conversation's place in the batch, and the tokens that the worker holds there."""

    def __init__(self, ordinal: int, max_context: int) -> None:
        self.ordinal = ordinal  # the order in which sessions opened
        self.index = -1  # number of the row in the batch; -1 until the session's first burst
        self.tokens = np.zeros(max_context, np.int32)
        self.length = 0

    def extend(self, tokens: IntArray) -> None:
        self.tokens[self.length : self.length + tokens.size] = tokens
        self.length += tokens.size


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, how to continue it, and the tokens sampled so far."""

    row: Row
    prompt: IntArray
    params: SamplingParams
    limit: int  # number of tokens that params and the context allow, at least 1
    uniforms: np.ndarray  # float64[limit], a random number in [0, 1) for each token
    version: int = -1  # version of the weights that sampled the first token, hence the oldest
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


@dataclass(slots=True)
class Counters:
    """Running totals. ``prefill_tokens`` counts the prompt tokens that were computed; rows held the others."""

    prompt_tokens: int = 0
    prefill_tokens: int = 0
    sampled_tokens: int = 0
    bursts: int = 0
    decode_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Worker(ABC):
    """Computes bursts. It is made and called on a single thread, that of `SessionSampler`."""

    def __init__(self, timeline: SpanRecorder | None) -> None:
        self.counters = Counters()
        self._timeline = timeline

    @abstractmethod
    def burst(
        self,
        requests: Sequence[Request],
        version: int,
        interrupted: Callable[[int], bool],
        deliver: Callable[[list[Request]], None],
    ) -> list[Request]:
        """Work until all requests are answered or ``interrupted(active rows)`` is true; return the unanswered requests.

        An unanswered request that is not in the next burst has been cancelled. ``deliver`` is called on the worker's
        thread.
        """

    @abstractmethod
    def load(self, weights: Mapping[str, Any]) -> None:
        """Load new weights, between two bursts. Raises `ValueError` if they do not fit; the old ones stay in use."""

    def close(self) -> None:  # noqa: B027
        """Release what the worker holds; by default nothing."""

    def _span(self, kind: str, started: float, **tags: Any) -> float:
        """Record a span that ends now; return its seconds."""
        ended = perf_counter()
        if self._timeline is not None:
            self._timeline.record(kind, started, ended, **tags)
        return ended - started


class SessionSampler:
    """Implements `gleanrl.protocols.Sampler` with the bursts of a worker.

    Args:
        make: makes the worker; called once, on the thread that will run it.
        max_rows: maximum number of open sessions; further ones wait in the order in which they came.
        max_context: maximum length of prompt and answer together, in tokens.
        deterministic: start a burst only when every open session waits for an answer. The composition of batches, and
            so every rounding error, then never depends on timing. An episode that waits for another session's answer
            would wait forever.
        inflight: whether new weights are loaded between two bursts, and unfinished answers continue with them. If not,
            `publish` waits until all open sessions have closed, and none opens meanwhile.
        device_lock: ``async with device_lock("sample"):`` is held around each burst.
    """

    def __init__(
        self,
        make: Callable[[], Worker],
        *,
        max_rows: int,
        max_context: int,
        deterministic: bool,
        inflight: bool,
        device_lock: TakeDevice | None,
    ) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, not {max_rows}")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampler")
        try:
            self._worker = self._thread.submit(make).result()
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        self._max_context, self._max_rows = max_context, max_rows
        self._deterministic, self._inflight = deterministic, inflight
        self._device_lock = device_lock or (lambda _: nullcontext())
        self._version = 0
        # Sessions. Only the event loop's thread uses the following.
        self._opened = 0  # total number of sessions
        self._open: set[_Session] = set()
        self._queue: deque[tuple[_Session, asyncio.Future[None]]] = deque()
        self._free = list(range(max_rows))  # a heap, because using low rows first keeps the store compact
        self._left: list[Row] = []  # rows of closed sessions, to which the running burst may still write
        # Work.
        self._requests: dict[Request, asyncio.Future[Completion]] = {}
        self._unfinished: list[Request] = []  # requests of an interrupted burst
        self._arrived = 0  # number of requests since the last burst began
        self._burst: asyncio.Task[None] | None = None
        self._working = False  # the thread is busy
        self._stopping = False  # the burst on the thread is to end early
        # Publication.
        self._publishing = asyncio.Lock()
        self._draining = False  # no session opens
        self._loading = False  # no burst begins, and a running one ends early
        self._resting = False  # the worker has no weights to sample with
        self._closed = self._ended = False
        self._changed = Notifier()

    @property
    def version(self) -> int:
        return self._version

    def stats(self) -> dict[str, float]:
        """Return running totals: prompt tokens (prefilled and reused), sampled tokens, seconds, bursts, steps."""
        counters = self._worker.counters
        return {**asdict(counters), "reused_tokens": counters.prompt_tokens - counters.prefill_tokens}

    # --- sessions -------------------------------------------------------------------------------
    @asynccontextmanager
    async def session(self, seed: int) -> AsyncIterator[_Session]:
        """See `Sampler.session`.

        A session opens at once if a row is free. Sessions therefore keep the order in which they were opened,
        whatever the environments do later.
        """
        self._check_open()
        session = _Session(self, self._opened, seed, self._max_context)
        self._opened += 1
        try:
            if self._queue or self._draining or len(self._open) >= self._max_rows:
                admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._queue.append((session, admitted))
                await admitted
            else:
                self._open.add(session)
            yield session
        finally:
            if session in self._open:
                self._open.remove(session)
                self._left.append(session.row)
                self._free_rows()
                self._admit()
                self._pump()
                self._changed.notify()

    def _admit(self) -> None:
        """Open sessions that wait, while rows are free."""
        while self._queue and not self._draining and len(self._open) < self._max_rows:
            session, admitted = self._queue.popleft()
            if not admitted.done():
                self._open.add(session)
                admitted.set_result(None)

    def _free_rows(self) -> None:
        """Free the rows of closed sessions, unless the running burst may still write to them."""
        if self._working:
            return
        for row in self._left:
            if row.index >= 0:
                heapq.heappush(self._free, row.index)
        self._left.clear()

    # --- bursts ---------------------------------------------------------------------------------
    def _pump(self) -> None:
        """Start a burst if none is running and one is due. Called after every change."""
        under_way = self._burst is not None and not self._burst.done()  # done if cancelled before it began
        if not (under_way or self._loading or self._closed) and self._due():
            self._burst = asyncio.get_running_loop().create_task(self._run_bursts())

    def _due(self) -> list[Request]:
        """Return the requests of the next burst; empty if it must wait."""
        unfinished = [request for request in self._unfinished if request in self._requests]
        if self._deterministic and unfinished:
            return unfinished
        if self._deterministic and len(self._requests) < len(self._open):
            return []
        return sorted(self._requests, key=lambda request: request.row.ordinal)

    async def _run_bursts(self) -> None:
        """Run a burst, and those that follow without a pause."""
        cancelled, again = False, True
        try:
            while again:
                async with self._device_lock("sample"):
                    await self._until(lambda: not self._loading)
                    if requests := self._due():
                        for request in requests:
                            if request.row.index < 0:
                                request.row.index = heapq.heappop(self._free)
                        self._arrived = 0
                        self._unfinished = await self._work(self._decode, requests, asyncio.get_running_loop())
                # in this iteration of the event loop, so that the lock is asked again before it passes the device on
                again = bool(self._due()) and not (self._loading or self._closed)
        except asyncio.CancelledError:
            cancelled = True
            raise
        except Exception as error:
            self._fail(error)
        finally:
            self._burst = None
            if not cancelled:
                self._pump()

    def _decode(self, requests: list[Request], loop: asyncio.AbstractEventLoop) -> list[Request]:
        """Run one burst. Called on the worker's thread."""
        idle = steps = 0

        def interrupted(active: int) -> bool:
            nonlocal idle, steps
            steps += 1
            if self._loading or self._stopping or self._closed or steps >= _STEPS_PER_BURST:
                return True
            # New requests join once their waiting has cost about as much time as their prefill will take.
            idle += self._arrived
            return not self._deterministic and idle >= active

        def deliver(answered: list[Request]) -> None:
            loop.call_soon_threadsafe(self._deliver, answered)

        return self._worker.burst(requests, self._version, interrupted, deliver)

    def _deliver(self, answered: list[Request]) -> None:
        for request in answered:
            answer = self._requests.pop(request, None)
            if answer is not None and not answer.done():
                tokens, logprobs = np.array(request.tokens, np.int32), np.array(request.logprobs, np.float32)
                answer.set_result(Completion(tokens, logprobs, request.version, request.finish or "length"))

    async def _work(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function on the thread. A cancellation takes effect once the thread has stopped."""
        self._working = True
        job = asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            self._stopping = True
            await asyncio.wait([job])
            raise
        finally:
            self._working = self._stopping = False
            self._free_rows()
            self._changed.notify()

    def _fail(self, error: Exception) -> None:
        """Fail every request and clear the rows, so that no session waits forever."""
        self._unfinished = []
        for session in self._open:
            session.row.length = 0
        for answer in self._requests.values():
            if not answer.done():
                failure = RuntimeError(f"the sampler failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                answer.set_exception(failure)
        self._requests.clear()

    # --- publication ----------------------------------------------------------------------------
    async def publish(self, weights: Mapping[str, Any], version: int) -> None:
        """See `Sampler.publish`. ``weights`` must not change before this returns.

        Raises:
            ValueError: if a weight is missing or has another shape; the old weights stay in use.
        """
        async with self._publishing:
            self._check_open()
            try:
                if not self._inflight:
                    self._draining = True
                    await self._until(lambda: not self._open)
                self._loading = True
                await self._until(lambda: not self._working)
                await self._load(weights)
                self._version = version
            finally:
                self._resume()

    async def _load(self, weights: Mapping[str, Any]) -> None:
        await self._work(self._worker.load, weights)

    def _resume(self) -> None:
        """Open waiting sessions and start a burst if one is due, unless the worker has no weights."""
        self._draining = self._loading = self._resting
        if not self._closed:
            self._admit()
            self._pump()
        self._changed.notify()

    async def close(self) -> None:
        """End all sessions; waiting requests fail. Closing twice is harmless."""
        self._closed = True
        self._fail(RuntimeError("the sampler has closed"))
        for _, admitted in self._queue:
            if not admitted.done():
                admitted.set_exception(RuntimeError("the sampler has closed"))
        self._queue.clear()
        if self._burst is not None and not self._working:
            self._burst.cancel()  # the task waits for the device, or has not begun
        await self._until(lambda: not self._working)
        if not self._ended:
            self._ended = True
            await asyncio.wrap_future(self._thread.submit(self._worker.close))
        self._thread.shutdown(wait=True)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the sampler has closed")


class _Session:
    """One episode's access to the sampler; see `gleanrl.protocols.Session`."""

    def __init__(self, sampler: SessionSampler, ordinal: int, seed: int, max_context: int) -> None:
        self._sampler = sampler
        self.row = Row(ordinal, max_context)
        self.random = np.random.Generator(np.random.Philox(seed))  # used by this session only
        self.request: Request | None = None

    async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion:
        """See `Session.sample`.

        Raises:
            ValueError: if the prompt leaves no room for a token.
            RuntimeError: if the session has closed, or the sampler failed.
        """
        sampler = self._sampler
        sampler._check_open()
        if self not in sampler._open:
            raise RuntimeError("this session has closed")
        if self.request is not None:
            raise RuntimeError("this session already waits for an answer")
        prompt = np.asarray(prompt, np.int32)
        limit = answer_limit(prompt, params, sampler._max_context)
        request = self.request = Request(self.row, prompt, params, limit, self.random.random(limit))
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        sampler._requests[request] = answer
        sampler._arrived += 1
        sampler._pump()
        try:
            return await answer
        finally:
            request.cancelled = request.finish is None
            sampler._requests.pop(request, None)
            self.request = None
