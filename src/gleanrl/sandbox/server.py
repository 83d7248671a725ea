"""The server of sandboxes: a bare Python that puts itself behind walls, and forks a session in a few milliseconds.

It is started with an empty environment and one socket, holds nothing of the program that started it, and ends with
it. Messages are JSON: ``open`` (with the session's socket) and ``kill`` come in; ``ready``, ``failed``, ``ended`` go.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from gleanrl.sandbox import interpreter
from gleanrl.sandbox.jail import Jail, jail
from gleanrl.sandbox.limits import Limits

MAX_MESSAGE = 1 << 16
_LOADED = (  # so that no session has to; also what some of them load when they are first used
    "bisect cmath collections copy csv dataclasses datetime decimal encodings.idna fractions functools heapq inspect "
    "itertools json math operator random re statistics string textwrap time traceback typing unicodedata"
)


def main(config: str, descriptor: int) -> None:
    """Serve until the other end of the socket is gone."""
    wanted = json.loads(config)
    control = socket.socket(fileno=descriptor)
    try:
        sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)] + wanted["packages"]
        for name in _LOADED.split():
            __import__(name)
        walls = jail(wanted["isolation"], wanted["packages"])
        walls.enter()
    except Exception as error:
        control.send(json.dumps({"failed": f"{error}" if isinstance(error, OSError) else repr(error)}).encode())
        return
    gc.collect()
    gc.freeze()  # so that a session does not copy all pages to collect them
    _Server(control, walls).run()


class _Server:
    def __init__(self, control: socket.socket, walls: Jail) -> None:
        self._control, self._walls = control, walls
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._sessions: dict[int, tuple[int, int]] = {}  # pidfd: id, process

    def run(self) -> None:
        self._tell({"ready": True})
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._sessions:
                    self._bury(descriptor)
                elif not self._obey():
                    for pidfd in self._sessions:
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    return

    def _obey(self) -> bool:
        """Whether anybody is still there."""
        data, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 1)
        if not data:
            return False
        order = json.loads(data)
        if order["do"] == "open":
            self._open(order, descriptors[0])
        else:
            for pidfd, (number, _) in self._sessions.items():
                if number == order["id"]:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return True

    def _open(self, order: dict[str, Any], descriptor: int) -> None:
        try:
            process = self._walls.fork()
        except OSError as error:
            os.close(descriptor)
            self._tell({"ended": order["id"], "why": f"it could not be started: {error}"})
            return
        if process == 0:
            _session(descriptor, self._walls, order)
        os.close(descriptor)
        pidfd = os.pidfd_open(process)
        self._sessions[pidfd] = (order["id"], process)
        self._poll.register(pidfd, select.POLLIN)

    def _bury(self, pidfd: int) -> None:
        number, process = self._sessions.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(OSError):  # what it left behind, where it had no namespace
            os.killpg(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        self._tell({"ended": number, "why": _told(os.waitstatus_to_exitcode(status))})

    def _tell(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # nobody is there: the next poll says so
            self._control.send(json.dumps(what).encode())


def _session(descriptor: int, walls: Jail, order: dict[str, Any]) -> None:
    """Never returns."""
    status = 1
    try:
        os.dup2(descriptor, 3)
        os.closerange(4, 1 << 12)
        walls.confine(Limits(**order["limits"]), order["scratch"])
        interpreter.serve(3)
        status = 0
    except BaseException as error:
        try:
            body = json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode()
            interpreter._send(3, b"d", body)
        except BaseException:
            pass
    finally:
        os._exit(status)


def _told(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "its processor time was used up"
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    return f"it ended with status {code}"
