"""A slow reward service for the examples: an HTTP server in this process, in place of a real judge elsewhere."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Judge(ThreadingHTTPServer):
    """An HTTP server that answers the requests of `gleanrl.rewards.http.HttpReward`.

    The score is 1 if the response equals the task's ``answer``, else 0. Latency and refusal of a request depend only on
    its task and response.

    Args:
        latency: shortest and longest time that a request takes, in seconds.
        refused: share of the requests that are refused with status 422 instead of a score.

    Attributes:
        most: largest number of requests that were processed at the same time.
        answered, refusals: numbers of requests that were scored and refused.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, latency: tuple[float, float], refused: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.latency, self.refused = latency, refused
        self.lock = threading.Lock()
        self.busy = self.most = self.answered = self.refusals = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any  # a `Judge`

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer, response = asked["payload"]["answer"], asked["response"].strip()
        mood = random.Random(f"{asked['task_id']} {response}")
        refused = mood.random() < self.server.refused
        with self.server.lock:
            self.server.busy += 1
            self.server.most = max(self.server.most, self.server.busy)
        time.sleep(mood.uniform(*self.server.latency))
        with self.server.lock:
            self.server.busy -= 1
            self.server.refusals += refused
            self.server.answered += not refused
        if refused:
            self._send(422, {"error": {"message": "no opinion on this one"}})
        else:
            self._send(200, {"score": float(response == answer)})

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def judge(latency: tuple[float, float] = (0.2, 0.8), refused: float = 0.05) -> Iterator[Judge]:
    """Yield a `Judge` that serves requests on a thread while the block runs."""
    with Judge(latency, refused) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
