"""A slow judge for the examples here: an HTTP service on loopback. In earnest it is somebody else's machine."""

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
    """Scores what `gleanrl.rewards.http.HttpReward` asks for, each after its own while: 1 where the response is the
    task's ``answer``, or else 0.

    Args:
        latency: shortest and longest answer, in seconds.
        refused: share of the responses that it never scores.

    Attributes:
        most: requests in work at once, at most.
        answered, refusals: responses that it scored, and those that it refused.
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
    """A running judge."""
    with Judge(latency, refused) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
