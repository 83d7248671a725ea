"""Helpers of several commands: the options of a job, closed pipes, escaped text, tables and argument types."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gleanrl.utils.errors import UserError

if TYPE_CHECKING:
    import numpy.typing as npt

    from gleanrl.utils.progress import Progress

Command = Callable[[argparse.Namespace], int]

INTERRUPTED = 130  # exit status that shells use for a process ended by SIGINT (128 + 2)
RUN_HELP = "folder of a run, or its name under runs/"
_RUNTIMES = {
    "language model": {"check": "config.validate", "parts": "runtime.prepare", "run": "runtime.local"},
    "embodied": {"check": "runtime.embodied", "parts": "runtime.embodied", "run": "runtime.embodied"},
}
"""Kind of job (`JobConfig.kind`) -> names of the modules below `gleanrl` that check its configuration, that check the
parts which it names by making them, and that run it."""


def preset_names() -> list[str]:
    """Return the names of the presets. Does not import `gleanrl.config`, so that --help stays fast."""
    folder = Path(__file__).parents[1] / "config" / "presets"
    return sorted(path.stem for path in folder.glob("*.toml"))


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that runs a job: the runtime, and any settings as ``--section.key VALUE``."""
    parser.add_argument(
        "--runtime", choices=("local", "ray"), help="run in this process, or in Ray actors (sets --ray.enabled)"
    )
    parser.add_argument("--ray-address", metavar="ADDRESS", help="join this Ray cluster (sets --ray.address)")
    parser.set_defaults(takes_settings=True)
    parser.epilog = (
        "Any setting can be given as --section.key VALUE, for example --learner.lr 1e-4; `gleanrl settings` lists them."
    )


def load_config(args: argparse.Namespace, source: str) -> Any:
    """Load the configuration of a job from ``source``, a preset or a TOML file, and apply ``args.overrides``.

    The settings that --runtime and --ray-address stand for are appended to ``args.overrides`` first.
    """
    with interrupts_end_the_process():
        from gleanrl.config.loading import load_job

    if args.runtime == "local" and args.ray_address is not None:
        raise UserError("--ray-address needs --runtime ray")
    if args.runtime is not None or args.ray_address is not None:
        args.overrides.append(("ray.enabled", "false" if args.runtime == "local" else "true"))
    if args.ray_address is not None:
        args.overrides.append(("ray.address", args.ray_address))
    return load_job(source, args.overrides)


def import_runtime(config: Any, what: Literal["check", "parts", "run"]) -> Any:
    """Import and return the module that checks or runs a job of the kind and with the runtime that ``config`` selects.

    A module to "check" has the functions ``check`` and ``warnings``; one for the "parts" has ``check_parts``; one to
    "run" has ``run_training`` and ``run_evaluation``.
    """
    module = _RUNTIMES[config.kind][what]
    if module == "runtime.local" and config.ray.enabled:
        module = "runtime.ray.run"
    with interrupts_end_the_process():
        return import_module(f"gleanrl.{module}")


@contextmanager
def interrupts_end_the_process() -> Iterator[None]:
    """Make Ctrl-C end the process at once while the block imports modules.

    A KeyboardInterrupt that is raised inside the C code of an imported library may appear as an unrelated error.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        os.write(2, b"gleanrl: interrupted\n")
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def guarded(command: Command) -> Command:
    """Wrap a command that prints results.

    The command ends without an error if standard output is a pipe that is closed (``| head``). Characters that the
    encoding of standard output lacks are printed as escape sequences.
    """

    def run(args: argparse.Namespace) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        status = 0
        with quiet_pipe():
            status = command(args)
        return status

    return run


def terminal_progress() -> Progress:
    """Return a progress display on standard error if this is a terminal, and one that shows nothing otherwise.

    For commands that print results: standard error of a script then holds errors only.
    """
    from gleanrl.tracking.monitors import Console, Silent

    console = Console()
    return console if console.terminal else Silent()


@contextmanager
def quiet_pipe() -> Iterator[None]:
    """End the block without an error if standard output is a pipe whose reader has closed it."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def safe(text: str, *, lines: bool = False) -> str:
    """Escape the control characters in ``text``, except line feeds if ``lines`` is True.

    Text of stored episodes comes from models and environments. Printed unescaped, it could control the terminal.
    """
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text
    )


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    left: int = 0,
    first: Literal["left", "right"] = "right",
) -> None:
    """Print a table. Columns are aligned to the right, except the last ``left`` ones and, if chosen, the first one."""
    cells = [[str(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        aligned = [
            cell.ljust(width)
            if place >= len(headings) - left or (place == 0 and first == "left")
            else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(aligned).rstrip())


def spread(values: npt.NDArray[Any], form: str = "g") -> str:
    """Format the range and the median of values, as in "1 to 9, median 4", or one number if all values are equal."""
    import numpy as np

    low, middle, high = np.quantile(values, [0.0, 0.5, 1.0]).tolist()
    return f"{low:{form}}" if low == high else f"{low:{form}} to {high:{form}}, median {middle:{form}}"


def natural(text: str) -> int:
    """Parse an integer of at least 0 (an argparse type)."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def positive(text: str) -> int:
    """Parse an integer of at least 1 (an argparse type)."""
    if (number := natural(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return number


def port(text: str) -> int:
    """Parse the number of a port, or 0 (an argparse type)."""
    if (number := natural(text)) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port; they end at 65535")
    return number


def positive_float(text: str) -> float:
    """Parse a finite number above 0 (an argparse type)."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number
