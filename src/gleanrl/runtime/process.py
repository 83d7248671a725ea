"""Ties a run to its process: the lock on the run folder, and the handling of Ctrl-C."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from gleanrl.config.loading import load_stored
from gleanrl.config.validate import check_resumed
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError
from gleanrl.utils.progress import Progress
from gleanrl.utils.settings import JobConfig

STATUS_INTERRUPTED = 130  # the shell's exit status for SIGINT
_GRACE_S = 3.0  # seconds for a run to end after the second signal


class Interruptible(Protocol):
    """A run that can be asked to end at its next step boundary."""

    @property
    def interrupted(self) -> bool: ...

    def interrupt(self) -> None: ...


@contextmanager
def open_run(folder: RunFolder, config: JobConfig, *, resume: bool) -> Iterator[None]:
    """Lock the run folder for this process while the block runs, and write the configuration to it.

    The configuration is written before the block runs, so that the run can be resumed wherever it is interrupted. If
    the run fails before it logged anything, the configuration is removed, so that the same command works again.

    Raises:
        UserError: another process holds the folder; or ``resume`` is false and the folder has a run, or ``resume`` is
            true and it has none or one with another configuration.
    """
    if resume and not folder.config_path.exists():
        raise UserError(f"{folder.path} holds no run to resume; leave --resume out to start one")
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = (folder.path / ".lock").open("w")
    except OSError as error:
        raise UserError(f"cannot make the run folder {folder.path}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder.path} is in use by another process") from None
        if resume:
            check_resumed(load_stored(folder.config_path), config)
        elif folder.config_path.exists():
            raise UserError(
                f"{folder.path} already holds a run; continue it with --resume or choose another --run.name"
            )
        atomic.write_text(folder.config_path, config.to_toml())
        try:
            yield
        except Exception:
            if not folder.read_metrics() and not folder.checkpoints():
                folder.config_path.unlink()
            raise


@contextmanager
def handle_signals(run: Interruptible, console: Progress) -> Iterator[None]:
    """Let Ctrl-C (or SIGTERM) end the run cleanly at a step boundary. A second signal ends it at once."""
    loop = asyncio.get_running_loop()
    current = asyncio.current_task()

    def stop() -> None:
        if run.interrupted and current is not None:
            current.cancel()
            # `cancel` cannot interrupt a long update, so the process exits after a grace period in any case.
            end = threading.Timer(_GRACE_S, os._exit, (STATUS_INTERRUPTED,))
            end.daemon = True
            end.start()
            return
        console.print("stopping: the step under way is finished and saved; press Ctrl-C again to stop at once")
        run.interrupt()

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
