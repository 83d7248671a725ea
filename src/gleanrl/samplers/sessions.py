"""The common part of the samplers that run in this process and decode the open sessions together, in one batch.

`SessionSampler` runs on the event loop. It decides which sessions get a row of the batch, when computation starts, and
when new weights are loaded. A `Worker` does all tensor work on a separate thread; there is one for transformers
(`gleanrl.samplers.transformers`) and one for vLLM (`gleanrl.samplers.vllm`).

The worker computes in *bursts*. A burst takes requests, one for each completion that sessions wait for. It feeds the
tokens whose keys and values are not cached yet (prefill), and then samples one token at a time for each request
(decode), until all requests are complete or `SessionSampler` interrupts the burst. Incomplete requests continue in the
next burst. A complete request is delivered to its session at once, while the burst goes on.
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
from gleanrl.utils.errors import ProcessDied, UserError
from gleanrl.utils.notifier import Notifier

T = TypeVar("T")

_STEPS_PER_BURST = 256  # a burst releases the device lock after this many decoding steps


class Row:
    """A row of the batch that a session holds, and the tokens whose keys and values the worker has cached for it.

    A worker whose engine manages its own cache (vLLM) leaves the row empty.
    """

    def __init__(self, ordinal: int, max_context: int) -> None:
        self.ordinal = ordinal  # number of the session, in the order in which sessions were requested
        self.index = -1  # index of the row in the batch; -1 until the session's first burst
        self.tokens = np.zeros(max_context, np.int32)  # the first ``length`` entries are cached tokens
        self.length = 0

    def extend(self, tokens: IntArray) -> None:
        self.tokens[self.length : self.length + tokens.size] = tokens
        self.length += tokens.size


@dataclass(eq=False, slots=True)
class Request:
    """One call of `Session.sample`: the prompt, the sampling parameters, and the tokens sampled so far."""

    row: Row
    prompt: IntArray
    params: SamplingParams
    limit: int  # largest number of tokens that ``params`` and the context allow, at least 1
    uniforms: np.ndarray  # float64[limit], a uniform random number in [0, 1) for each token
    version: int = -1  # version of the weights that sampled the first token; -1 before the request's first burst
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    cancelled: bool = False

    def pending(self) -> IntArray:
        """Return int32[n]: the tokens of the prompt and of the sampled tokens that are not cached in the row yet."""
        held = self.row.length
        if held < self.prompt.size:
            return self.prompt[held:]  # no token has been sampled yet, because that needs the whole prompt
        return np.array(self.tokens[held - self.prompt.size :], np.int32)


@dataclass(slots=True)
class Counters:
    """What a worker has computed since it was made. Fields that end in ``_s`` are in seconds."""

    prompt_tokens: int = 0  # tokens of all prompts
    prefill_tokens: int = 0  # tokens of prompts that were computed; the others were in the cache
    sampled_tokens: int = 0
    bursts: int = 0
    decode_steps: int = 0  # each step samples one token for every active request
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Worker(ABC):
    """Computes completions with a model, in bursts (see the module's docstring).

    `SessionSampler` calls its methods on one thread only.
    """

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
        """Compute ``requests`` until all are complete or the burst is interrupted; return the incomplete requests.

        The caller passes the incomplete requests again in the next burst, except for those that have been cancelled.

        Args:
            version: version of the present weights, to be recorded in requests that have none.
            interrupted: called between two decoding steps with the number of active requests. The burst ends if it
                returns True.
            deliver: called on the worker's thread with requests that have just been completed.
        """

    @abstractmethod
    def load(self, weights: Mapping[str, Any]) -> None:
        """Replace the model's weights. Called between two bursts.

        Raises `ValueError` if a weight is missing or has another shape. The old weights then stay in use.
        """

    def close(self) -> None:  # noqa: B027
        """Free the worker's resources. By default there are none."""

    def _span(self, kind: str, started: float, **tags: Any) -> float:
        """Record a span in the timeline from ``started`` until now, and return its length in seconds."""
        ended = perf_counter()
        if self._timeline is not None:
            self._timeline.record(kind, started, ended, **tags)
        return ended - started


class SessionSampler:
    """Implements `gleanrl.protocols.Sampler` with a worker, which a subclass provides.

    The worker computes completions in bursts (see the module's docstring).

    Args:
        make: returns the worker. Called once, on the thread on which the worker will run.
        max_rows: largest number of rows that open sessions hold. Each session holds one. It takes further rows, if
            there are any and no session waits to open, for calls of `Session.sample` at the same time, and unless
            ``deterministic`` for a prompt that shares less than half of what each idle row has cached. Without them,
            calls are answered one after another. Further sessions wait in the order in which they were requested; they
            get the further rows that no call uses.
        max_context: largest length of prompt and completion together, in tokens.
        deterministic: whether to start a burst only when every open session waits for a completion. The composition of
            batches, and with it every rounding error, then does not depend on timing. No episode may wait for the
            result of another session, because no burst would ever start then.
        inflight: whether `publish` loads new weights between two bursts, so that incomplete requests continue with
            them. If False, it waits until all open sessions have closed, and no session opens meanwhile.
        device_lock: each burst runs inside ``async with device_lock("sample")``. None = the sampler does not wait for
            the device.
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
        # State of sessions. Only the event loop's thread accesses it.
        self._opened = 0  # number of sessions that were requested since the start
        self._open: set[_Session] = set()
        self._queue: deque[tuple[_Session, asyncio.Future[None]]] = deque()  # sessions that wait for a row
        # Indices of free rows. This is a heap, because the tensors of the cache stay small if low rows are used first.
        self._free = list(range(max_rows))
        self._left: list[Row] = []  # rows of closed sessions, to which the running burst may still write
        # State of bursts.
        self._requests: dict[Request, asyncio.Future[Completion]] = {}  # requests without a completion yet
        self._unfinished: list[Request] = []  # incomplete requests of an interrupted burst
        self._arrived = 0  # number of requests that arrived since the last burst began
        self._burst: asyncio.Task[None] | None = None
        self._working = False  # True while the worker's thread is busy
        # While True, the running burst ends early, because the task that waits for it in `_work` was cancelled.
        self._stopping = False
        # State of publications.
        self._publishing = asyncio.Lock()
        self._draining = False  # while True, no session opens
        self._loading = False  # while True, no burst starts, and a running burst ends early
        self._resting = False  # True while the worker has no weights, so that a publication must come first
        self._closed = self._ended = False
        self._changed = Notifier()  # notified when a session closes, the thread becomes idle, or a publication ends

    @property
    def version(self) -> int:
        return self._version

    def stats(self) -> dict[str, float]:
        """Return the worker's `Counters` since the start, and ``reused_tokens``: prompt tokens found in the cache."""
        counters = self._worker.counters
        return {**asdict(counters), "reused_tokens": counters.prompt_tokens - counters.prefill_tokens}

    # --- sessions -------------------------------------------------------------------------------
    @asynccontextmanager
    async def session(self, seed: int) -> AsyncIterator[_Session]:
        """See `Sampler.session`.

        A session opens at once if a row is free, and otherwise waits in a queue. Sessions are numbered when they are
        requested. Requests are ordered by these numbers, so their order in a batch does not depend on how fast the
        environments are.
        """
        self._check_open()
        session = _Session(self, self._opened, seed, self._max_context)
        self._opened += 1
        try:
            if self._queue or self._draining or not self._spare():
                admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._queue.append((session, admitted))
                self._admit()
                await admitted
            else:
                self._open.add(session)
            yield session
        finally:
            if session in self._open:
                self._open.remove(session)
                self._left += session.rows
                self._free_rows()
                self._admit()
                self._pump()
                self._changed.notify()

    def _admit(self) -> None:
        """Open sessions from the queue while there are rows that no session holds, or that a session can spare."""
        if self._queue and not self._draining:
            several = [session for session in self._open if len(session.rows) > 1]
            for holder in sorted(several, key=lambda session: session.ordinal):
                while self._spare() < len(self._queue) and (row := holder.release()):
                    self._left.append(row)
            self._free_rows()
        while self._queue and not self._draining and self._spare():
            session, admitted = self._queue.popleft()
            if not admitted.done():
                self._open.add(session)
                admitted.set_result(None)

    def _spare(self) -> int:
        """Return the number of rows that no open session holds."""
        return self._max_rows - sum(len(session.rows) for session in self._open)

    def _free_rows(self) -> None:
        """Free the rows of closed sessions. Does nothing while a burst runs, because it may still write to them."""
        if self._working:
            return
        for row in self._left:
            if row.index >= 0:
                heapq.heappush(self._free, row.index)
        self._left.clear()

    # --- bursts ---------------------------------------------------------------------------------
    def _pump(self) -> None:
        """Start a burst if none is running and the next one may start.

        Called after every change on which this depends, such as a new request or a closed session.
        """
        # A task that is cancelled before its first step does not reset ``_burst``, but it is done.
        under_way = self._burst is not None and not self._burst.done()
        if not (under_way or self._loading or self._closed) and self._due():
            self._burst = asyncio.get_running_loop().create_task(self._run_bursts())

    def _due(self) -> list[Request]:
        """Return the requests of the next burst; an empty list if there are none, or the burst must not start yet.

        In deterministic mode, an interrupted burst is continued with the same requests, and a new one starts only when
        every open session has a request.
        """
        unfinished = [request for request in self._unfinished if request in self._requests]
        if self._deterministic and unfinished:
            return unfinished
        if self._deterministic and len({request.row.ordinal for request in self._requests}) < len(self._open):
            return []
        return sorted(self._requests, key=lambda request: request.row.ordinal)

    async def _run_bursts(self) -> None:
        """Run a burst, and further bursts as long as requests are waiting."""
        cancelled, again = False, True
        try:
            while again:
                async with self._device_lock("sample"):
                    # The device is released during a publication. A sharded learner cannot gather the weights before
                    # its running pass is complete, and this pass may wait for the device.
                    if not self._loading and (requests := self._due()):
                        for request in requests:
                            if request.row.index < 0:
                                request.row.index = heapq.heappop(self._free)
                        self._arrived = 0
                        self._unfinished = await self._work(self._decode, requests, asyncio.get_running_loop())
                # The device lock is passed on in the next iteration of the event loop. If more bursts are due, it is
                # requested again in this iteration, so that sampling competes with the work that already waits.
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
        """Run one burst and return its incomplete requests. Called on the worker's thread."""
        idle = steps = 0

        def interrupted(active: int) -> bool:
            nonlocal idle, steps
            steps += 1
            if self._loading or self._stopping or self._closed or steps >= _STEPS_PER_BURST:
                return True
            # New requests wait for the end of the burst, but an interruption for each of them would be inefficient,
            # because their prefill delays all active requests. ``idle`` is the sum of the steps that the new requests
            # have waited. Once it reaches the number of active requests, waiting has cost about as much as the
            # prefill will.
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
        """Run ``function(*arguments)`` on the worker's thread and return its result.

        If the caller is cancelled, a running burst ends early, and CancelledError is raised once the thread is idle.
        """
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
        """Raise an error in every session that waits for a completion, and clear all rows.

        It is a `UserError` if ``error`` is one, and otherwise a RuntimeError. The rows are cleared because their cached
        keys and values may be incomplete.
        """
        self._unfinished = []
        for session in self._open:
            for row in session.rows:
                row.length = 0
        for answer in self._requests.values():
            if not answer.done():
                failure: Exception = RuntimeError(f"the sampler failed: {type(error).__name__}: {error}")
                if isinstance(error, UserError):
                    failure = (ProcessDied if isinstance(error, ProcessDied) else UserError)(str(error))
                failure.__cause__ = error
                answer.set_exception(failure)
        self._requests.clear()

    # --- publication ----------------------------------------------------------------------------
    async def publish(self, weights: Mapping[str, Any], version: int) -> None:
        """See `Sampler.publish`. The caller must not change ``weights`` before this method returns.

        After any error of loading but a `ValueError`, nothing is sampled until a later publication succeeds.

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
                try:
                    await self._load(weights)
                except ValueError:
                    raise
                except BaseException:
                    self._resting = True  # the worker may have only a part of the weights, or none
                    raise
                self._version, self._resting = version, False
            finally:
                self._resume()

    async def _load(self, weights: Mapping[str, Any]) -> None:
        await self._work(self._worker.load, weights)

    def _resume(self) -> None:
        """End a publication: let sessions open and bursts start again, unless the worker has no weights."""
        self._draining = self._loading = self._resting
        if not self._closed:
            self._admit()
            self._pump()
        self._changed.notify()

    async def rest(self) -> None:
        """See `Sampler.rest`. By default there is nothing to free."""

    async def close(self) -> None:
        """Close the sampler. Sessions that wait for a row or a completion get a RuntimeError.

        A second call does nothing.
        """
        self._closed = True
        self._fail(RuntimeError("the sampler has closed"))
        for _, admitted in self._queue:
            if not admitted.done():
                admitted.set_exception(RuntimeError("the sampler has closed"))
        self._queue.clear()
        if self._burst is not None and not self._working:
            self._burst.cancel()  # the task has not started, or waits for the device lock
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
        self._sampler, self.ordinal, self._max_context = sampler, ordinal, max_context
        self.rows = [Row(ordinal, max_context)]
        self._idle = list(self.rows)  # the rows that no call uses
        self._line: deque[asyncio.Future[Row]] = deque()  # calls that wait for a row of this session
        self._random = np.random.Generator(np.random.Philox(seed))  # draws the random numbers for this session's tokens

    async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion:
        """See `Session.sample`.

        Raises:
            ValueError: if the prompt is empty or leaves no room for a sampled token in the context.
            RuntimeError: if the session or the sampler has closed, or the worker failed.
            UserError: if the worker failed for a reason that the user can find, such as the death of a process.
        """
        sampler = self._sampler
        self._check_open()
        prompt = np.asarray(prompt, np.int32)
        limit = answer_limit(prompt, params, sampler._max_context)
        random = self._random if params.seed is None else np.random.Generator(np.random.Philox(params.seed))
        uniforms = random.random(limit)
        loop = asyncio.get_running_loop()
        # The idle row that has most of the prompt in its cache, and whether the prompt would replace most of this row.
        shared = {row: common_length(row.tokens[: row.length], prompt) for row in self._idle}
        row = max(self._idle, key=lambda row: shared[row], default=None)
        # With rounding that does not depend on timing, a session of one call at a time always keeps to one row.
        other = row is not None and not sampler._deterministic and 2 * shared[row] < row.length
        if (row is None or other) and sampler._spare() and not sampler._queue:
            row = Row(self.ordinal, self._max_context)
            self.rows.append(row)
        elif row is not None:
            self._idle.remove(row)
        else:
            self._line.append(place := loop.create_future())
            try:
                row = await place
                self._check_open()
            except BaseException:
                if place.done() and not place.cancelled():
                    self._give_back(place.result())
                raise
        request = Request(row, prompt, params, limit, uniforms)
        answer: asyncio.Future[Completion] = loop.create_future()
        sampler._requests[request] = answer
        sampler._arrived += 1
        sampler._pump()
        try:
            return await answer
        finally:
            request.cancelled = request.finish is None
            sampler._requests.pop(request, None)
            self._give_back(row)

    def _check_open(self) -> None:
        self._sampler._check_open()
        if self not in self._sampler._open:
            raise RuntimeError("this session has closed")

    def _give_back(self, row: Row) -> None:
        """Give the row to the call that has waited longest, or keep it for the next call."""
        while self._line:
            place = self._line.popleft()
            if not place.done():
                place.set_result(row)
                return
        self._idle.append(row)
        if self._sampler._queue:
            self._sampler._admit()

    def release(self) -> Row | None:
        """Give up the shortest idle row, unless it is the last row of the session. None if there is no such row."""
        if len(self.rows) == 1 or not self._idle:
            return None
        row = min(self._idle, key=lambda row: row.length)
        self._idle.remove(row)
        self.rows.remove(row)
        return row


def common_length(first: IntArray, second: IntArray) -> int:
    """Return the number of tokens with which both arrays begin."""
    reach = min(first.size, second.size)
    differs = np.flatnonzero(first[:reach] != second[:reach])
    return int(differs[0]) if differs.size else reach
