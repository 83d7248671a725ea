"""Starts `gleanrl` commands as processes of their own, without importing the libraries again for each.

A process that has imported everything forks for each request (a JSON line on standard input); the child then
is what `python -m gleanrl` would be: it calls `main` with its arguments, files and folder, gets signals,
and ends as the interpreter does. Only the last part of that, which takes every module apart, is left out unless the
request asks for it: it would copy the parent's memory, which costs as much processor time as half of a run.

A request may hold a trigger: the child sends itself a signal, or sees a full disk, when a function of the
product is called for the n-th time. So a run is hit at one exact place, however fast the machine is; or at a random
moment of a short piece of work, by a signal that comes a given time after its beginning.
"""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any


def serve() -> dict[str, Any]:
    """Answer requests until standard input ends; returns only in a child, with its request."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import gleanrl.cli.evaluate
    import gleanrl.cli.pool
    import gleanrl.cli.train
    import gleanrl.experience.replay
    import gleanrl.runtime.local
    import gleanrl.samplers.transformers
    import gleanrl.tracking.monitors.file
    import gleanrl.tracking.report  # noqa: F401
    from gleanrl.learners.tiny import build_tokenizer
    from gleanrl.rollout.renderer import Renderer

    Renderer(build_tokenizer(["warm"], 128))  # compiles the chat template, which transformers keeps
    get_checkpoint_conversion_mapping("llama")  # half a second of computing, which transformers keeps
    gc.collect()
    gc.freeze()  # otherwise each child's last collection scans all libraries, which takes a second
    children: dict[int, int | None] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if pid == 0:
                return request["start"]
            children[pid] = None
            answer = {"pid": pid}
        else:
            answer = {"status": wait(request["wait"], request["timeout"])}
        print(json.dumps(answer), flush=True)
    sys.exit(0)


def wait(pid: int, timeout: float) -> int | None:
    """The exit status, negative for a signal; None (and the process is killed) after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.01)


def become(request: dict[str, Any]) -> None:
    """Take the files, folder, environment and triggers of a request."""
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # a new interpreter would look there
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    for number, name in ((0, os.devnull), (1, request["stdout"]), (2, request["stderr"])):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(name, flags, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    for trigger in request["triggers"]:
        arm(**trigger)


def arm(at: str, call: int, event: str, after: float = 0.0) -> None:
    """Let ``event`` (a signal's name, or "full disk") happen on the ``call``-th call of ``module:name``.

    ``after``: seconds that the signal comes after the call began.
    """
    module, _, name = at.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, last = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    real, calls = getattr(owner, last), 0

    def later() -> None:
        time.sleep(after)
        os.kill(os.getpid(), getattr(signal, event))

    def hit(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if event == "full disk" and calls >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if event != "full disk" and calls == call and after:
            threading.Thread(target=later, daemon=True).start()
        elif event != "full disk" and calls == call:
            os.kill(os.getpid(), getattr(signal, event))
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.5)  # let the main thread handle the signal before this thread continues
        return real(*args, **kwargs)

    setattr(owner, last, hit)


def end(status: int) -> None:
    """End the process as the interpreter does, up to the point where it would take the modules apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()  # unreferenced tasks and files print their "never awaited" and "unclosed" warnings now
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    request = serve()
    become(request)
    from gleanrl.cli.main import main

    status = main(request["argv"])
    if not request["teardown"]:
        end(status)
    sys.exit(status)
