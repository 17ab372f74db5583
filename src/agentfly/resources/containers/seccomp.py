"""The seccomp filter of sandboxes: a classic BPF program (seccomp(2)) that the kernel runs at every system call inside.

Namespaces, dropped capabilities and a private root already make most of these calls fail. The filter is the second line
of defence. Some parts of the kernel, such as keyrings, belong to no namespace; others have a long record of faults and
no use in a sandbox. The filter also keeps processes of one user from each other, and from process 1, whose settings
decide when a sandbox ends.

bubblewrap loads it last, before it executes the shell, so bubblewrap's own mounts are not filtered.
"""

from __future__ import annotations

import errno
import struct
import sys
from dataclasses import dataclass
from functools import cache
from typing import Literal

LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_ABOVE, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
NUMBER, ARCHITECTURE = 0, 4
"""Offsets in struct seccomp_data."""

ALLOW, REFUSE, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
"""Answers; an error number is added to that which refuses."""


def argument(index: int) -> int:
    """The offset of the lower half of an argument; the upper half comes four bytes later (little-endian)."""
    return 16 + 8 * index


@dataclass(frozen=True)
class BpfInstruction:
    """An instruction with symbolic jump targets.

    Args:
        code: the operation.
        value: what it compares with, loads from, or returns.
        if_true: the label to jump to if a comparison holds; empty for the next instruction.
        if_false: the same if it does not hold.
        label: its own label; empty if nothing jumps here.
    """

    code: int
    value: int
    if_true: str = ""
    if_false: str = ""
    label: str = ""


def assemble(program: list[BpfInstruction]) -> bytes:
    """The program in the kernel's binary format.

    Raises:
        ValueError: a jump leads backwards or further than 255 instructions, the maximum.
    """
    places = {instruction.label: at for at, instruction in enumerate(program) if instruction.label}

    def distance(at: int, place: str) -> int:
        far = places[place] - at - 1 if place else 0
        if not 0 <= far < 256:
            raise ValueError(f"no instruction can jump by {far}, to {place}")
        return far

    return b"".join(
        struct.pack("=HBBI", one.code, distance(at, one.if_true), distance(at, one.if_false), one.value)
        for at, one in enumerate(program)
    )


# linux/audit.h; both are 64-bit and little-endian
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # set in the number of a call by the x32 ABI, whose calls have a table of their own
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET
# AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK. Of the other families some belong to no network namespace, such as those of
# sockets to other virtual machines and to the one that this is a guest of (AF_VSOCK)
_FAMILIES = (1, 2, 10, 16)
_SMALL_SEGMENT = 4096  # bytes of System V's shared memory; databases take that much to detect a second instance
_ITSELF = 0  # the process id by which a process names itself
_FIRST = 1  # the id of process 1 in a PID namespace

SyscallNumbers = tuple[int, int | None]
"""A call's number on x86_64 and on aarch64."""


@dataclass(frozen=True)
class ArgumentCheck:
    """Refuses a call because of one of its arguments.

    Args:
        argument: its index, from 0.
        relation: refuse the call if the argument is one of the values, none of them, above the one value, or has any of
            its bits.
        values: the values; 32 bits each, as the argument.
        error: the errno with which the call then fails.
    """

    argument: int
    relation: Literal["is", "is not", "above", "has"]
    values: tuple[int, ...]
    error: int = errno.EPERM


# refused, with EPERM
_REFUSED: dict[str, SyscallNumbers] = {
    # keyrings: a lookup may find the host's keys
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # programs, samples and page faults inside the kernel, and its log
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "syslog": (103, 116),
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
    # files by inode, which bypasses mounts
    "open_by_handle_at": (304, 265),
    # memory and files of other processes, by means that say too late which process it is
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
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
# refused too where there are no namespaces: what belongs to the IPC namespace is the host's, and found by its number
_WITHOUT_NAMESPACES: dict[str, SyscallNumbers] = {
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
}
_WITHOUT_NETWORK: dict[str, SyscallNumbers] = {"socket": (41, 198)}
# fail as on a kernel without them: the C library then uses `clone`, whose flags a filter can see
_UNIMPLEMENTED: dict[str, SyscallNumbers] = {"clone3": (435, 435)}
# as well where memory is not accounted by a control group: memory that is in no process, where no look finds it.
# Programs use files in /dev/shm in its place
_UNACCOUNTED: dict[str, SyscallNumbers] = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "semget": (64, 190),
    "msgget": (68, 186),
}

_CHECKED: dict[str, tuple[SyscallNumbers, tuple[ArgumentCheck, ...]]] = {
    "clone": ((56, 220), (ArgumentCheck(0, "has", (_NEW_NAMESPACES,)),)),
    "socket": ((41, 198), (ArgumentCheck(0, "is not", _FAMILIES, errno.EAFNOSUPPORT),)),
    # limits of others, of which that on processor time ends them
    "prlimit64": ((302, 261), (ArgumentCheck(0, "is not", (_ITSELF,)),)),
    # of all processes of a user
    "setpriority": ((141, 140), (ArgumentCheck(0, "is", (2,)),)),
    "ioprio_set": ((251, 30), (ArgumentCheck(0, "is", (3,)),)),
}
# those of process 1, which a debugger could have do anything. Debuggers of other processes may do their work
_WITH_NAMESPACES: dict[str, tuple[SyscallNumbers, tuple[ArgumentCheck, ...]]] = {
    "ptrace": ((101, 117), (ArgumentCheck(1, "is", (_FIRST,)),)),
    "process_vm_readv": ((310, 270), (ArgumentCheck(0, "is", (_FIRST,)),)),
    "process_vm_writev": ((311, 271), (ArgumentCheck(0, "is", (_FIRST,)),)),
}
# those of anybody else, where they can be named
_OTHER_PROCESSES: dict[str, tuple[SyscallNumbers, tuple[ArgumentCheck, ...]]] = {
    "setpriority": ((141, 140), (ArgumentCheck(0, "is not", (0,)), ArgumentCheck(1, "is not", (_ITSELF,)))),
    "ioprio_set": ((251, 30), (ArgumentCheck(0, "is not", (1,)), ArgumentCheck(1, "is not", (_ITSELF,)))),
    **{
        name: (numbers, (ArgumentCheck(0, "is not", (_ITSELF,)),))
        for name, numbers in {
            "sched_setparam": (142, 118),
            "sched_setscheduler": (144, 119),
            "sched_setaffinity": (203, 122),
            "sched_setattr": (314, 274),
            "migrate_pages": (256, 238),
            "move_pages": (279, 239),
            "get_robust_list": (274, 100),
        }.items()
    },
}
_SMALL_SEGMENTS: dict[str, tuple[SyscallNumbers, tuple[ArgumentCheck, ...]]] = {
    "shmget": ((29, 194), (ArgumentCheck(1, "above", (_SMALL_SEGMENT,), errno.ENOSPC),))
}


@dataclass(frozen=True)
class FilterRules:
    """The answers of a filter, by system call. All other calls are allowed.

    Args:
        errors: calls that fail, with their errno.
        checks: calls that fail for some arguments.
        numbers: the numbers of all these calls.
    """

    errors: dict[str, int]
    checks: dict[str, tuple[ArgumentCheck, ...]]
    numbers: dict[str, SyscallNumbers]


def filter_rules(*, namespaces: bool, network: bool, accounted: bool) -> FilterRules:
    """Return the rules of a sandbox's filter. The arguments are those of `filter_program`."""
    refused = _REFUSED | ({} if namespaces else _WITHOUT_NAMESPACES) | ({} if network else _WITHOUT_NETWORK)
    absent = _UNIMPLEMENTED | ({} if accounted else _UNACCOUNTED)
    checked = _CHECKED | (_WITH_NAMESPACES if namespaces else _OTHER_PROCESSES) | ({} if accounted else _SMALL_SEGMENTS)
    errors = dict.fromkeys(absent, errno.ENOSYS) | dict.fromkeys(refused, errno.EPERM)
    return FilterRules(
        errors,
        {name: checks for name, (_, checks) in checked.items() if name not in errors},
        {name: numbers for name, (numbers, _) in checked.items()} | absent | refused,
    )


@cache
def filter_program(
    machine: str, *, namespaces: bool = True, network: bool = True, accounted: bool = True
) -> bytes | None:
    """The filter for a machine, as `platform.machine` names it; None if there is none for it.

    Args:
        machine: the machine.
        namespaces: whether the processes have namespaces of their own. Without them, calls that reach other processes
            of the user, or their shared memory, are refused.
        network: whether they may make sockets. In a network namespace, the namespace decides.
        accounted: whether a control group accounts for all their memory. Otherwise calls that hide memory from the
            watchdog are refused.

    A process that makes calls of another architecture is killed. Calls of the x32 ABI do not exist.
    """
    if machine not in _ARCHITECTURES or sys.maxsize < 2**32:
        return None
    asked = filter_rules(namespaces=namespaces, network=network, accounted=accounted)
    x86 = machine == "x86_64"
    numbers = {name: both[0] if x86 else both[1] for name, both in asked.numbers.items()}
    program = [
        BpfInstruction(LOAD, ARCHITECTURE),
        BpfInstruction(JUMP_IF_EQUAL, _ARCHITECTURES[machine], if_false="kill"),
        BpfInstruction(LOAD, NUMBER),
    ]
    if x86:
        program.append(BpfInstruction(JUMP_IF_AT_LEAST, _X32, if_true=_error_label(errno.ENOSYS)))
    for name, number in numbers.items():
        if number is not None:
            place = _error_label(asked.errors[name]) if name in asked.errors else name
            program.append(BpfInstruction(JUMP_IF_EQUAL, number, if_true=place))
    program.append(BpfInstruction(RETURN, ALLOW))
    for name, checks in asked.checks.items():
        program += _check_instructions(name, checks)
    program.append(BpfInstruction(RETURN, KILL_PROCESS, label="kill"))
    errors = {*asked.errors.values(), *(check.error for checks in asked.checks.values() for check in checks)}
    program += [BpfInstruction(RETURN, REFUSE | error, label=_error_label(error)) for error in sorted(errors)]
    return assemble(program)


def _error_label(error: int) -> str:
    return f"error {error}"


def _check_instructions(name: str, checks: tuple[ArgumentCheck, ...]) -> list[BpfInstruction]:
    """The instructions for a call that is refused for some arguments."""
    made: list[BpfInstruction] = []
    for check in checks:
        refused = _error_label(check.error)
        if check.relation == "above":  # a size, which has 64 bits
            made += [
                BpfInstruction(LOAD, argument(check.argument) + 4),
                BpfInstruction(JUMP_IF_ABOVE, 0, if_true=refused),
            ]
        made.append(BpfInstruction(LOAD, argument(check.argument)))
        match check.relation:
            case "is":
                made += [BpfInstruction(JUMP_IF_EQUAL, value, if_true=refused) for value in check.values]
            case "above":
                made += [BpfInstruction(JUMP_IF_ABOVE, value, if_true=refused) for value in check.values]
            case "has":
                made += [BpfInstruction(JUMP_IF_ANY_BIT, value, if_true=refused) for value in check.values]
            case "is not":
                passed = f"{name} {check.argument}"
                made += [BpfInstruction(JUMP_IF_EQUAL, value, if_true=passed) for value in check.values[:-1]]
                made += [
                    BpfInstruction(JUMP_IF_EQUAL, check.values[-1], if_false=refused),
                    BpfInstruction(JUMP_IF_AT_LEAST, 0, label=passed),  # nothing: the next check, or the end
                ]
    made.append(BpfInstruction(RETURN, ALLOW))
    first = made[0]
    return [BpfInstruction(first.code, first.value, first.if_true, first.if_false, label=name), *made[1:]]
