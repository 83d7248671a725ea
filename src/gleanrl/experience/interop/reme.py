"""A retriever for guidance that uses a ReMe service, which summarises trajectories with its own language model.

The client speaks the task memory API of github.com/modelscope/ReMe:

* ``POST /retrieve_task_memory`` sends ``workspace_id``, ``query`` and ``top_k``. The service returns ``answer`` and
  ``metadata.memory_list``.
* ``POST /summary_task_memory`` sends ``workspace_id`` and ``trajectories``, each with ``messages`` and ``score``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping
from time import monotonic
from typing import Any

from gleanrl.experience.guidance.retrieval import Retriever, description
from gleanrl.protocols import Metrics
from gleanrl.rollout.conversation import conversation, readable
from gleanrl.types import Task, Trajectory
from gleanrl.utils.http import HttpClient
from gleanrl.utils.retry import Fatal, Retryable

log = logging.getLogger(__name__)

PATIENCE = 3  # number of failed retrievals in a row after which no retrieval is requested for ``rest_s`` seconds
BATCH = 8  # largest number of trajectories in one summary request


class ServiceError(Exception):
    """Raised if a request to the service fails or its response is invalid. The message is one line."""


class ReMeRetriever(Retriever):
    """Retrieves texts from a ReMe service, and sends successes to it in the background, without retries.

    After ``PATIENCE`` failed retrievals in a row, `retrieve` raises immediately for ``rest_s`` seconds. Otherwise every
    group would wait ``timeout_s`` for a service that does not respond. Successes that cannot be sent are counted as
    lost.

    Args:
        url: address of the service, e.g. ``http://localhost:8002``.
        workspace: name of the workspace. The service stores the experience of each workspace separately.
        timeout_s: time limit of one retrieval, in seconds.
        summary_timeout_s: time limit of one summary request, in seconds.
        rest_s: seconds without retrievals after ``PATIENCE`` failures in a row.
        waiting: largest number of successes in the queue to be sent. If it is exceeded, the oldest is lost.
        headers: headers sent with each request. The value ``"env:NAME"`` stands for the value of the environment
            variable NAME.
        retrieve_path: endpoint for retrievals.
        summary_path: endpoint for summaries.

    Raises:
        UserError: ``url`` is not a valid address, the configuration contains a secret key, or aiohttp is not installed.
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
        setting = "guidance.options.url"
        self._retrieving = HttpClient(url, headers=headers, timeout_s=timeout_s, setting=setting)
        self._summarising = HttpClient(url, headers=headers, timeout_s=summary_timeout_s, setting=setting)
        self._workspace, self._timeout_s, self._rest_s = workspace, timeout_s, rest_s
        self._retrieve_path, self._summary_path = f"/{retrieve_path}", f"/{summary_path}"
        self._waiting: deque[dict[str, Any]] = deque()
        self._most_waiting = waiting
        self._sending: asyncio.Task[None] | None = None
        self._failures = 0
        self._rests_until = 0.0
        self._counts: Counter[str] = Counter()

    def metrics(self) -> Metrics:
        """Return the total numbers of successes sent and lost so far, and the number waiting in the queue."""
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
        """Search by ``task.prompt``. Return the service's answer as one text, or up to ``k`` memories if it gives none.

        Raises `ServiceError` if the request fails, or without a request after ``PATIENCE`` failures in a row.
        """
        self._send_waiting()
        if monotonic() < self._rests_until:
            raise ServiceError(
                f"{self._retrieving.url} failed {PATIENCE} times in a row; it is asked again after {self._rest_s:g} s"
            )
        query = {"workspace_id": self._workspace, "query": description(task.prompt), "top_k": k}
        try:
            texts = _read_texts(await _post(self._retrieving, self._retrieve_path, query), k)
        except ServiceError:
            self._failures += 1
            if self._failures >= PATIENCE:
                self._rests_until = monotonic() + self._rest_s
            raise
        self._failures = 0
        return texts

    async def close(self) -> None:
        """Send the queue, count what is not sent within ``timeout_s`` seconds as lost, and close the connections."""
        self._send_waiting()
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=self._timeout_s)
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        self._counts["lost"] += len(self._waiting)
        self._waiting.clear()
        await self._retrieving.aclose()
        await self._summarising.aclose()

    def _send_waiting(self) -> None:
        if self._waiting and (self._sending is None or self._sending.done()):
            try:
                self._sending = asyncio.get_running_loop().create_task(self._send())
            except RuntimeError:  # no event loop is running; a later call within a loop sends the queue
                return

    async def _send(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            sent = False
            try:
                body = {"workspace_id": self._workspace, "trajectories": batch}
                await _post(self._summarising, self._summary_path, body)
                sent = True
            except ServiceError as error:
                log.warning("%d successes were not taken: %s", len(batch), error)
            finally:
                self._counts["sent" if sent else "lost"] += len(batch)


async def _post(client: HttpClient, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Send a POST request and return the JSON response. Raises `ServiceError` if it fails or reports a failure."""
    try:
        answer = await client.request("POST", path, body)
    except (Retryable, Fatal) as error:
        raise ServiceError(str(error)) from error
    if not isinstance(answer, dict) or answer.get("success") is False:
        raise ServiceError(f"{client.address(path, shown=True)} answered with no success: {client.quote(str(answer))}")
    return answer


def _read_texts(answer: Mapping[str, Any], k: int) -> list[str]:
    """Return the texts in the response to a retrieval.

    If the service has written an answer from its memories, that is the only text. Otherwise there is one text for each
    of the first ``k`` memories: the situation in which to use the memory, and then its content.
    """
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
