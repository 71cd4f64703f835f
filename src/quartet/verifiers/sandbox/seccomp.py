"""System call filter of the sandbox: a seccomp program that refuses what no candidate program needs.

It refuses sockets other than AF_UNIX (AF_VSOCK belongs to no network namespace), memory that the limits do not count (memfd,
System V shared memory), namespaces, mounts, keys, and tracing. Refused calls fail with EPERM.
"""

from __future__ import annotations

import platform
import struct

# Numbers of system calls from the kernel's tables: x86_64, and the generic table of aarch64. None: the call does not exist there.
SYSTEM_CALLS: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "fanotify_init": (300, 262),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}
SOCKET, CLONE, CLONE3 = (41, 198), (56, 220), (435, 435)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables, and the number that the kernel gives the architecture (AUDIT_ARCH)."""
NEW_NAMESPACES = 0x7E020080
"""Flags of clone that create a namespace: cgroup, UTS, IPC, user, PID, network, mount and time."""

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_AF_UNIX = 1
_X32 = 0x40000000


def filter_program(machine: str = "") -> bytes:
    """Return the filter for a machine type such as x86_64, as an array of struct sock_filter; b"" if the type is unknown.

    Defaults to the type of this machine.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        return b""
    column, audit_number = ARCHITECTURES[machine]
    refused = sorted(number for numbers in SYSTEM_CALLS.values() if (number := numbers[column]) is not None)
    # A jump skips that many instructions: first if the condition holds, then if it does not.
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, audit_number),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        # The x32 calls of x86_64 have numbers that begin here.
        (_JUMP_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in refused:
        program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | _EPERM)]
    program += [
        # The flags of clone3 are in memory, where a filter cannot read. The C library then uses clone.
        (_JUMP_EQUAL, 0, 1, CLONE3[column]),
        (_RETURN, 0, 0, _ERROR | _ENOSYS),
        (_JUMP_EQUAL, 0, 3, CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_ANY_BIT, 0, 5, NEW_NAMESPACES),
        (_RETURN, 0, 0, _ERROR | _EPERM),
        (_JUMP_EQUAL, 0, 3, SOCKET[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_EQUAL, 1, 0, _AF_UNIX),
        (_RETURN, 0, 0, _ERROR | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
