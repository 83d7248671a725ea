"""A server on 127.0.0.1 that speaks the part of the Hugging Face hub's API that a download and an upload need."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0" * 39 + "1"


class Hub:
    """The server. ``repositories`` holds the files of each repository, ``private`` the names of the private ones."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.cards: dict[str, dict[str, Any]] = {}  # metadata of the models, as the hub parses it from their cards
        # The status with which requests fail whose path contains this text; 0 = no answer for a while.
        self.fails: tuple[str, int] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    @contextmanager
    def serving(self) -> Iterator[Hub]:
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.http.shutdown()
            self.http.server_close()

    def post(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the answer to a POST request of a user who may write."""
        match path.removeprefix("/api/").split("/"):
            case ["repos", "create"]:
                asked = json.loads(body)
                name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                self.repositories.setdefault(name, {})
                if asked.get("visibility") == "private":
                    self.private.add(name)
                return {"url": f"{self.url}/{name}"}
            case ["validate-yaml"]:
                return {"errors": [], "warnings": []}
            case ["models", owner, name, "preupload", "main"] if f"{owner}/{name}" in self.repositories:
                paths = [file["path"] for file in json.loads(body)["files"]]
                return {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
            case ["models", owner, name, "commit", "main"] if f"{owner}/{name}" in self.repositories:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        content = base64.b64decode(line["value"]["content"])
                        self.repositories[f"{owner}/{name}"][line["value"]["path"]] = content
                    elif line["key"] == "deletedFile":
                        del self.repositories[f"{owner}/{name}"][line["value"]["path"]]
                return {"success": True, "commitOid": COMMIT, "commitUrl": f"{self.url}/{owner}/{name}/commit/{COMMIT}"}
        raise LookupError(path)

    def get(self, path: str) -> bytes:
        """Return the answer to a GET request: the description of a model, the list of its files, or one of them."""
        match path.strip("/").split("/"):
            case ["api", "models", owner, name, "tree", _]:
                found = self.repositories[f"{owner}/{name}"].items()
                files = [{"type": "file", "path": path, "size": len(data), "oid": _oid(data)} for path, data in found]
                return json.dumps(files).encode()
            case ["api", "models", owner, name] | ["api", "models", owner, name, "revision", _]:
                files = self.repositories[f"{owner}/{name}"]
                return json.dumps(
                    {
                        "id": f"{owner}/{name}",
                        "sha": COMMIT,
                        "siblings": [{"rfilename": file} for file in files],
                        "cardData": self.cards.get(f"{owner}/{name}"),
                    }
                ).encode()
            case [owner, name, "resolve", _, *file]:
                return self.repositories[f"{owner}/{name}"]["/".join(file)]
        raise LookupError(path)


def _oid(content: bytes) -> str:
    """Return the name under which git stores a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            place, status = hub.fails or ("no such path", 0)
            if place in self.path:
                if status:
                    self.answer(status, b'{"error": "as the test asks"}')
                else:
                    time.sleep(8)
                    self.close_connection = True
                return
            if self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.answer(401, b'{"error": "Invalid credentials"}')
                return
            try:
                self.answer(200, json.dumps(hub.post(self.path, body)).encode())
            except LookupError:
                self.answer(404, b"{}")

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            try:
                self.answer(200, hub.get(path))
            except LookupError:
                self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})

        do_HEAD = do_GET

        def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            kind = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT, **(headers or {})}
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(content)),
                **kind,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
