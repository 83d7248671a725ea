"""The HTTP routes of the environment service: tokens, body sizes, errors of environments, limits and the profile.

The requests are made with an ASGI client, without a socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import psutil
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from gleanrl.environments.service.app import Limits, Service
from gleanrl.protocols import Observation
from gleanrl.types import Task
from tests.environments.service.world import TOKEN, Echo, serving
from tests.environments.troublesome import Troublesome

ID = "an-episode-of-the-tests"
JSON = {"content-type": "application/json"}


class ServiceClient:
    def __init__(self, service: Service, url: str, client: httpx2.AsyncClient) -> None:
        self.service, self.url, self.client = service, url, client

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        answer = await self.client.post(self.url + path, json=body)
        return answer.status_code, answer.json()

    async def begin(self, id: str = ID, **task: Any) -> tuple[int, Any]:
        return await self.post("/create", id=id, task={"id": "t", **task})

    async def say(self, text: str, step: int, id: str = ID) -> tuple[int, Any]:
        return await self.post("/step", id=id, step=step, message={"role": "assistant", "content": text})


def client_of(service: Service, headers: Any) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=service, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, headers=headers)


def run_with_client(body: Callable[[ServiceClient], Awaitable[None]], taskset: Any = None, **options: Any) -> None:
    async def main() -> None:
        headers = {"authorization": f"Bearer {options['token']}"} if "token" in options else {}
        here = serving(taskset or Echo(), listen=False, **options)
        async with here as (service, url), client_of(service, headers) as client:
            await body(ServiceClient(service, url, client))

    asyncio.run(main())


def test_an_answer_repeats_the_idempotency_key_of_its_request() -> None:
    async def body(ask: ServiceClient) -> None:
        for key in ("first", "again"):  # the second request gets the stored answer to the first
            headers = {"Idempotency-Key": key}
            answer = await ask.client.post(f"{ask.url}/create", json={"id": ID, "task": {"id": "t"}}, headers=headers)
            assert (answer.status_code, answer.headers.get_list("idempotency-key")) == (200, [key])

    run_with_client(body)


def test_an_episode_can_be_created_stepped_evaluated_and_released() -> None:
    async def body(ask: ServiceClient) -> None:
        _, tasks = await ask.post("/tasks", split="train", count=3)
        assert [task["id"] for task in tasks["tasks"]] == ["train-0", "train-1", "train-2"]
        assert tasks["end"]
        status, begun = await ask.post("/create", id=ID, task=tasks["tasks"][0])
        assert (status, begun["step"], begun["id"]) == (200, 0, ID)
        status, seen = await ask.say("look", 1)
        assert status == 200
        assert seen["observation"]["messages"] == [{"role": "user", "content": "look"}]
        assert (await ask.post("/evaluate", id=ID))[1]["score"]["value"] == 1.0
        assert await ask.post("/release", id=ID) == (200, {"released": True})
        assert (await ask.say("look", 2))[0] == 404
        _, shown = await ask.post("/demonstrate", task={"id": "t"}, seed=3, noise=0.5)
        assert shown["messages"][1]["content"] == "3 0.5"
        assert await ask.post("/prepare", tasks=tasks["tasks"]) == (200, {"prepared": 3})

    run_with_client(body)


def test_optional_methods_that_the_taskset_lacks_have_no_route() -> None:
    async def body(ask: ServiceClient) -> None:
        assert (await ask.post("/demonstrate", task={"id": "t"}, seed=0))[0] == 404
        paths = (await ask.client.get(f"{ask.url}/openapi.json")).json()["paths"]
        assert not {"/demonstrate", "/prepare", "/tools"} & paths.keys()
        about = (await ask.client.get(f"{ask.url}/taskset")).json()
        assert (about["demonstrates"], about["prepares"]) == (False, False)

    run_with_client(body, Troublesome())


def test_without_the_token_only_health_is_answered() -> None:
    async def body(ask: ServiceClient) -> None:
        for given in ({}, {"authorization": "Bearer other"}, {"authorization": TOKEN}, {"authorization": "Bearer é"}):
            raw = {name: value.encode("latin-1") for name, value in given.items()}
            async with client_of(ask.service, raw) as stranger:
                for path in ("/taskset", "/profile", "/nowhere"):
                    answer = await stranger.get(ask.url + path)
                    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                for path in ("/tasks", "/create", "/step", "/evaluate", "/release", "/prepare", "/demonstrate"):
                    answer = await stranger.post(ask.url + path, content=b"not even JSON", headers=JSON)
                    assert (answer.status_code, answer.json()["error"]) == (401, "unauthorized")
                assert (await stranger.get(f"{ask.url}/health")).json()["status"] == "ok"
        assert (await ask.begin())[0] == 200
        document = (await ask.client.get(f"{ask.url}/openapi.json")).json()
        assert document["paths"]["/step"]["post"]["security"] == [{"token": []}]
        assert "security" not in document["paths"]["/health"]["get"]

    run_with_client(body, token=TOKEN)


def test_bodies_of_a_wrong_type_content_or_size_are_rejected() -> None:
    async def body(ask: ServiceClient) -> None:
        for path in ("/create", "/step", "/tasks"):
            answer = await ask.client.post(ask.url + path, content=b"{}", headers={"content-type": "text/plain"})
            assert (answer.status_code, answer.json()["error"]) == (415, "media_type")
            for content, expected in ((b"{", "invalid"), (b'{"id": 1}', "invalid"), (b"\xff", "invalid")):
                answer = await ask.client.post(ask.url + path, content=content, headers=JSON)
                assert (answer.status_code, answer.json()["error"]) == (422, expected)
            large = b'{"id": "' + b"x" * (5 << 20) + b'"}'
            answer = await ask.client.post(ask.url + path, content=large, headers=JSON)
            assert (answer.status_code, answer.json()["error"]) == (413, "too_large")

            # A body that is sent in chunks has no Content-Length header.
            async def pieces() -> Any:
                for _ in range(6):
                    yield b"x" * (1 << 20)

            answer = await ask.client.post(ask.url + path, content=pieces(), headers=JSON)
            assert (answer.status_code, answer.json()["error"]) == (413, "too_large")
        status, expected = await ask.say("look", 0)
        assert (status, expected["detail"]) == (422, "step: Input should be greater than or equal to 1")

    run_with_client(body)


def test_errors_timeouts_and_dying_workers_fail_only_their_own_episodes() -> None:
    async def body(ask: ServiceClient) -> None:
        good, bad = "a-good-episode-of-the-tests", "a-bad-episode-of-the-tests"
        assert (await ask.begin(good))[0] == 200
        for number, (order, expected) in enumerate(
            [
                ("raise no such door", {"error": "raised", "kind": "ValueError", "detail": "no such door"}),
                ("mistake put the file there", {"error": "mistake", "detail": "put the file there"}),
                ("await 600", {"error": "timeout", "detail": "step took over 1 s (environment.timeout_s)"}),
            ]
        ):
            id = f"{bad}-{number}"
            await ask.begin(id)
            status, answer = await ask.say(order, 1, id)
            assert status == 500
            assert answer["detail"].startswith(expected["detail"])
            assert {name: answer[name] for name in expected} == {**expected, "detail": answer["detail"]}
            assert ("traceback" in answer) == (expected["error"] == "raised")
            # The same request again gets the stored answer.
            assert (await ask.say(order, 1, id)) == (500, answer)
            assert (await ask.say("look", 2, id))[1]["error"] == "over"
        status, answer = await ask.say("still here", 1, good)
        assert status == 200
        assert answer["observation"]["messages"][0]["content"] == "t: still here"
        pid = answer["observation"]["info"]["pid"]
        await ask.begin(f"{bad}-exit")
        assert (await ask.say("exit 3", 1, f"{bad}-exit"))[1]["error"] == "died"
        # The other episode was played by the same worker.
        assert (await ask.say("?", 2, good))[1]["error"] == "died"
        status, answer = await ask.begin("a-new-episode-of-the-tests")
        assert status == 200
        assert answer["observation"]["info"]["pid"] != pid
        assert (await ask.begin("one-that-cannot-begin-at-all", payload={"reset": "raise"}))[0] == 500

    run_with_client(body, Troublesome(), workers=1, timeout_s=1.0)


def test_new_episodes_are_refused_over_the_instance_or_memory_limit() -> None:
    async def body(ask: ServiceClient) -> None:
        assert (await ask.begin("one-of-two-that-find-room"))[0] == 200
        assert (await ask.begin("two-of-two-that-find-room"))[0] == 200
        answer = await ask.client.post(f"{ask.url}/create", json={"id": ID, "task": {"id": "t"}})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        await ask.post("/release", id="two-of-two-that-find-room")
        (worker,) = ask.service.pool.worker_pids
        assert ask.service.held_mib() > psutil.Process(worker).memory_info().rss / (1 << 20)
        ask.service.limits = Limits(max_memory=1.0)
        answer = await ask.client.post(f"{ask.url}/create", json={"id": ID, "task": {"id": "t"}})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert "--max-memory" in answer.json()["detail"]
        profile = (await ask.client.get(f"{ask.url}/profile")).json()
        assert (profile["instances"], profile["max_instances"], profile["refused"]) == (1, 2, 2)
        assert profile["workers"] == [worker]
        assert profile["memory_mib"] > 1

    run_with_client(body, Troublesome(), workers=1, limits=Limits(max_instances=2))


def test_requests_with_an_unknown_host_header_are_refused() -> None:
    """A web page in a browser on this machine could otherwise reach the server by DNS rebinding."""

    async def body(ask: ServiceClient) -> None:
        for host in ("localhost", "localhost:8765", "127.0.0.1:1", "[::1]", "[::1]:8765", "LOCALHOST:1"):
            assert (await ask.client.get(f"{ask.url}/health", headers={"host": host})).status_code == 200, host
        for host in ("evil.example", "localhost.evil.example:8765", "127.0.0.1.evil.example", ""):
            assert (await ask.client.get(f"{ask.url}/health", headers={"host": host})).status_code == 403, host

    run_with_client(body, hosts=frozenset({"localhost", "127.0.0.1", "::1"}))


def test_a_long_list_of_tasks_is_returned_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gleanrl.environments.service.app.PAGE", 200)

    async def body(ask: ServiceClient) -> None:
        found: list[str] = []
        pages = 0
        while True:
            _, page = await ask.post("/tasks", split="eval", count=40, start=len(found))
            found += [task["id"] for task in page["tasks"]]
            pages += 1
            if page["end"]:
                break
        assert found == [f"eval-{i}" for i in range(40)]
        assert 5 < pages < 20
        beyond = await ask.post("/tasks", split="eval", count=40, start=10**30)
        assert beyond == (200, {"tasks": [], "end": True})

    run_with_client(body)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ("x", ".reset returned 'x', not an Observation ("),
        (
            Observation((), info={"at": object()}),
            "what the environment gave cannot be sent: a value of type object",
        ),
    ],
)
def test_an_observation_that_cannot_be_serialised_is_a_clear_error(seen: Any, expected: str) -> None:
    class Odd(Echo):
        def environment(self, task: Any) -> Any:
            made = super().environment(task)
            made.seen = lambda: seen
            return made

    async def body(ask: ServiceClient) -> None:
        status, answer = await ask.begin()
        assert (status, answer["error"]) == (500, "raised")
        assert expected in answer["detail"]

    run_with_client(body, Odd())


def test_a_task_that_cannot_be_serialised_is_a_clear_error() -> None:
    class Odd(Echo):
        def tasks(self, split: Any, count: int) -> Any:
            return [Task("t", payload={"at": object()})]

    async def body(ask: ServiceClient) -> None:
        status, answer = await ask.post("/tasks", split="train", count=1)
        assert (status, answer["error"]) == (500, "raised")
        assert answer["detail"].startswith("what the environment gave cannot be sent: a value of type object")

    run_with_client(body, Odd())


def test_bodies_are_checked_also_if_the_service_is_mounted_below_a_path() -> None:
    async def body(ask: ServiceClient) -> None:
        transport = httpx2.ASGITransport(app=Starlette(routes=[Mount("/below", app=ask.service)]))
        async with httpx2.AsyncClient(transport=transport) as client:
            for content, kind, expected in ((b"{}", "text/plain", 415), (b"{", "application/json", 422)):
                answer = await client.post("http://host/below/step", content=content, headers={"content-type": kind})
                assert answer.status_code == expected
                assert answer.json()["error"] in ("media_type", "invalid")
            answer = await client.post("http://host/below/create", json={"id": ID, "task": {"id": "t"}})
            assert answer.status_code == 200

    run_with_client(body)
