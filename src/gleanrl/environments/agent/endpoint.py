"""The HTTP endpoint that answers the model calls of agents, in the run's process.

Each episode has a key of its own while it runs. A request with this key is answered by the episode's model
(`gleanrl.rollout.conversations.PolicyModel`). Dialects translate between requests and model calls. `gleanrl serve` uses
the same endpoint for a trained model.

    endpoint = Endpoint()
    async with endpoint.open(model.answer) as address:
        ...  # a client of OpenAI's API can use f"{address.url}/v1" and address.key
    await endpoint.close()
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from gleanrl.environments.agent.dialects import DIALECTS, Dialect
from gleanrl.protocols import ModelAddress
from gleanrl.rollout.calls import ModelAnswer, ModelCall, Refused
from gleanrl.utils.http import connection_limit
from gleanrl.utils.place import Place

MODEL = "policy"
"""Name of the model, which agents get and responses state."""
MAX_BODY_BYTES = 1 << 24
"""Largest body of a request."""
CONNECTIONS = 1 << 14
"""Number of sockets for which the process's limit of open files is raised, and of connections that wait to be
accepted."""


@dataclass(eq=False, slots=True)
class _Episode:
    answer: Callable[[ModelCall], Awaitable[ModelAnswer]]
    earn: Callable[[float, str | None], None] | None
    max_context: int | None
    on_refusal: Callable[[Refused], None] | None
    running: set[asyncio.Future[ModelAnswer]] = field(default_factory=set)  # the calls that are being answered
    since: float = field(default_factory=time.monotonic)  # time of the last answer, or of the start


class Endpoint:
    """Answers the model calls of many episodes. The server starts with the first episode.

    Args:
        listening: the socket on which the server accepts connections, and which it closes; None = any free port that
            only this machine can reach.
        page: HTML that a browser gets at ``/``, without a key; None = nothing.
    """

    def __init__(self, listening: socket.socket | None = None, page: str | None = None) -> None:
        self._listening, self._page = listening, page
        self._episodes: dict[str, _Episode] = {}
        self._runner: Any = None
        self._url = ""
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def open(
        self,
        answer: Callable[[ModelCall], Awaitable[ModelAnswer]],
        key: str | None = None,
        earn: Callable[[float, str | None], None] | None = None,
        max_context: int | None = None,
        on_refusal: Callable[[Refused], None] | None = None,
    ) -> AsyncIterator[ModelAddress]:
        """Yield the address of a new episode, whose calls ``answer`` answers. It may raise `Refused`.

        At the end of the block the key becomes invalid, and calls that are being answered are cancelled.

        Args:
            key: the key of the episode; None = a new one. With the empty key, requests need none, and any other key is
                accepted too; they must come from this machine.
            earn: called with each turn reward that is posted to ``/v1/rewards``, and with the `ModelAnswer.id` of the
                answer that it is for, or None for the latest. It raises `ValueError` if the reward is not finite or
                there is no such answer. None = turn rewards are refused.
            max_context: maximum number of tokens of a prompt and its answer, which ``/v1/models`` states as vLLM does.
            on_refusal: called with the error of each model call that is refused.
        """
        await self._start()
        key = f"sk-{secrets.token_urlsafe(24)}" if key is None else key
        episode = _Episode(answer, earn, max_context, on_refusal)
        self._episodes[key] = episode
        try:
            yield ModelAddress(self._url, key, MODEL)
        finally:
            del self._episodes[key]
            for call in episode.running:
                call.cancel()
            if episode.running:
                await asyncio.wait(episode.running)

    def idle_s(self, key: str) -> float:
        """Return for how many seconds an episode has had no answer; 0 while a call is being answered."""
        episode = self._episodes.get(key)
        return 0.0 if episode is None or episode.running else time.monotonic() - episode.since

    async def close(self) -> None:
        """Stop the server. A later episode starts it again."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _start(self) -> None:
        async with self._starting:
            if self._runner is not None:
                return
            from aiohttp import web

            connection_limit(CONNECTIONS)
            app = web.Application(client_max_size=MAX_BODY_BYTES)
            for dialect in DIALECTS:

                async def handle(request: Any, dialect: Dialect = dialect) -> Any:
                    return await self._respond(request, dialect)

                app.router.add_post(dialect.path, handle)
                # The clients of some APIs add "/v1" to the address that they get, those of others do not.
                app.router.add_post(f"/v1{dialect.path}", handle)
            app.router.add_get("/v1/models", self._models)
            app.router.add_post("/v1/rewards", self._rewards)
            if (page := self._page) is not None:

                async def show(request: Any) -> Any:
                    return web.Response(text=page, content_type="text/html")

                app.router.add_get("/", show)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            listening = self._listening or Place(port=0).bind()
            await web.SockSite(runner, listening, backlog=CONNECTIONS).start()
            host, port = runner.addresses[0][:2]
            self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            self._runner = runner

    def _episode(self, request: Any) -> _Episode:
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        episode = self._episodes.get(key) if key else None
        # A web page can have its own host name resolved to this machine's address. It then has that name in the header.
        if episode is None and Place(host=request.url.host or "").loopback:
            episode = self._episodes.get("")
        if episode is None:
            why = "the API key is wrong, or its episode has ended" if key else "the request has no API key"
            raise Refused(why, status=401, kind="authentication")
        return episode

    async def _models(self, request: Any) -> Any:
        from aiohttp import web

        try:
            episode = self._episode(request)
        except Refused as refused:
            return web.json_response({"error": {"message": str(refused)}}, status=refused.status)
        model: dict[str, Any] = {"id": MODEL, "object": "model", "created": 0, "owned_by": "gleanrl"}
        if episode.max_context is not None:
            model["max_model_len"] = episode.max_context
        return web.json_response({"object": "list", "data": [model]})

    async def _receive(self, request: Any) -> Any:
        """Return the body of a request. Raises `Refused` if its episode has ended once the body is complete."""
        body = await _read(request)
        self._episode(request)
        return body

    async def _rewards(self, request: Any) -> Any:
        from aiohttp import web

        try:
            episode = self._episode(request)
            body = await self._receive(request)
            if episode.earn is None:
                raise Refused("this model is not trained, so that it takes no turn rewards")
            if not isinstance(body, dict) or not {"reward"} <= body.keys() <= {"reward", "id"}:
                raise Refused('a turn reward is posted as {"reward": 0.5} or {"id": "chatcmpl-...", "reward": 0.5}')
            reward, named = body["reward"], body.get("id")
            if isinstance(reward, bool) or not isinstance(named, str | None):
                raise Refused("the reward must be a number, and the id that of a response")
            # The id of a response is a prefix of its API, such as "chatcmpl-" or "msg_", and the id of the answer.
            episode.earn(reward, None if named is None else named.replace("_", "-").rpartition("-")[2])
            return web.json_response({"object": "reward", **body})
        except (ValueError, TypeError, OverflowError) as error:
            refused = Refused(f"the turn reward is refused: {error}")
        except Refused as error:
            refused = error
        return web.json_response({"error": {"message": str(refused)}}, status=refused.status)

    async def _respond(self, request: Any, dialect: Dialect) -> Any:
        from aiohttp import web

        episode: _Episode | None = None
        try:
            episode = self._episode(request)
            body = await self._receive(request)
            if not isinstance(body, dict):
                raise Refused("the body of the request is not a JSON object")
            call = dialect.read(body)
            answering = asyncio.ensure_future(episode.answer(call))
            episode.running.add(answering)
            try:
                # A client that has given up its call does not end it: the answer may have been sampled already.
                answer = await asyncio.shield(answering)
                episode.since = time.monotonic()
            except asyncio.CancelledError:
                if not answering.cancelled():
                    raise
                raise Refused("the episode has ended", kind="episode_over") from None
            finally:
                if answering.done():
                    episode.running.discard(answering)
                else:
                    answering.add_done_callback(episode.running.discard)
            if not call.stream:
                return web.json_response(dialect.write(answer, call, MODEL))
            events = "".join(dialect.stream(answer, call, MODEL))
            return web.Response(text=events, content_type="text/event-stream")
        except RecursionError:
            refused = Refused("the body of the request is nested too deeply")
        except Refused as error:
            refused = error
        if episode is not None and episode.on_refusal is not None:
            episode.on_refusal(refused)
        return web.json_response(dialect.error(refused), status=refused.status)


async def _read(request: Any) -> Any:
    """Return the JSON in the body of a request. Raises `Refused` if the body is too large or holds none."""
    from aiohttp import web

    too_large = Refused(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413, kind="too_large")
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise too_large
    try:
        return json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except (ValueError, RecursionError, web.RequestPayloadError, ConnectionError):  # the last: the client is gone
        raise Refused("the body of the request is not JSON") from None
