"""The address at which a server of the command line listens."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from dataclasses import dataclass

from gleanrl.utils.errors import UserError
from gleanrl.utils.secrets import Secret


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

    def check(self, option: str) -> None:
        """Raise `UserError` if other machines could connect without a token. ``option`` is how users give one."""
        if self.token is None and not self.loopback:
            raise UserError(
                f"--host {self.host}: others can reach that address, so it needs {option}; "
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
