"""How much memory of this machine a process can still use."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def available_memory() -> int | None:
    """Return the bytes that the system can free for a new process, or that the limit of the container leaves.

    The result is None if this is not known.
    """
    free = None
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        group = Path("/sys/fs/cgroup")
        counted = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(counted["inactive_file"])
        free = min(free, int((group / "memory.max").read_text()) - used)  # a ValueError if there is no limit: "max"
    return free
