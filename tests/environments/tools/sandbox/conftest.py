"""A sandbox of either sort, for the tests of a file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from gleanrl.environments.tools.sandbox import Limits
from tests.environments.tools.sandbox.worlds import World, descendants, is_session, opened

WALLS = ("namespaces", "landlock")


@pytest.fixture(scope="module", params=WALLS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with asyncio.Runner() as runner:
        sandbox = opened(
            runner, request.param, Limits(wall_s=1.0, cpu_s=1, memory_mb=256, disk_mb=8, output_chars=1000)
        )
        yield World(runner, sandbox)
        runner.run(sandbox.close())


@pytest.fixture
def well(world: World) -> Iterator[None]:
    """Before and after each attempt: a call works, and nothing but the server is left of ours."""
    yield
    ran = world.run("6 * 7")
    assert (ran.output, ran.error) == ("42\n", None)
    server = world.sandbox._starting
    assert server is not None
    control = server.result()._process.pid
    assert not [pid for pid in descendants(control) if is_session(pid, control)]
