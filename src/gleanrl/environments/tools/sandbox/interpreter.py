"""The inside of a session: takes code from a socket, runs it, and sends what it prints as it prints it.

A frame is its length (4 bytes), its kind (1) and a body: ``s`` comes first, with nothing or why there is no session;
``o`` is a piece of output, ``d`` the end of a call as JSON. What comes after ``s`` may be of the code's own making.
"""

from __future__ import annotations

import ast
import io
import linecache
import random
import struct
import sys
import traceback
from _thread import _count as other_threads  # those that `threading` does not know of, too
from json import JSONDecoder, JSONEncoder
from os import _exit, getpid, kill, read, waitpid, write  # by name: code may put others in their place
from resource import RLIMIT_CPU, RUSAGE_SELF, getrlimit, getrusage, setrlimit
from signal import ITIMER_REAL, SIGALRM, SIGKILL, setitimer, signal
from typing import Any

FRAME = struct.Struct("<Ic")
MAX_ERROR = 4000  # characters of a traceback
_SOURCE = "<code>"
_decode, _encode = JSONDecoder().decode, JSONEncoder().encode


class OutOfTime(BaseException):
    """Raised into code that runs too long. Not an Exception, so that no ``except Exception`` goes on."""


class _Output(io.TextIOBase):
    """Sends what is printed until the limit is reached, then counts."""

    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._room = self.left_out = 0

    def begin(self, room: int) -> None:
        self._room, self.left_out = room, 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        shown = text[: self._room]
        self._room -= len(shown)
        self.left_out += len(text) - len(shown)
        if shown:
            _send(self._descriptor, b"o", shown.encode("utf-8", "replace"))
        return len(text)


def begin(descriptor: int, failed: str) -> None:
    """Say that there is a session, or why there is none."""
    _send(descriptor, b"s", failed.encode("utf-8", "replace"))


def serve(descriptor: int) -> None:
    """Until the other end hangs up."""
    for name in [name for name in sys.modules if name.split(".")[0] == "gleanrl"]:
        del sys.modules[name]
    random.seed(0)
    output = _Output(descriptor)
    sys.stdout = sys.stderr = output  # type: ignore[assignment]
    sys.stdin = io.StringIO()
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    own = getpid()
    while (request := _receive(descriptor)) is not None:
        output.begin(request["output_chars"])
        _, hard = getrlimit(RLIMIT_CPU)
        used = getrusage(RUSAGE_SELF)
        setrlimit(RLIMIT_CPU, (min(hard, int(used.ru_utime + used.ru_stime) + request["cpu_s"] + 1), hard))
        error = _run(request["code"], names, request["wall_s"])
        if getpid() != own:  # a child that the code forked came back here
            _exit(0)
        if own == 1:
            _end_children()
        ending = {"call": request["call"], "error": error, "left_out": output.left_out, "threads": other_threads()}
        _send(descriptor, b"d", _encode(ending).encode())


def _run(code: str, names: dict[str, Any], wall_s: float) -> str | None:
    """None, or what went wrong as a traceback of the code's own lines."""
    linecache.cache[_SOURCE] = (len(code), None, code.splitlines(keepends=True), _SOURCE)
    try:
        signal(SIGALRM, _interrupt)
        setitimer(ITIMER_REAL, wall_s)
        tree = ast.parse(code, _SOURCE)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, _SOURCE, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _SOURCE, "eval"), names)
            if value is not None:
                print(repr(value))
    except OutOfTime:
        return f"TimeoutError: the code ran for more than {wall_s:g} s and was interrupted"
    except BaseException as error:
        return _described(error)
    finally:
        setitimer(ITIMER_REAL, 0)
    return None


def _interrupt(*_: object) -> None:
    raise OutOfTime


def _described(error: BaseException) -> str | None:
    """The traceback without the lines of this file. None of one that ends a program well."""
    try:
        if isinstance(error, SystemExit):
            if error.code is None or error.code == 0:
                return None
            text = f"SystemExit: {error.code}"
        else:
            frames = error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename != _SOURCE:
                frames = frames.tb_next
            text = "".join(traceback.format_exception(type(error), error, frames, limit=-8, chain=False)).rstrip()
    except BaseException:  # its own __str__ may fail, and memory may be used up
        text = type(error).__name__
    return text if len(text) <= MAX_ERROR else f"{text[: MAX_ERROR // 2]}\n...\n{text[-MAX_ERROR // 2 :]}"


def _end_children() -> None:
    """As the first process of its namespace, this one ends all others with one signal."""
    try:
        kill(-1, SIGKILL)
        while True:
            waitpid(-1, 0)
    except OSError:  # nobody is left
        pass


def _send(descriptor: int, kind: bytes, body: bytes) -> None:
    data = FRAME.pack(len(body), kind) + body
    while data:
        data = data[write(descriptor, data) :]


def _receive(descriptor: int) -> dict[str, Any] | None:
    head = _exactly(descriptor, FRAME.size)
    if head is None:
        return None
    body = _exactly(descriptor, FRAME.unpack(head)[0])
    return None if body is None else _decode(body.decode())


def _exactly(descriptor: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = read(descriptor, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
