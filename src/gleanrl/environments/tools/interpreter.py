"""The interpreter inside a sandbox: takes code from a socket, runs it, and sends what it prints as it prints it.

`gleanrl.environments.tools.executor` starts this file as a program, so it imports nothing of Glean RL, and from
Python's library only what starts quickly.

A frame to the executor is a line, ``nonce kind left_out threads length``, and a body:

    s   once, before any code: empty, or why the sandbox does not stand
    o   a piece of output
    d   the end of a call: its error, empty if there is none

The nonce is the request's, so that code cannot prepare the answer to a later request.
"""

from __future__ import annotations

import _ast
import _signal
import io
import marshal
import os
import resource
import sys
from _thread import _count as other_threads  # also those that `threading` does not know
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

MAX_ERROR = 4000  # characters of a traceback
_SOURCE = "<code>"
_CHANNEL = 3
_read, _write, _getpid, _exit = os.read, os.write, os.getpid, os._exit  # code may put others in their place


class OutOfTime(BaseException):
    """Raised into code that runs too long. Not an Exception, so that ``except Exception`` does not catch it."""


class Output(io.TextIOBase):
    """Sends what is printed until the limit is reached, then counts."""

    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._room = self.left_out = 0
        self._nonce = ""

    def begin(self, nonce: str, room: int) -> None:
        self._nonce, self._room, self.left_out = nonce, room, 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        shown = text[: self._room]
        self._room -= len(shown)
        self.left_out += len(text) - len(shown)
        if shown:
            self.send("o", shown)
        return len(text)

    def send(self, kind: str, text: str, threads: int = 0) -> None:
        body = text.encode("utf-8", "replace")
        data = f"{self._nonce} {kind} {self.left_out} {threads} {len(body)}\n".encode() + body
        while data:
            data = data[_write(self.descriptor, data) :]


def main() -> None:
    """Arguments: the socket's descriptor, limits as ``name=value`` pairs, then folders of packages."""
    descriptor, bounds, isolated = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "isolated"
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)] + sys.argv[4:]
    sys.argv[:] = [""]
    output = Output(descriptor)
    output.begin("start", 0)
    try:
        for bound in bounds.split(","):
            name, value = bound.split("=")
            _limit(getattr(resource, f"RLIMIT_{name}"), int(value))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nowhere, standard)
        if descriptor != _CHANNEL:
            os.dup2(descriptor, _CHANNEL)
        os.closerange(_CHANNEL + 1, 1 << 12)
        output.descriptor = descriptor = _CHANNEL
        if not isolated:
            _end_with_parent()
    except Exception as error:
        output.send("s", f"{type(error).__name__}: {error}")
        return
    output.send("s", "")
    serve(descriptor, output)


def _limit(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    bound = value if most == resource.RLIM_INFINITY else min(most, value)
    resource.setrlimit(kind, (bound, bound))


def _end_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, _signal.SIGKILL, 0, 0, 0)


def serve(descriptor: int, output: Output) -> None:
    """Run code until the other end hangs up."""
    sys.stdout = sys.stderr = output  # type: ignore[assignment]
    sys.stdin = io.StringIO()
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    own = _getpid()
    while (size := _exactly(descriptor, 4)) and (body := _exactly(descriptor, int.from_bytes(size, "little"))):
        nonce, code, wall_s, room = marshal.loads(body)
        output.begin(nonce, room)
        if "random" in code and "random" not in sys.modules:
            import random

            random.seed(0)  # so that code repeats itself
        error = _run(code, names, wall_s)
        if _getpid() != own:  # a child that the code forked came back here
            _exit(0)
        output.send("d", error or "", other_threads())


def _run(code: str, names: dict[str, Any], wall_s: float) -> str | None:
    """None, or what went wrong as a traceback of the code's own lines."""
    try:
        _signal.signal(_signal.SIGALRM, _interrupt)
        _signal.setitimer(_signal.ITIMER_REAL, wall_s)
        tree: Any = compile(code, _SOURCE, "exec", 1024)  # ast.PyCF_ONLY_AST
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        exec(compile(tree, _SOURCE, "exec"), names)
        if last is not None:
            value = eval(compile(_ast.Expression(last.value), _SOURCE, "eval"), names)
            if value is not None:
                print(repr(value))
    except OutOfTime:
        return f"TimeoutError: the code ran for more than {wall_s:g} s and was interrupted"
    except BaseException as error:
        return _error_text(error, code)
    finally:
        _signal.setitimer(_signal.ITIMER_REAL, 0)
    return None


def _interrupt(*_: object) -> None:
    raise OutOfTime


def _error_text(error: BaseException, code: str) -> str | None:
    """The traceback without the lines of this file. None for a `SystemExit` that means success."""
    try:
        if isinstance(error, SystemExit):
            if error.code is None or error.code == 0:
                return None
            text = f"SystemExit: {error.code}"
        else:
            import linecache
            import traceback

            linecache.cache[_SOURCE] = (len(code), None, code.splitlines(keepends=True), _SOURCE)
            frames = error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename != _SOURCE:
                frames = frames.tb_next
            text = "".join(traceback.format_exception(type(error), error, frames, limit=-8, chain=False)).rstrip()
    except BaseException:  # its own __str__ may fail, and memory may be used up
        text = type(error).__name__
    return text if len(text) <= MAX_ERROR else f"{text[: MAX_ERROR // 2]}\n...\n{text[-MAX_ERROR // 2 :]}"


def _exactly(descriptor: int, size: int) -> bytes:
    """So many bytes; none if the other end hung up."""
    data = b""
    while len(data) < size:
        part = _read(descriptor, min(size - len(data), 1 << 20))
        if not part:
            return b""
        data += part
    return data


if __name__ == "__main__":
    main()
    _exit(0)
