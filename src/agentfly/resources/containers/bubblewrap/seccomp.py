"""The system-call filter of a sandbox: a small program that the kernel runs at every call of every process inside.

Namespaces, dropped capabilities and a private root already make most of these calls fail. The filter is what stands
when one of those fences has a hole: some parts of the kernel, such as its keyrings, belong to no namespace at all, and
others have a long record of faults and no use to a program in a sandbox.

The program is classic BPF as seccomp(2) reads it. bubblewrap loads it as its last act before it executes the shell, so
its own mounting is not filtered.
"""

from __future__ import annotations

import errno
import struct
import sys
from collections.abc import Iterable
from functools import cache

# linux/audit.h; both are 64-bit and little-endian
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# what is refused, with its number on x86_64 and on aarch64
_REFUSED: dict[str, tuple[int, int | None]] = {
    # keyrings: what is looked up there may be the host's
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # programs, samples and page faults inside the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    # calls that no filter sees, sockets among them
    "io_uring_setup": (425, 425),
    # mounts
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # namespaces; `clone` is looked at by its flags
    "setns": (308, 268),
    "unshare": (272, 97),
    # files by their inode, which sees past mounts
    "open_by_handle_at": (304, 265),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "iopl": (172, None),
    "ioperm": (173, None),
}
# what is refused too where there are no namespaces of network and of IPC to see to it
_WITHOUT_NAMESPACES: dict[str, tuple[int, int]] = {
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
_WITHOUT_NETWORK: dict[str, tuple[int, int]] = {"socket": (41, 198)}
# the kinds of sockets that there are: AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK. Of the rest, some belong to no network
# namespace, such as those to other virtual machines and to the one that this is a guest of (AF_VSOCK)
_FAMILIES = (1, 2, 10, 16)
_SOCKET = {"x86_64": 41, "aarch64": 198}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_X32 = 0x40000000  # set in the number of a call by the x32 ABI, whose calls have a table of their own
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _REFUSE, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000


@cache
def filter_program(machine: str, *, namespaces: bool = True, network: bool = True) -> bytes | None:
    """The filter for a machine, as `platform.machine` names it; None if there is none for it.

    Args:
        machine: the machine.
        namespaces: whether the processes have namespaces of their own; without them more is refused.
        network: whether they may make sockets; where they are in namespaces, those see to that.

    Refused calls fail with EPERM, and sockets of families that are not among `_FAMILIES` with EAFNOSUPPORT. `clone3`
    and calls of the x32 ABI fail with ENOSYS, as on a kernel without them: then the C library makes its threads with
    `clone`, whose flags a filter can see. A process that calls the kernel in the way of another architecture, which has
    other numbers, is killed.
    """
    if machine not in _ARCHITECTURES or sys.maxsize < 2**32:
        return None
    x86 = machine == "x86_64"
    rows: list[tuple[int, int | None]] = [*_REFUSED.values()]
    rows += [] if namespaces else _WITHOUT_NAMESPACES.values()
    rows += [] if network else _WITHOUT_NETWORK.values()
    numbers = [row[0] if x86 else row[1] for row in rows]
    refused = [number for number in numbers if number is not None]
    return _assembled(_ARCHITECTURES[machine], refused, _CLONE[machine], _SOCKET[machine], x32=x86)


def _assembled(architecture: int, refused: Iterable[int], clone: int, socket: int, *, x32: bool) -> bytes:
    """The program: comparisons that jump, by the kind of answer, to one of the instructions at the end."""
    tests = [(_IF_AT_LEAST, _X32, "absent")] if x32 else []
    tests += [(_IF_EQUAL, _CLONE3, "absent"), (_IF_EQUAL, clone, "clone")]
    tests += [(_IF_EQUAL, number, "refuse") for number in refused] + [(_IF_EQUAL, socket, "socket")]
    end = [
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),  # the flags of clone, all of them in the lower half
        (_IF_ANY_BIT, 1, 0, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE | errno.EPERM),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),  # the family
        *((_IF_EQUAL, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)),
        (_RETURN, 0, 0, _REFUSE | errno.EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]
    places = {"clone": 1, "refuse": 4, "absent": 5, "socket": 6}
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for index, (code, value, answer) in enumerate(tests):
        tests_left = len(tests) - index - 1
        program.append((code, tests_left + places[answer], 0, value))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program + end)
