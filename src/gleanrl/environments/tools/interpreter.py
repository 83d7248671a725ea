"""The program of a sandbox's process: it receives code from a socket, runs it, and sends back what the code prints.

`gleanrl.environments.tools.executor` compiles this file and sends it to a Python interpreter that has imported nothing.
To start quickly, this file imports no module of Glean RL and almost only modules of Python's library that are written
in C. Importing `typing` would double the start time.

The program sends frames to the executor. A frame is a line ``nonce kind left_out threads length`` and a body of
``length`` bytes. ``left_out`` is the number of dropped characters of output, and ``threads`` is the number of
threads that the code has started and that still run. The kind determines the body:

    s   sent once, before any code: empty, or the reason why the sandbox cannot start
    o   a piece of output
    d   the end of a call: its error; empty if there is none

The nonce is a random text from the request ("start" in the first frame). So code cannot send the result of a later
request in advance.
"""

import _ast
import _signal  # pyright: ignore[reportMissingImports]
import io
import marshal
import posix
import resource
import sys
from _thread import _count as other_threads  # also counts threads that were started without `threading`

TYPE_CHECKING = False  # type checkers treat it like `typing.TYPE_CHECKING`
if TYPE_CHECKING:
    from typing import Any

MAX_ERROR = 4000  # maximum length of a call's error, in characters
_SOURCE = "<code>"
_CHANNEL = 3  # file descriptor of the socket
# This program calls the functions by these names, because the model's code may replace them in the module `posix`.
_read, _write, _getpid, _exit = posix.read, posix.write, posix.getpid, posix._exit


class OutOfTime(BaseException):
    """Raised in code that runs longer than its wall time.

    It derives from BaseException, so that an ``except Exception`` in the code does not catch it.
    """


class Output(io.TextIOBase):
    """Standard output and standard error of the code.

    Sends at most ``room`` characters to the executor. ``left_out`` counts the characters after them.
    """

    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.nonce, self.room, self.left_out = descriptor, "start", 0, 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        shown = text[: self.room]
        self.room -= len(shown)
        self.left_out += len(text) - len(shown)
        if shown:
            self.send("o", shown)
        return len(text)

    def send(self, kind: str, text: str, threads: int = 0) -> None:
        body = text.encode("utf-8", "replace")
        data = f"{self.nonce} {kind} {self.left_out} {threads} {len(body)}\n".encode() + body
        while data:
            data = data[_write(self.descriptor, data) :]


def main() -> None:
    """Set resource limits and file descriptors, then run code until the executor closes the socket.

    The command-line arguments are the socket's descriptor, the limits as ``name=value,...``, the isolation, and the
    folders of installed packages that code may import.
    """
    descriptor, bounds, isolation = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)] + sys.argv[4:]
    sys.argv[:] = [""]
    output = Output(descriptor)
    try:
        for bound in bounds.split(","):
            name, value = bound.split("=")
            kind = getattr(resource, f"RLIMIT_{name}")
            _, most = resource.getrlimit(kind)
            allowed = int(value) if most == resource.RLIM_INFINITY else min(most, int(value))
            resource.setrlimit(kind, (allowed, allowed))
        nowhere = posix.open("/dev/null", posix.O_RDWR)
        for standard in range(3):
            posix.dup2(nowhere, standard)
        if descriptor != _CHANNEL:
            posix.dup2(descriptor, _CHANNEL)
        posix.closerange(_CHANNEL + 1, 1 << 12)
        output.descriptor = _CHANNEL
        if isolation == "none":  # let the kernel kill this process if its parent dies, as bubblewrap does
            import ctypes

            ctypes.CDLL(None).prctl(1, _signal.SIGKILL, 0, 0, 0)
    except Exception as error:
        output.send("s", f"{type(error).__name__}: {error}")
        return
    output.send("s", "")

    sys.stdout = sys.stderr = output  # type: ignore[assignment]
    sys.stdin = io.StringIO()
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    own = _getpid()
    while (size := _exactly(4)) and (body := _exactly(int.from_bytes(size, "little"))):
        output.nonce, code, wall_s, output.room = marshal.loads(body)
        output.left_out = 0
        if "random" in code and "random" not in sys.modules:
            import random

            # With a fixed seed, the same code gives the same result in every call.
            random.seed(0)
        error = _run(code, names, wall_s)
        if _getpid() != own:  # this is a process that the code has forked, which must not handle requests
            _exit(0)
        output.send("d", error or "", other_threads())


def _run(code: str, names: dict[str, object], wall_s: float) -> str | None:
    """Run code. Returns None if it succeeds, otherwise its error: usually a traceback with only the code's own lines.

    If the last statement is an expression, its value is printed, as in an interactive session.
    """

    def interrupt(*_: object) -> None:
        raise OutOfTime

    try:
        _signal.signal(_signal.SIGALRM, interrupt)
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
        # Formatting the traceback can fail, for example in the `__str__` of the error or for lack of memory.
        except BaseException:
            text = type(error).__name__
        return text if len(text) <= MAX_ERROR else f"{text[: MAX_ERROR // 2]}\n...\n{text[-MAX_ERROR // 2 :]}"
    finally:
        _signal.setitimer(_signal.ITIMER_REAL, 0)
    return None


def _exactly(size: int) -> bytes:
    """Read exactly ``size`` bytes from the socket. Returns an empty value if the executor has closed it."""
    data = b""
    while len(data) < size:
        part = _read(_CHANNEL, min(size - len(data), 1 << 20))
        if not part:
            return b""
        data += part
    return data


if __name__ == "__main__":
    main()
    _exit(0)
