"""The walls of a sandbox: what the server puts around itself once, and what each session adds.

``namespaces``: a root of its own that holds Python's library and nothing else, no network, no other process.
``landlock``: the same root and processes as anybody, out of reach. ``none``: no walls, only limits.
"""

from __future__ import annotations

import os
import resource
import signal
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from gleanrl.environments.tools.sandbox import kernel, seccomp
from gleanrl.environments.tools.sandbox.limits import Limits

SCRATCH = "/scratch"  # inside; /tmp is the same
_MB = 1 << 20
_OUTSIDE = 65534  # the user that sessions of root's are, as seen from outside
_INSIDE = 1000
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_FILES = ("/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_MOUNT_POINTS = ("/sys", "/srv", "/mnt", "/media")  # of the new root, for a moment


class Jail(Protocol):
    @property
    def scratch_outside(self) -> bool:
        """Whether a session is given a folder, of which nothing bounds what lies in it."""
        ...

    def enter(self) -> None:
        """Called by the server before it serves; may return in another process."""
        ...

    def fork(self) -> int:
        """`os.fork`, for a session."""
        ...

    def confine(self, limits: Limits, calls: int, scratch: str) -> None:
        """Called by a session's process before it runs any code. Raises OSError where a wall cannot be had."""
        ...


def jail(isolation: str, packages: Sequence[str]) -> Jail:
    """Raises OSError where the machine has no such walls at all."""
    if isolation == "none":
        return NoJail()
    if not seccomp.known():
        raise OSError(f"no filter of system calls for {os.uname().machine}")
    readable = _readable(packages)
    return Namespaces(readable) if isolation == "namespaces" else Landlock(readable)


class NoJail:
    """A process of its own with limits, and no walls."""

    scratch_outside = True

    def enter(self) -> None:
        pass

    def fork(self) -> int:
        return os.fork()

    def confine(self, limits: Limits, calls: int, scratch: str) -> None:
        os.setsid()
        _settle(scratch)
        kernel.die_with_parent(signal.SIGKILL)
        _limit(limits, calls)


class Landlock:
    """Sessions lose the rights to files, sockets, signals and forks."""

    scratch_outside = True

    def __init__(self, readable: Sequence[str]) -> None:
        if (version := kernel.landlock_version()) < 3:  # 3: truncating a file
            raise OSError(f"Landlock: version {version} of 3" if version else "the kernel has no Landlock")
        self._readable = [path for path in (*readable, *_FILES) if os.path.exists(path)]

    def enter(self) -> None:
        pass

    def fork(self) -> int:
        return os.fork()

    def confine(self, limits: Limits, calls: int, scratch: str) -> None:
        if limits.processes > 1:
            raise OSError("processes = 1 is the most that Landlock can end for certain")
        os.setsid()
        _settle(scratch)
        kernel.no_new_privileges()
        kernel.landlock(self._readable, [scratch, "/dev/null"])
        kernel.drop_capabilities()
        kernel.die_with_parent(signal.SIGKILL)
        _limit(limits, calls)
        kernel.filter_calls(seccomp.program(forks=False, alone=os.getpid()))


class Namespaces:
    """The server has a root, users, processes and a network of its own; each session processes and a scratch folder."""

    scratch_outside = False

    def __init__(self, readable: Sequence[str]) -> None:
        self._readable = readable
        self._processes = -1  # the server's own namespace of processes
        self._many_users = False

    def enter(self) -> None:
        """Returns in the first process of the new namespace; the one that called waits for it and ends as it does."""
        users, user, group = _mapper(), os.geteuid(), os.getegid()
        kernel.unshare(
            kernel.NEWUSER | kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS
        )  # fmt: skip
        self._many_users = users is not None and users()
        if not self._many_users:
            try:
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"0 {user} 1")
                Path("/proc/self/gid_map").write_text(f"0 {group} 1")
            except OSError as error:
                raise OSError(error.errno, f"map of users: {error.strerror}") from error
        first = os.fork()
        if first:
            _end_as(first)
        kernel.die_with_parent(signal.SIGKILL)
        os.setsid()
        self._make_root()
        self._processes = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._change_root()

    def fork(self) -> int:
        kernel.unshare(kernel.NEWPID)  # of the next child
        child = -1
        try:
            child = os.fork()
        finally:
            if child:
                kernel.set_namespace(self._processes, kernel.NEWPID)
        return child

    def confine(self, limits: Limits, calls: int, scratch: str) -> None:
        if limits.processes > 1 and not self._many_users and _is_outer_root():
            raise OSError("processes = 1 is the most where root cannot become another user")
        os.setsid()
        kernel.unshare(kernel.NEWNS)
        flags = kernel.NOSUID | kernel.NODEV | kernel.NOEXEC
        kernel.mount("scratch", SCRATCH, "tmpfs", flags, f"size={limits.disk_mb}m,nr_inodes=4096,mode=0777")
        _settle(SCRATCH)
        if self._many_users:
            os.setgroups([])
            os.setresgid(_INSIDE, _INSIDE, _INSIDE)
            os.setresuid(_INSIDE, _INSIDE, _INSIDE)
        kernel.unshare(kernel.NEWUSER)  # processes are counted by namespace: each session has its own count
        kernel.drop_capabilities()
        kernel.no_new_privileges()
        kernel.die_with_parent(signal.SIGKILL)
        _limit(limits, calls)
        _limit_processes(limits)
        kernel.filter_calls(seccomp.program(forks=limits.processes > 1, alone=None))

    def _make_root(self) -> None:
        """A file system in memory with what is readable, at a folder that hides none of it."""
        kernel.mount(None, "/", None, kernel.REC | kernel.PRIVATE)
        root = next(p for p in _MOUNT_POINTS if os.path.isdir(p) and not any(r.startswith(p) for r in self._readable))
        kernel.mount("root", root, "tmpfs", kernel.NOSUID | kernel.NODEV, "size=1m,mode=0755")
        self._root = root
        for path in (*self._readable, *_FILES):
            if not os.path.exists(path):
                continue
            inside = root + path
            if os.path.isdir(path):
                os.makedirs(inside, exist_ok=True)
            else:
                os.makedirs(os.path.dirname(inside), exist_ok=True)
                os.close(os.open(inside, os.O_CREAT | os.O_WRONLY))
            kernel.mount(path, inside, None, kernel.BIND)  # of a folder, not what is mounted inside it
            _make_read_only(inside)
        os.mkdir(root + SCRATCH)
        if not os.path.exists(root + "/tmp"):  # unless a package lies there
            os.symlink(SCRATCH, root + "/tmp")

    def _change_root(self) -> None:
        os.chdir(self._root)
        kernel.pivot_root(".", ".")
        kernel.unmount(".")
        os.chdir("/")
        kernel.mount(None, "/", None, kernel.REMOUNT | kernel.BIND | kernel.RDONLY | kernel.NOSUID | kernel.NODEV)


def _readable(packages: Sequence[str]) -> list[str]:
    """Folders that Python needs; none inside another."""
    base = os.path.join(sys.base_prefix, "lib")
    own = [base] if sys.base_prefix not in ("/usr", "/") else []
    found: list[str] = []
    for path in sorted({*own, *_LIBRARIES, *packages, "/usr/share/zoneinfo"}, key=len):
        if os.path.isdir(path) and not any(path.startswith(outer + "/") for outer in found):
            found.append(path)
    return found


def _make_read_only(path: str) -> None:
    """Keeps the flags that the mount has, for the kernel refuses to take them away."""
    held = os.statvfs(path).f_flag
    kept = {os.ST_NOSUID: kernel.NOSUID, os.ST_NODEV: kernel.NODEV, os.ST_NOEXEC: kernel.NOEXEC, os.ST_NOATIME: 1024,
            os.ST_NODIRATIME: 2048, os.ST_RELATIME: 1 << 21}  # fmt: skip
    flags = sum(flag for given, flag in kept.items() if held & given)
    if not stat.S_ISCHR(os.stat(path).st_mode):
        flags |= kernel.NODEV
    kernel.mount(None, path, None, kernel.REMOUNT | kernel.BIND | kernel.RDONLY | kernel.NOSUID | flags)


def _settle(scratch: str) -> None:
    """In the one folder that can be written to."""
    os.chdir(scratch)
    os.environ.update(HOME=scratch, TMPDIR=scratch)


def _limit(limits: Limits, calls: int) -> None:
    longest = limits.cpu_s * calls + 1
    megabytes = {resource.RLIMIT_AS: limits.memory_mb, resource.RLIMIT_FSIZE: limits.disk_mb}
    bounds = {kind: (size * _MB, size * _MB) for kind, size in megabytes.items()}
    bounds |= {
        resource.RLIMIT_CPU: (longest, longest),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_SIGPENDING: (1024, 1024),
    }
    for kind, (soft, hard) in bounds.items():
        _, most = resource.getrlimit(kind)
        most = hard if most == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (min(soft, most), most))


def _limit_processes(limits: Limits) -> None:
    """Only where nobody else's are counted with them."""
    most = limits.processes + limits.threads
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def _mapper() -> Callable[[], bool] | None:
    """For root: what maps a second user into the namespace that this process makes next; says whether it could."""
    if os.geteuid() != 0:
        return None
    reader, writer = os.pipe()
    answer, answered = os.pipe()
    parent = os.getpid()
    helper = os.fork()
    if helper == 0:
        os.close(writer)
        os.read(reader, 1)
        done = b"0"
        try:
            for kind in ("uid", "gid"):
                Path(f"/proc/{parent}/{kind}_map").write_text(f"0 0 1\n{_INSIDE} {_OUTSIDE} 1\n")
            done = b"1"
        except OSError:
            pass
        os.write(answered, done)
        os._exit(0)

    def mapped() -> bool:
        os.write(writer, b"1")
        said = os.read(answer, 1)
        os.waitpid(helper, 0)
        for descriptor in (reader, writer, answer, answered):
            os.close(descriptor)
        return said == b"1"

    return mapped


def _is_outer_root() -> bool:
    """Root of the machine is never refused a process, whatever the limit."""
    return _outer_root


_outer_root = os.geteuid() == 0  # when this is imported, nothing has been entered


def _end_as(child: int) -> None:
    """Wait for the child and end with its status, without Python's own end."""
    os.closerange(3, 1 << 12)
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
