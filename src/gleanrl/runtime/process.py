"""Locks the run folder for the process that runs the job, writes its log file, and handles Ctrl-C and SIGTERM."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import gleanrl
from gleanrl.config.loading import load_stored
from gleanrl.config.validate import check_resumed
from gleanrl.runtime.checkpoints import Checkpoints
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError, own_line
from gleanrl.utils.progress import Progress
from gleanrl.utils.settings import JobConfig

STATUS_INTERRUPTED = 130  # exit status that shells use for a process ended by SIGINT (128 + 2)
_GRACE_S = 3.0  # seconds from the second signal until the process exits in any case
_BLOCKED_S = 5.0  # seconds for which code of the user may keep the event loop from handling the first signal
_CURES = {
    "environments": "environment.workers runs environments in other processes",
    "rewards": "a reward that is a plain function, not an `async def`, runs in a thread",
}
"""Subpackage of Glean RL that calls the user's code on the event loop -> what to do if this code blocks the loop."""


class Interruptible(Protocol):
    """A run that `handle_signals` can stop: `interrupt` makes it end after the present step."""

    @property
    def interrupted(self) -> bool: ...

    def interrupt(self) -> None: ...


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Lock the run folder for this process while the block runs.

    Raises:
        UserError: another process has locked the folder, or it cannot be written.
    """
    try:
        lock = folder.lock_path.open("w")
    except OSError as error:
        raise UserError(f"cannot write the run folder {folder.path}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder.path} is in use by another process") from None
        yield


def in_use(folder: RunFolder) -> bool:
    """Return whether another process has locked the run folder."""
    if not folder.lock_path.exists():
        return False
    with folder.lock_path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def open_run(folder: RunFolder, config: JobConfig, console: Progress, *, resume: bool) -> Iterator[None]:
    """Lock the run folder for this process while the block runs, and write ``config.toml`` and ``run.log`` to it.

    The configuration is written before the block runs, so that the run can be resumed whenever it is interrupted. If
    the block raises before the run has logged metrics or saved a checkpoint, ``config.toml`` is deleted again, so that
    the user can correct the mistake and repeat the same command without --resume.

    Raises:
        UserError: another process has locked the folder; ``resume`` is False and the folder contains a run; or
            ``resume`` is True and the folder contains no run, a run whose configuration does not match, or a run that
            has finished more than ``run.steps`` steps.
    """
    if resume and not folder.config_path.exists():
        raise UserError(f"{folder.path} holds no run to resume; leave --resume out to start one")
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the run folder {folder.path}: {error.strerror}") from None
    with locked(folder):
        if resume:
            check_resumed(load_stored(folder.config_path), config)
            saved = folder.checkpoints()
            # Only a checkpoint beyond the last step is read here to see whether it is damaged, as this takes time.
            if saved and saved[-1].step > config.run.steps:
                newest = Checkpoints(folder.checkpoints_path, keep=1).latest()
                if newest is not None and newest[1]["step"] > config.run.steps:
                    raise UserError(
                        f"run.steps = {config.run.steps}, but {newest[0]} has finished {newest[1]['step']} steps; "
                        "raise it, or start another run with --run.name"
                    )
        elif folder.config_path.exists():
            raise UserError(
                f"{folder.path} already holds a run; continue it with --resume or choose another --run.name"
            )
        atomic.write_text(folder.config_path, config.to_toml())
        try:
            with log_messages(folder.log_path, console):
                yield
        except Exception:
            if not folder.read_metrics() and not folder.checkpoints():
                folder.config_path.unlink()
            raise


@contextmanager
def log_messages(path: Path, console: Progress) -> Iterator[None]:
    """While the block runs, append log messages of `gleanrl` to the file ``path`` and show them on the console.

    Messages below the level INFO are left out. Without this, Python shows only warnings, and writes no file.
    """
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    shown = _ConsoleHandler(console)
    logger = logging.getLogger("gleanrl")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(file)
    logger.addHandler(shown)
    try:
        yield
    finally:
        logger.removeHandler(shown)
        logger.removeHandler(file)
        file.close()
        logger.setLevel(level)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Progress) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        self._console.print(prefix + record.getMessage())


@contextmanager
def handle_signals(run: Interruptible, console: Progress) -> Iterator[None]:
    """Handle SIGINT (Ctrl-C) and SIGTERM while the block runs. Must be called from a task of a running event loop.

    The first signal makes the run end after the present step, and save a checkpoint. The second signal cancels the
    task that entered the block; `_GRACE_S` later the process exits with status 130 if it still runs. The process also
    exits if an environment or a reward keeps the event loop from handling the first signal for `_BLOCKED_S`. The last
    checkpoint then stands.
    """
    loop, current = asyncio.get_running_loop(), asyncio.current_task()

    def stop() -> None:
        if run.interrupted and current is not None:
            current.cancel()
            return
        console.print("stopping: the step under way is finished and saved; press Ctrl-C again to stop at once")
        run.interrupt()

    def watch() -> None:
        """Let the event loop handle the signals. Runs in a thread, because an environment may block the loop."""
        signals, received = select.poll(), 0
        signals.register(reader, select.POLLIN)
        while True:
            if signals.poll(None if not received or run.interrupted else 1000 * _BLOCKED_S):
                number = os.read(reader, 1)[0]
                if not number:  # the block has ended
                    return
                if number not in handlers:
                    continue
                received += 1
                loop.call_soon_threadsafe(stop)
                if received > 1:
                    # A cancellation takes effect only at an `await`. An update of the model may run for long without.
                    end = threading.Timer(_GRACE_S, os._exit, (STATUS_INTERRUPTED,))
                    end.daemon = True
                    end.start()
                continue
            # The learner may need the loop for longer, and then handles the signal.
            frames = list(traceback.walk_stack(sys._current_frames()[threading.main_thread().ident or 0]))
            for room, cure in _CURES.items():
                folder = f"{Path(gleanrl.__file__).parent / room}{os.sep}"
                if not run.interrupted and any(frame.f_code.co_filename.startswith(folder) for frame, _ in frames):
                    blocked = f"the run has waited {_BLOCKED_S:g} s for code that blocks it{own_line(frames)}"
                    console.print(f"stopped: {blocked}; {cure}; --resume continues from the last checkpoint")
                    os._exit(STATUS_INTERRUPTED)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # The handlers do nothing. Python writes the number of each signal that has a handler to ``writer``.
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    before = signal.set_wakeup_fd(writer)
    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.write(writer, b"\0")
        watcher.join()
        os.close(writer)
        os.close(reader)
