"""An OpenAI-compatible completions server for tests, which samples with `TransformersSampler` and runs on 127.0.0.1.

Its responses have the format of vLLM's. It accepts weight updates like a vLLM server with Glean RL's worker extension.
``twist`` is a function that can change each response's choice before it is sent, so that a test can imitate servers
that do not return what `OpenAISampler` needs.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.torch import load_file

from gleanrl.protocols import Completion, SamplingParams
from tests.samplers.conversations import make_sampler, token_logprobs

# Called with the body of the request and the choice. It changes the choice in place or returns another one.
Twist = Callable[[dict[str, Any], dict[str, Any]], Any]


class CompletionsServer:
    """The server. ``bodies`` lists the bodies of all completion requests, ``admin`` the paths of all other requests."""

    def __init__(self, model: Any, twist: Twist | None = None) -> None:
        self.model, self.twist = model, twist
        self.bodies: list[dict[str, Any]] = []
        self.admin: list[str] = []
        self.failing = 0  # number of the next requests that are answered with status 503
        self.lossy = False  # True: updates are confirmed, but the weights are not loaded
        self.pause_status = 200  # status of the answer to /pause, after the server has paused
        self.pausing_s = 0.0  # seconds between the server's pause and its answer
        self.deaf = False  # True: updates are neither confirmed nor loaded
        self.loop = asyncio.new_event_loop()
        self.running = asyncio.Event()
        self.running.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    @contextmanager
    def serving(self) -> Iterator[CompletionsServer]:
        thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        thread.start()
        self.held = copy.deepcopy(self.model)  # model with the weights that are served
        self.sampler = make_sampler(self.model, deterministic=False, inflight=True)
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        serving = threading.Thread(target=self.http.serve_forever, daemon=True)
        serving.start()
        try:
            yield self
        finally:
            self.http.shutdown()
            self.http.server_close()
            asyncio.run_coroutine_threadsafe(self.sampler.close(), self.loop).result(10)
            self.loop.call_soon_threadsafe(self.loop.stop)
            thread.join(10)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return asyncio.run_coroutine_threadsafe(self._answer(path, body), self.loop).result(60)

    async def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if self.failing:
            self.failing -= 1
            return 503, {"error": {"message": "overloaded"}}
        if path == "/v1/completions":
            return 200, await self._complete(body)
        self.admin.append(path)
        if path.startswith("/pause"):
            self.running.clear()
            await asyncio.sleep(self.pausing_s)
            return self.pause_status, {"error": {"message": "bad gateway"}}
        elif path == "/resume":
            self.running.set()
        elif path == "/collective_rpc" and not self.deaf:
            assert body["method"] == "load_published"
            return 200, {"results": [await self._load(body["args"][0])]}
        return 200, {}

    async def _load(self, path: str) -> str:
        if not self.lossy:
            weights = load_file(path)
            await self.sampler.publish(weights, self.sampler.version + 1)
            self.held.load_state_dict(weights, strict=False)
        with safe_open(path, "pt") as file:
            return file.metadata()["mark"]

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        await self.running.wait()
        params = SamplingParams(body["max_tokens"], tuple(body["stop_token_ids"]), body["temperature"])
        prompt = np.array(body["prompt"], np.int32)
        async with self.sampler.session(body["seed"]) as session:
            completion = await session.sample(prompt, params)
        choice = _choice(completion)
        if "prompt_logprobs" in body:
            known = zip(prompt[1:], token_logprobs(self.held, prompt), strict=True)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": logprob}} for token, logprob in known)]
        if self.twist is not None:
            choice = self.twist(body, choice) or choice
        return {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = server.answer(self.path, body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Do not print the requests."""

        return Handler


def _choice(completion: Completion) -> dict[str, Any]:
    return {
        "text": "",
        "token_ids": completion.tokens.tolist(),
        "logprobs": {
            "token_logprobs": completion.logprobs.tolist(),
            "tokens": [f"token_id:{token}" for token in completion.tokens],
        },
        "finish_reason": completion.finish,
    }
