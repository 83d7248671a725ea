"""The server of sandboxes: a bare Python that puts itself behind walls, and forks a session in a few milliseconds.

It is started with an empty environment and one socket, holds nothing of the program that started it, and ends with
it. Messages are JSON: ``open`` (with the session's socket), ``stop``, ``go`` and ``kill`` come in; ``ready``,
``failed``, ``ended`` go.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from dataclasses import dataclass
from os import _exit  # by name: a session may not come back from its code
from time import monotonic
from typing import Any, NoReturn

from gleanrl.environments.tools.sandbox import interpreter, scratch
from gleanrl.environments.tools.sandbox.jail import Jail, jail
from gleanrl.environments.tools.sandbox.limits import Limits

MAX_MESSAGE = 1 << 16
WATCH_S = 0.1  # between two looks at what a session holds that no wall bounds
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
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one for each session
        walls = jail(wanted["isolation"], wanted["packages"])
        walls.enter()
    except Exception as error:
        control.send(json.dumps({"failed": f"{error}" if isinstance(error, OSError) else repr(error)}).encode())
        return
    gc.collect()
    gc.freeze()  # so that a session does not copy all pages to collect them
    _Server(control, walls, wanted["scratch"]).run()


@dataclass(slots=True)
class _Held:
    """A session."""

    number: int
    process: int
    pidfd: int
    limits: Limits
    folder: str  # empty where it has one in memory
    running: bool = True
    why: str | None = None  # it had to end

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it has just ended
            signal.pidfd_send_signal(self.pidfd, number)


class _Server:
    def __init__(self, control: socket.socket, walls: Jail, place: str) -> None:
        self._control, self._walls, self._place = control, walls, place
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._sessions: dict[int, _Held] = {}  # by pidfd
        self._numbers: dict[int, _Held] = {}
        self._removers: dict[int, int] = {}  # by pidfd: processes that remove what sessions left
        self._looked = monotonic()

    def run(self) -> None:
        self._tell({"ready": True})
        there = True
        while there or self._sessions or self._removers:
            for descriptor, _ in self._poll.poll(self._patience_ms()):
                if descriptor in self._sessions:
                    self._bury(self._sessions[descriptor])
                elif descriptor in self._removers:
                    self._waited(descriptor, self._removers.pop(descriptor))
                elif not self._obey():
                    there = False
                    self._poll.unregister(self._control)
                    for held in self._sessions.values():
                        held.signal(signal.SIGKILL)
            self._watch()

    def _obey(self) -> bool:
        """Whether anybody is still there."""
        data, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 1)
        if not data:
            return False
        order = json.loads(data)
        if order["do"] == "open":
            try:
                self._open(order, descriptors)
            except OSError as error:
                self._tell({"ended": order["id"], "why": f"it could not be started: {error}"})
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        elif (held := self._numbers.get(order["id"])) is not None:
            held.running = order["do"] == "go"
            held.signal({"go": signal.SIGCONT, "stop": signal.SIGSTOP}.get(order["do"], signal.SIGKILL))
            if order["do"] == "stop":
                self._look_at(held)
        return True

    def _open(self, order: dict[str, Any], descriptors: list[int]) -> None:
        if not descriptors:
            raise OSError("too many open files")
        limits = Limits(**order["limits"])
        folder = scratch.make(self._place) if self._walls.scratch_outside else ""
        try:
            process = self._walls.fork()
        except OSError:
            self._clear(folder)
            raise
        if process == 0:
            highest = max(255, self._control.fileno(), *self._sessions, *descriptors) + 1
            _session(descriptors[0], highest, self._walls, limits, order["calls"], folder)
        try:
            pidfd = os.pidfd_open(process)
        except OSError:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            self._clear(folder)
            raise
        self._sessions[pidfd] = self._numbers[order["id"]] = _Held(order["id"], process, pidfd, limits, folder)
        self._poll.register(pidfd, select.POLLIN)

    def _bury(self, held: _Held) -> None:
        del self._sessions[held.pidfd], self._numbers[held.number]
        with contextlib.suppress(OSError):  # what it left behind, where it had no namespace
            os.killpg(held.process, signal.SIGKILL)
        status = self._waited(held.pidfd, held.process)
        self._tell({"ended": held.number, "why": held.why or _told(os.waitstatus_to_exitcode(status))})
        self._clear(held.folder)

    def _waited(self, pidfd: int, process: int) -> int:
        """The status of a process that has ended."""
        self._poll.unregister(pidfd)
        os.close(pidfd)
        return os.waitpid(process, 0)[1]

    def _patience_ms(self) -> float | None:
        watched = any(held.folder and held.running for held in self._sessions.values())
        return 1000 * WATCH_S if watched else None

    def _watch(self) -> None:
        """Of what no wall bounds, ten times a second while a call runs."""
        if monotonic() - self._looked >= WATCH_S:
            for held in self._sessions.values():
                if held.running:
                    self._look_at(held)
            self._looked = monotonic()

    def _look_at(self, held: _Held) -> None:
        if held.folder and held.why is None:
            held.why = scratch.exceeded(held.process, held.folder, held.limits)
            if held.why is not None:
                held.signal(signal.SIGKILL)

    def _clear(self, folder: str) -> None:
        """Ends a folder; what is in it, in a process of its own, for that may take seconds."""
        if not folder:
            return
        with contextlib.suppress(OSError):
            return os.rmdir(folder)
        try:
            process = os.fork()
        except OSError:
            with contextlib.suppress(OSError):
                scratch.remove(folder)
            return
        if process == 0:
            try:
                self._control.close()
                scratch.remove(folder)
            finally:
                _exit(0)
        pidfd = os.pidfd_open(process)
        self._removers[pidfd] = process
        self._poll.register(pidfd, select.POLLIN)

    def _tell(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # nobody is there: the next poll says so
            self._control.send(json.dumps(what).encode())


def _session(descriptor: int, highest: int, walls: Jail, limits: Limits, calls: int, folder: str) -> NoReturn:
    status = 1
    try:
        os.dup2(descriptor, 3)
        os.closerange(4, highest)
        try:
            walls.confine(limits, calls, folder)
        except Exception as error:
            interpreter.begin(3, f"{type(error).__name__}: {error}")
        else:
            interpreter.begin(3, "")
            interpreter.serve(3)
            status = 0
    finally:
        _exit(status)


def _told(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "its processor time was used up"
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    return f"it ended with status {code}"
