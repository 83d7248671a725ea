"""Serves an environment service over HTTP until a signal arrives; `gleanrl serve-env` calls `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import uvicorn

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.environments.service.app import Limits, Service
from gleanrl.protocols import Taskset
from gleanrl.utils.errors import UserError
from gleanrl.utils.secrets import Secret

_KEEP_ALIVE_S = 75  # seconds that an idle connection stays open: longer than in clients, so that the client closes it
_FINISH_S = 2.0  # seconds that requests under way get to finish when the server stops
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The address at which a server listens, and the token that every request must carry (None = no token)."""

    host: str = "127.0.0.1"
    port: int = 8765  # 0 = any free port
    token: Secret | None = None

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    def check(self) -> None:
        """Raise `UserError` if other machines could connect without a token."""
        if self.token is None and not self.loopback:
            raise UserError(
                f"--host {self.host}: others can reach that address, so it needs --token env:NAME; "
                "or keep the default --host 127.0.0.1 and forward a port to it"
            )

    def bind(self) -> socket.socket:
        """Return a socket that listens at the address. A client that connects early waits until the server is ready.

        Raises `UserError` if the address cannot be bound.
        """
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            found = socket.socket(family, kind, protocol)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen()  # at once, because with SO_REUSEADDR several sockets can be bound until one listens
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise UserError(f"cannot listen on {self.host} port {self.port}: {why}") from None
        return found


def serve(
    taskset: Taskset,
    settings: EnvironmentSettings,
    seed: int,
    limits: Limits,
    place: Place,
    ready: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM; then finish the requests under way, close the environments and end the workers.

    ``seed`` is the seed of the taskset. ``ready`` is called with the address once the server accepts requests.

    Raises:
        UserError: the address cannot be bound, other machines could connect without a token, or the taskset cannot be
            sent to worker processes.
    """
    place.check()
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
            service = Service(taskset, pool, settings, limits, seed=seed, token=token, hosts=hosts)
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
        ws="none",
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
