"""Serves an environment service over HTTP until a signal arrives; `gleanrl serve-env` calls `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from functools import partial

import uvicorn

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.environments.service.app import LARGEST, Limits, Service
from gleanrl.protocols import Taskset
from gleanrl.utils.place import Place

_KEEP_ALIVE_S = 75  # seconds that an idle connection stays open: longer than in clients, so that the client closes it
_FINISH_S = 2.0  # seconds that requests under way get to finish when the server stops
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def serve(
    taskset: Taskset,
    settings: EnvironmentSettings,
    seed: int,
    limits: Limits,
    place: Place,
    ready: Callable[[str], None],
    *,
    openenv: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM; then finish the requests under way, close the environments and end the workers.

    ``seed`` is the seed of the taskset. ``ready`` is called with the address once the server accepts requests. With
    ``openenv``, OpenEnv's protocol is served too.

    Raises:
        UserError: the address cannot be bound, other machines could connect without a token, or the taskset cannot be
            sent to worker processes.
    """
    place.check("--token env:NAME")
    token = None if place.token is None else place.token.reveal()

    async def run(listening: socket.socket) -> None:
        host, port = listening.getsockname()[:2]
        hosts = _LOOPBACK | {place.host.lower(), host} if place.loopback and token is None else None
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        pool = EnvironmentPool(taskset, workers=settings.workers, timeout_s=settings.timeout_s)
        opening, stopping = asyncio.ensure_future(pool.__aenter__()), asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():  # the stop signal came while the workers were starting
                return
            await opening
            service = Service(taskset, pool, settings, limits, seed=seed, token=token, hosts=hosts, openenv=openenv)
            shown = f"[{host}]" if ":" in host else host
            await run_server(service, listening, stop, partial(ready, f"http://{shown}:{port}"))
        finally:
            stopping.cancel()
            if not opening.done():
                opening.cancel()
                await asyncio.wait((opening,))
            await pool.close()

    try:  # on uvloop, a request takes two thirds of the time that it takes on asyncio's own loop
        import uvloop

        loop_factory = uvloop.new_event_loop
    except ModuleNotFoundError:
        loop_factory = None
    with contextlib.closing(place.bind()) as listening, asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run(listening))


async def run_server(
    service: Service, listening: socket.socket, stop: asyncio.Event, ready: Callable[[], None]
) -> None:
    """Serve on the running event loop until ``stop`` is set, then close the service.

    Calls ``ready`` once the server listens. `uvicorn.Server.serve` is not used, because it would poll ten times a
    second and handle the signals itself.
    """
    config = uvicorn.Config(
        service,
        ws="auto" if service.openenv else "none",
        ws_max_size=LARGEST,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        server_header=False,
        date_header=False,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup([listening])
    ready()
    await stop.wait()
    # The service is closed before uvicorn closes the connections, so that every request is answered.
    await service.close(_FINISH_S)
    await server.shutdown([listening])
