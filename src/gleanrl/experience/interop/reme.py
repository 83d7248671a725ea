"""Experience from a ReMe service, which distils trajectories with a language model of its own.

Compatible with the task memory of github.com/modelscope/ReMe: ``POST /retrieve_task_memory`` with workspace_id, query
and top_k, answered by ``answer`` and ``metadata.memory_list``; ``POST /summary_task_memory`` with workspace_id and
trajectories of messages and score.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from gleanrl.experience.guidance.retrieval import description
from gleanrl.protocols import Metrics
from gleanrl.rollout.conversation import conversation, readable
from gleanrl.types import Task, Trajectory
from gleanrl.utils.errors import UserError

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

PATIENCE = 3  # failures in a row before the service is left alone for a while
BATCH = 8  # trajectories of one summary


class ServiceError(Exception):
    """A service that does not answer as it should, in one line."""


class ReMeRetriever:
    """An async client. Successes are sent in the background, a few at a time, and none of them twice.

    A service that fails ``PATIENCE`` times in a row is not asked again for ``rest_s`` seconds, so that one which hangs
    costs ``timeout_s`` now and then and not in every group. Successes that it does not take are counted as lost.

    Args:
        url: of the service, e.g. ``http://localhost:8002``. Proxies of the environment are not used.
        workspace: what the service keeps apart.
        timeout_s: for a retrieval, from start to end; ``summary_timeout_s`` for a summary.
        waiting: successes that may wait to be sent; over that the oldest are lost.
        headers: sent with each request, e.g. for authorisation.
        retrieve_path, summary_path: the two endpoints.

    Raises:
        UserError: the address is none, or httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        workspace: str = "gleanrl",
        *,
        timeout_s: float = 10.0,
        summary_timeout_s: float = 300.0,
        rest_s: float = 60.0,
        waiting: int = 256,
        headers: Mapping[str, str] | None = None,
        retrieve_path: str = "retrieve_task_memory",
        summary_path: str = "summary_task_memory",
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"guidance.options.url = {url!r}: give an address, e.g. http://localhost:8002")
        self._httpx = _httpx()
        self._url, self._workspace, self._headers = url.rstrip("/"), workspace, dict(headers or {})
        self._timeout_s, self._summary_timeout_s, self._rest_s = timeout_s, summary_timeout_s, rest_s
        self._retrieve_path, self._summary_path = retrieve_path, summary_path
        self._waiting: deque[dict[str, Any]] = deque()
        self._most_waiting = waiting
        self._sending: asyncio.Task[None] | None = None
        self._http: httpx.AsyncClient | None = None
        self._failures = 0
        self._rests_until = 0.0
        self._counts: Counter[str] = Counter()

    def metrics(self) -> Metrics:
        """Running totals: successes that the service took, and those lost; and how many wait."""
        return {
            "reme_sent": float(self._counts["sent"]),
            "reme_lost": float(self._counts["lost"]),
            "reme_waiting": float(len(self._waiting)),
        }

    def add(self, task: Task, trajectory: Trajectory) -> None:
        messages = [{"role": m["role"], "content": readable(m)} for m in conversation(trajectory)]
        self._waiting.append({"messages": messages, "score": trajectory.score.value})
        if len(self._waiting) > self._most_waiting:
            self._waiting.popleft()
            self._counts["lost"] += 1
        self._send_waiting()

    async def retrieve(self, task: Task, k: int) -> list[str]:
        """What the service says of the task, as one text, or its memories where it gives no text.

        Raises `ServiceError` if it cannot be had.
        """
        self._send_waiting()
        if monotonic() < self._rests_until:
            raise ServiceError(f"{self._url} failed {PATIENCE} times in a row and is left alone for {self._rest_s:g} s")
        query = {"workspace_id": self._workspace, "query": description(task.prompt), "top_k": k}
        try:
            texts = _texts(await self._post(self._retrieve_path, query, self._timeout_s), k)
        except ServiceError:
            self._failures += 1
            if self._failures >= PATIENCE:
                self._rests_until = monotonic() + self._rest_s
            raise
        self._failures = 0
        return texts

    async def close(self) -> None:
        """Waits ``timeout_s`` for what is still to be sent, then gives it up."""
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=self._timeout_s)
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        self._counts["lost"] += len(self._waiting)
        self._waiting.clear()
        if self._http is not None:
            await self._http.aclose()

    def _send_waiting(self) -> None:
        if self._waiting and (self._sending is None or self._sending.done()):
            try:
                self._sending = asyncio.get_running_loop().create_task(self._send())
            except RuntimeError:  # no loop runs: sent once one does
                return

    async def _send(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            sent = False
            try:
                body = {"workspace_id": self._workspace, "trajectories": batch}
                await self._post(self._summary_path, body, self._summary_timeout_s)
                sent = True
            except ServiceError as error:
                log.warning("%d successes were not taken: %s", len(batch), error)
            finally:
                self._counts["sent" if sent else "lost"] += len(batch)

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The service's answer. Raises `ServiceError` for everything that is none."""
        address = f"{self._url}/{path}"
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client().post(address, json=body)
            answer = response.json() if response.status_code == 200 else None
        except TimeoutError:
            raise ServiceError(f"{address} did not answer within {timeout_s:g} s") from None
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            raise ServiceError(f"{address}: {error or type(error).__name__}") from error
        except ValueError:
            raise ServiceError(f"{address} answered something that is no JSON") from None
        if response.status_code != 200:
            raise ServiceError(f"{address} answered with status {response.status_code}")
        if not isinstance(answer, dict) or answer.get("success") is False:
            raise ServiceError(f"{address} answered with no success: {str(answer)[:200]}")
        return answer

    def _client(self) -> httpx.AsyncClient:
        client = self._http  # made where the loop runs
        if client is None:
            client = self._http = self._httpx.AsyncClient(timeout=None, trust_env=False, headers=self._headers)
        return client


def _texts(answer: Mapping[str, Any], k: int) -> list[str]:
    """The text that the service wrote of its memories; else the memories, when to use each before what it says."""
    text = answer.get("answer")
    if isinstance(text, str) and text.strip():
        return [text.strip()]
    metadata = answer.get("metadata")
    memories = metadata.get("memory_list") if isinstance(metadata, dict) else None
    if (text is not None and not isinstance(text, str)) or not isinstance(memories, list | None):
        raise ServiceError(f"an answer without text or memories: {str(answer)[:200]}")
    texts = []
    for memory in memories or []:
        parts = [memory.get("when_to_use"), memory.get("content")] if isinstance(memory, dict) else []
        said = "\n".join(part.strip() for part in parts if isinstance(part, str) and part.strip())
        if said:
            texts.append(said)
    return texts[:k]


def _httpx() -> Any:
    try:
        import httpx
    except ModuleNotFoundError:
        raise UserError('guidance.retriever = "reme" needs httpx: pip install httpx') from None
    return httpx
