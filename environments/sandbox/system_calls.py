"""The module builds the filter of system calls (seccomp) for code in the sandbox, as a BPF program.

Namespaces hide what is outside; the filter blocks calls by which code could bypass them, make new ones, or allocate
memory that is charged to no process. Calls that are not named here are allowed, except calls newer than `LAST_KNOWN`.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Callable, Iterator

LAST_KNOWN = 462
"""mseal, of Linux 6.10; later calls fail with ENOSYS."""

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

# The number of each call on x86_64 and on aarch64; None where the call does not exist.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # No socket at all: a network namespace covers neither path sockets nor vsock.
    "socket": (41, 198),
    # Other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # Namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Large parts of the kernel that calculations never need
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    # Memory that is charged to no process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}

_SOCKETPAIR, _CLONE, _CLONE3, _MMAP = (53, 199), (56, 220), (435, 435), (9, 222)

_AF_UNIX, _SOCK_STREAM, _SOCKET_TYPES = 1, 1, 0xF

_NEW_NAMESPACES = 0x7E020000
_SHARED_ANONYMOUS = 0x21

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06

_IF_EQUAL, _IF_GREATER = 0x15, 0x25

_NUMBER, _ARCHITECTURE = 0, 4

_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000

Instruction = tuple[int, int, int, int]


class FilterUnknown(OSError):
    """The system call numbers of this kind of machine are not known here."""


def program(machine: str | None = None, *, shared_memory: bool = False) -> bytes:
    """Return the filter in the kernel's binary form; `shared_memory` allows anonymous shared mappings."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise FilterUnknown(errno.ENOSYS, f"no filter of system calls is known for {machine}")
    column, architecture = _ARCHITECTURES[machine]
    filters = [*_by_number(column, architecture), *_by_argument(column, shared_memory=shared_memory)]
    return b"".join(struct.pack("=HBBI", *each) for each in [*filters, (_RETURN, 0, 0, _ALLOW)])


def install(compiled: bytes) -> None:
    """Apply the filter to this process and all that it starts; it cannot be removed."""
    pr_set_no_new_privs, pr_set_seccomp, filter_mode = 38, 22, 2
    libc = ctypes.CDLL(None, use_errno=True)
    instructions = ctypes.create_string_buffer(compiled, len(compiled))
    argument = ctypes.create_string_buffer(struct.pack("@HP", len(compiled) // 8, ctypes.addressof(instructions)))
    prctl: Callable[..., int] = libc.prctl
    for option, first, second in (
        (pr_set_no_new_privs, ctypes.c_ulong(1), ctypes.c_ulong(0)),
        (pr_set_seccomp, ctypes.c_ulong(filter_mode), argument),
    ):
        if prctl(option, first, second, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
            raise OSError(ctypes.get_errno(), "the filter of system calls cannot be set")


def _by_number(column: int, architecture: int) -> Iterator[Instruction]:
    yield (_LOAD, 0, 0, _ARCHITECTURE)
    yield (_IF_EQUAL, 1, 0, architecture)
    yield _RETURN, 0, 0, _KILL
    yield (_LOAD, 0, 0, _NUMBER)
    # This also blocks the x32 calls, whose numbers are above `LAST_KNOWN`.
    yield from _answer((_IF_GREATER, 0, 1, LAST_KNOWN), errno.ENOSYS)
    # libc falls back to clone, whose flags the filter can read; clone3 passes them in memory.
    yield from _answer((_IF_EQUAL, 0, 1, _CLONE3[column]), errno.ENOSYS)
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            yield from _answer((_IF_EQUAL, 0, 1, number), errno.EPERM)


def _by_argument(column: int, *, shared_memory: bool) -> Iterator[Instruction]:
    """Yield the checks of calls denied with some arguments only; each block ends in a verdict or is skipped."""
    yield from _denied_unless_zero(_CLONE[column], 0, _NEW_NAMESPACES)
    if not shared_memory:
        yield (_IF_EQUAL, 0, 5, _MMAP[column])
        yield (_LOAD, 0, 0, _argument(3))
        yield (_AND, 0, 0, _SHARED_ANONYMOUS)
        yield from _answer((_IF_EQUAL, 0, 1, _SHARED_ANONYMOUS), errno.EPERM)
        yield _RETURN, 0, 0, _ALLOW
    # Datagram sockets of a pair could send elsewhere; asyncio and multiprocessing use stream sockets.
    yield (_IF_EQUAL, 0, 8, _SOCKETPAIR[column])
    yield (_LOAD, 0, 0, _argument(0))
    yield (_IF_EQUAL, 1, 0, _AF_UNIX)
    yield _RETURN, 0, 0, _ERROR | errno.EPERM
    yield (_LOAD, 0, 0, _argument(1))
    yield (_AND, 0, 0, _SOCKET_TYPES)
    yield (_IF_EQUAL, 1, 0, _SOCK_STREAM)
    yield _RETURN, 0, 0, _ERROR | errno.EPERM
    yield _RETURN, 0, 0, _ALLOW


def _denied_unless_zero(number: int, argument: int, mask: int) -> Iterator[Instruction]:
    yield (_IF_EQUAL, 0, 5, number)
    yield (_LOAD, 0, 0, _argument(argument))
    yield (_AND, 0, 0, mask)
    yield (_IF_EQUAL, 1, 0, 0)
    yield _RETURN, 0, 0, _ERROR | errno.EPERM
    yield _RETURN, 0, 0, _ALLOW


def _answer(condition: Instruction, error: int) -> Iterator[Instruction]:
    """Make the call fail with `error` where `condition` holds."""
    yield condition
    yield _RETURN, 0, 0, _ERROR | error


def _argument(index: int) -> int:
    """Return the offset of an argument's lower half; both machines are little-endian."""
    return 16 + 8 * index
