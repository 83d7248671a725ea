"""The few calls to the Linux kernel that Python's library lacks. Each raises OSError, with the call's name."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_KEEPCAPS = 1, 38, 22, 8
_CAPABILITIES_V3 = 0x20080522
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # alike on all architectures
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_library = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _system_call(name: str, number: int, *arguments: object) -> int:
    return _checked(_library.syscall(ctypes.c_long(number), *arguments), name)


def unshare(flags: int) -> None:
    _checked(_library.unshare(ctypes.c_int(flags)), "unshare")


def set_namespace(descriptor: int, kind: int) -> None:
    _checked(_library.setns(ctypes.c_int(descriptor), ctypes.c_int(kind)), "setns")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    done = _library.mount(*encoded, ctypes.c_ulong(flags), options.encode() if options else None)
    _checked(done, f"mount {target}")


def unmount(target: str) -> None:
    _checked(_library.umount2(target.encode(), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _system_call("pivot_root", _PIVOT_ROOT[platform.machine()], new.encode(), old.encode())


def die_with_parent(signal: int) -> None:
    """Be sent ``signal`` when the parent ends. A change of credentials undoes it."""
    _checked(_library.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal), 0, 0, 0), "prctl PDEATHSIG")


def no_new_privileges() -> None:
    _checked(_library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl NO_NEW_PRIVS")


def drop_capabilities() -> None:
    header = struct.pack("<Ii", _CAPABILITIES_V3, 0)
    _checked(_library.capset(header, bytes(24)), "capset")


def filter_calls(program: bytes) -> None:
    """Load a seccomp filter: instructions of 8 bytes each."""
    instructions = ctypes.create_string_buffer(program, len(program))
    description = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    _checked(_library.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(description), 0, 0), "prctl SECCOMP")


# --- Landlock ---------------------------------------------------------------------------------------------------------
def landlock_version() -> int:
    """0 where the kernel has none."""
    return max(0, _library.syscall(ctypes.c_long(_LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint(1)))


_READ = 1 << 2 | 1 << 3  # files, folders
_EXECUTE, _WRITE_FILE, _TRUNCATE = 1 << 0, 1 << 1, 1 << 14
_ALL = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}  # from 5 on (1 << 16) - 1


def landlock(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Nothing of the file system for this process from now on, but what is given; no TCP; nobody else's signals.

    Folders in ``readable`` can be read, folders in ``writable`` do whatever; files likewise.
    """
    version = landlock_version()
    everything = _ALL.get(version, (1 << 16) - 1)
    ruleset = struct.pack("<QQQ", everything, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _system_call("landlock", _LANDLOCK_CREATE, ruleset, ctypes.c_size_t(size), ctypes.c_uint(0))
    try:
        for path, access in [*((p, _READ | _EXECUTE) for p in readable), *((p, everything) for p in writable)]:
            if not os.path.isdir(path):
                access &= _READ ^ 1 << 3 | _EXECUTE | _WRITE_FILE | _TRUNCATE
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = struct.pack("<Qi", access & everything, descriptor)
                _system_call(
                    f"landlock {path}", _LANDLOCK_ADD, ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint(0)
                )
            finally:
                os.close(descriptor)
        _system_call("landlock", _LANDLOCK_RESTRICT, ctypes.c_int(rules), ctypes.c_uint(0))
    finally:
        os.close(rules)
