"""What code in a sandbox may use, and what came of running it."""

from __future__ import annotations

from dataclasses import dataclass

GRACE_S = 0.5  # after the wall time, for the code to be interrupted before its process is killed
MAX_FILES = 4096  # and folders, of a session


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one session. Raises ValueError where a number makes no sense."""

    wall_s: float = 10.0  # of one call
    cpu_s: int = 10  # of one call; a session of several cannot have more than a hundred times as much in all
    memory_mb: int = 512  # address space of a process
    disk_mb: int = 64  # of the scratch folder; where only Landlock isolates, it may be more for a tenth of a second
    processes: int = 1  # 1: nothing can be forked, and memory_mb bounds all of it
    threads: int = 16
    output_chars: int = 10_000  # what a call may print; more is dropped and counted

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)!r}: more than 0")
        if self.memory_mb < 64:
            raise ValueError(f"memory_mb = {self.memory_mb}: Python itself needs 64")


@dataclass(frozen=True, slots=True)
class Ran:
    """What a call came to. ``text`` is all of it as a model is told.

    The code runs in the process that says it, and can make it say whatever it likes. Only ``ended`` and ``seconds`` are
    seen from outside.
    """

    output: str  # what was printed, and the value of a last expression
    error: str | None = None  # a traceback, or why the process ended
    left_out: int = 0  # characters of output that were dropped
    ended: bool = False  # the process is gone: a persistent session begins anew, without its variables
    seconds: float = 0.0

    @property
    def text(self) -> str:
        dropped = f"\n[{self.left_out} more characters left out]" if self.left_out else ""
        said = self.output + dropped
        if self.error is None:
            return said if said.strip() else "(no output)"
        return f"{said.rstrip()}\n{self.error}" if said.strip() else self.error
