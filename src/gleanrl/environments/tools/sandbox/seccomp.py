"""Which system calls code in a sandbox cannot make, as a program for the kernel's filter.

A list of what is refused, not of what is allowed: the C library and numpy may use any harmless call of a newer kernel.
It is the second wall. The first are namespaces, or Landlock.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence

# name: number on x86_64, number on aarch64 (-1: not there)
_NETWORK = {
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "bind": (49, 200), "listen": (50, 201),
    "accept4": (288, 242),
    "sendmsg": (46, 211), "sendmmsg": (307, 269),  # with which descriptors are put where no limit counts them
}  # fmt: skip
_MEMORY_OF_NOBODY = {  # which counts for no process; inotify also tells of files that Landlock hides
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semctl": (66, 191),
    "msgget": (68, 186), "msgctl": (71, 187), "mq_open": (240, 180), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "semop": (65, 193), "semtimedop": (220, 192), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "io_setup": (206, 0),
    "inotify_init": (253, -1), "inotify_init1": (294, 26), "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
}  # fmt: skip
_OTHERS = {  # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440), "migrate_pages": (256, 238), "move_pages": (279, 239), "setpriority": (141, 140),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}  # fmt: skip
_SYSTEM = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "statmount": (457, 457),
    "listmount": (458, 458), "sync": (162, 81), "syncfs": (306, 267), "unshare": (272, 97), "setns": (308, 268),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "mknod": (133, -1), "mknodat": (259, 33),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, -1),
    "ioperm": (173, -1), "modify_ldt": (154, -1), "vhangup": (153, 58), "personality": (135, 92),
    "fanotify_init": (300, 262), "lookup_dcookie": (212, 18), "execve": (59, 221), "execveat": (322, 281),
}  # fmt: skip
_METADATA = {  # of files, which Landlock does not guard
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1),
    "futimesat": (261, -1), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
_CLONE, _FORK, _VFORK, _CLONE3 = (56, 220), (57, -1), (58, -1), (435, 435)
_KILL, _TGKILL, _PRCTL, _PRLIMIT = (62, 129), (234, 131), (157, 167), (302, 261)
_SOCKETPAIR, _SENDTO, _FCNTL, _IOCTL = (53, 199), (44, 206), (72, 25), (16, 29)
_NOT_OURS = (8, 10, 15, 1024, 1026, 1036, 1038)  # of fcntl: SETOWN SETSIG SETOWN_EX SETLEASE NOTIFY SET_(FILE_)RW_HINT
_HARMLESS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # of ioctl: TCGETS TIOCGWINSZ FIONREAD FIONBIO FIO(N)CLEX

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, name in the kernel
_NAMESPACES = 0x7E020000  # the flags of clone that make some
_THREAD = 0x00010000
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 24, 40  # of what a filter sees; low halves


def known() -> bool:
    """Whether there is a filter for this machine."""
    return platform.machine() in _ARCHITECTURES


def program(*, forks: bool, alone: int | None) -> bytes:
    """The filter.

    Args:
        forks: processes may be made, though no namespaces.
        alone: own process id, where other processes can be seen: signals go to no other, and files keep their
            metadata. None: in namespaces of its own.
    """
    column, architecture = _ARCHITECTURES[platform.machine()]
    code = [_step(_LOAD, _ARCH), _step(_EQUAL, architecture, 1, 0), _step(_RETURN, _KILL_PROCESS), _step(_LOAD, _NR)]
    if column == 0:
        code += [_step(_AT_LEAST, 0x40000000, 0, 1), _refuse(errno.ENOSYS)]  # x32
    refused = {**_NETWORK, **_MEMORY_OF_NOBODY, **_OTHERS, **_SYSTEM, **(_METADATA if alone is not None else {})}
    numbers = [pair[column] for pair in refused.values()]
    for number in (number for number in numbers if number >= 0):
        code += [_step(_EQUAL, number, 0, 1), _refuse(errno.EPERM)]
    code += [_step(_EQUAL, _CLONE3[column], 0, 1), _refuse(errno.ENOSYS)]  # the C library then takes clone
    if not forks:
        for number in (_FORK[column], _VFORK[column]):
            code += [_step(_EQUAL, number, 0, 1), _refuse(errno.EAGAIN)] if number >= 0 else []
    clone, prctl, prlimit = _CLONE[column], _PRCTL[column], _PRLIMIT[column]
    if forks:
        code += _by_argument(clone, [_NAMESPACES], errno.EPERM, compare=_ANY_BIT)
    else:
        code += _by_argument(clone, [_THREAD], errno.EAGAIN, compare=_ANY_BIT, only=True)
    code += _by_argument(prctl, [1], errno.EPERM)  # outliving the server
    code += _by_argument(prlimit, [0], errno.EPERM, only=True)
    code += _by_argument(_SOCKETPAIR[column], [1], errno.EPERM, only=True)  # AF_UNIX
    code += _by_argument(_FCNTL[column], _NOT_OURS, errno.EPERM, offset=_SECOND_ARGUMENT)
    code += _by_argument(_IOCTL[column], _HARMLESS, errno.EOPNOTSUPP, offset=_SECOND_ARGUMENT, only=True)
    code += _by_argument(_SENDTO[column], [1], errno.EOPNOTSUPP, compare=_ANY_BIT, offset=_FOURTH_ARGUMENT)  # MSG_OOB
    if alone is not None:
        for call in (_KILL, _TGKILL):
            code += _by_argument(call[column], [alone], errno.EPERM, only=True)
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _by_argument(
    number: int,
    values: Sequence[int],
    error: int,
    *,
    compare: int = _EQUAL,
    offset: int = _FIRST_ARGUMENT,
    only: bool = False,
) -> list[bytes]:
    """One call is refused with these values of an argument; with ``only``, unless it has one of them."""
    found, other = (_step(_RETURN, _ALLOW), _refuse(error)) if only else (_refuse(error), _step(_RETURN, _ALLOW))
    tests = [_step(compare, value, len(values) - at, 0) for at, value in enumerate(values)]
    return [_step(_EQUAL, number, 0, len(tests) + 3), _step(_LOAD, offset), *tests, other, found]


def _refuse(error: int) -> bytes:
    return _step(_RETURN, _ERRNO | error)


def _step(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, true, false, value)
