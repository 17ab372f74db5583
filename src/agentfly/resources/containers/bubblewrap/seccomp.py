"""The system-call filter of a sandbox: a small program that the kernel runs at every call of every process inside.

Namespaces, dropped capabilities and a private root already make most of these calls fail. The filter is what stands
when one of those fences has a hole: some parts of the kernel, such as its keyrings, belong to no namespace at all, and
others have a long record of faults and no use to a program in a sandbox. It is also what keeps processes from each
other where they share their user with others, and from process 1, on whose settings the end of a sandbox rests.

bubblewrap loads it as its last act before it executes the shell, so its own mounting is not filtered.
"""

from __future__ import annotations

import errno
import sys
from dataclasses import dataclass
from functools import cache
from typing import Literal

from agentfly.resources.containers.bubblewrap.bpf import (
    ALLOW,
    ARCHITECTURE,
    JUMP_IF_ABOVE,
    JUMP_IF_ANY_BIT,
    JUMP_IF_AT_LEAST,
    JUMP_IF_EQUAL,
    KILL_PROCESS,
    LOAD,
    NUMBER,
    REFUSE,
    RETURN,
    Instruction,
    argument,
    assembled,
)

# linux/audit.h; both are 64-bit and little-endian
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # set in the number of a call by the x32 ABI, whose calls have a table of their own
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET
# AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK. Of the other families some belong to no network namespace, such as those of
# sockets to other virtual machines and to the one that this is a guest of (AF_VSOCK)
_FAMILIES = (1, 2, 10, 16)
_SMALL_SEGMENT = 4096  # bytes of System V's shared memory; databases take so much to see that they run only once
_ITSELF = 0  # what a process is to calls that take the id of one
_FIRST = 1  # the id of process 1, in a namespace of processes

Numbers = tuple[int, int | None]
"""A call's number on x86_64 and on aarch64."""


@dataclass(frozen=True)
class Check:
    """Refuses a call for what one of its arguments is.

    Args:
        argument: which one, from 0.
        relation: to the values: refused if it is one of them, if it is none of them, if it is above the one, or if it
            has any of the one's bits.
        values: what it is compared with; 32 bits each, as the argument is.
        error: the number of the error that the call then fails with.
    """

    argument: int
    relation: Literal["is", "is not", "above", "has"]
    values: tuple[int, ...]
    error: int = errno.EPERM


# refused, with EPERM
_REFUSED: dict[str, Numbers] = {
    # keyrings: what is looked up there may be the host's
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
    # files by their inode, which sees past mounts
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
_WITHOUT_NAMESPACES: dict[str, Numbers] = {
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
_WITHOUT_NETWORK: dict[str, Numbers] = {"socket": (41, 198)}
# as on a kernel without them: then the C library makes its threads with `clone`, whose flags a filter can see
_ABSENT: dict[str, Numbers] = {"clone3": (435, 435)}
# as well where memory is not accounted by a control group: memory that is in no process, where no look finds it.
# Programs use files in /dev/shm in its place
_UNACCOUNTED: dict[str, Numbers] = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "semget": (64, 190),
    "msgget": (68, 186),
}

_CHECKED: dict[str, tuple[Numbers, tuple[Check, ...]]] = {
    "clone": ((56, 220), (Check(0, "has", (_NEW_NAMESPACES,)),)),
    "socket": ((41, 198), (Check(0, "is not", _FAMILIES, errno.EAFNOSUPPORT),)),
    # limits of others, of which that on processor time ends them
    "prlimit64": ((302, 261), (Check(0, "is not", (_ITSELF,)),)),
    # of all processes of a user
    "setpriority": ((141, 140), (Check(0, "is", (2,)),)),
    "ioprio_set": ((251, 30), (Check(0, "is", (3,)),)),
}
# those of process 1, which a debugger could have do anything. Debuggers of other processes may do their work
_WITH_NAMESPACES: dict[str, tuple[Numbers, tuple[Check, ...]]] = {
    "ptrace": ((101, 117), (Check(1, "is", (_FIRST,)),)),
    "process_vm_readv": ((310, 270), (Check(0, "is", (_FIRST,)),)),
    "process_vm_writev": ((311, 271), (Check(0, "is", (_FIRST,)),)),
}
# those of anybody else, where they can be named
_APART: dict[str, tuple[Numbers, tuple[Check, ...]]] = {
    "setpriority": ((141, 140), (Check(0, "is not", (0,)), Check(1, "is not", (_ITSELF,)))),
    "ioprio_set": ((251, 30), (Check(0, "is not", (1,)), Check(1, "is not", (_ITSELF,)))),
    **{
        name: (numbers, (Check(0, "is not", (_ITSELF,)),))
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
_SMALL: dict[str, tuple[Numbers, tuple[Check, ...]]] = {
    "shmget": ((29, 194), (Check(1, "above", (_SMALL_SEGMENT,), errno.ENOSPC),))
}


@dataclass(frozen=True)
class Rules:
    """What a filter answers, by the names of calls; all others are allowed.

    Args:
        errors: calls that fail, with the number of the error.
        checks: calls that fail for what they ask.
        numbers: of all these.
    """

    errors: dict[str, int]
    checks: dict[str, tuple[Check, ...]]
    numbers: dict[str, Numbers]


def rules(*, namespaces: bool, network: bool, accounted: bool) -> Rules:
    """What the filter of a sandbox answers. The arguments are those of `filter_program`."""
    refused = _REFUSED | ({} if namespaces else _WITHOUT_NAMESPACES) | ({} if network else _WITHOUT_NETWORK)
    absent = _ABSENT | ({} if accounted else _UNACCOUNTED)
    checked = _CHECKED | (_WITH_NAMESPACES if namespaces else _APART) | ({} if accounted else _SMALL)
    errors = dict.fromkeys(absent, errno.ENOSYS) | dict.fromkeys(refused, errno.EPERM)
    return Rules(
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
        namespaces: whether the processes have namespaces of their own; without them, what reaches other processes of
            the user, or the memory they share, is refused.
        network: whether they may make sockets; where they are in namespaces, those see to that.
        accounted: whether a control group accounts for all their memory; without one, they get none that is not found
            by looking at processes and files.

    A process that calls the kernel in the way of another architecture, which has other numbers, is killed; calls of the
    x32 ABI do not exist.
    """
    if machine not in _ARCHITECTURES or sys.maxsize < 2**32:
        return None
    asked = rules(namespaces=namespaces, network=network, accounted=accounted)
    x86 = machine == "x86_64"
    numbers = {name: both[0] if x86 else both[1] for name, both in asked.numbers.items()}
    program = [
        Instruction(LOAD, ARCHITECTURE),
        Instruction(JUMP_IF_EQUAL, _ARCHITECTURES[machine], otherwise="kill"),
        Instruction(LOAD, NUMBER),
    ]
    if x86:
        program.append(Instruction(JUMP_IF_AT_LEAST, _X32, then=_failing(errno.ENOSYS)))
    for name, number in numbers.items():
        if number is not None:
            place = _failing(asked.errors[name]) if name in asked.errors else name
            program.append(Instruction(JUMP_IF_EQUAL, number, then=place))
    program.append(Instruction(RETURN, ALLOW))
    for name, checks in asked.checks.items():
        program += _checking(name, checks)
    program.append(Instruction(RETURN, KILL_PROCESS, place="kill"))
    errors = {*asked.errors.values(), *(check.error for checks in asked.checks.values() for check in checks)}
    program += [Instruction(RETURN, REFUSE | error, place=_failing(error)) for error in sorted(errors)]
    return assembled(program)


def _failing(error: int) -> str:
    return f"error {error}"


def _checking(name: str, checks: tuple[Check, ...]) -> list[Instruction]:
    """The instructions for a call that is refused for what it asks."""
    made: list[Instruction] = []
    for check in checks:
        refused = _failing(check.error)
        if check.relation == "above":  # a size, which has 64 bits
            made += [
                Instruction(LOAD, argument(check.argument) + 4),
                Instruction(JUMP_IF_ABOVE, 0, then=refused),
            ]
        made.append(Instruction(LOAD, argument(check.argument)))
        match check.relation:
            case "is":
                made += [Instruction(JUMP_IF_EQUAL, value, then=refused) for value in check.values]
            case "above":
                made += [Instruction(JUMP_IF_ABOVE, value, then=refused) for value in check.values]
            case "has":
                made += [Instruction(JUMP_IF_ANY_BIT, value, then=refused) for value in check.values]
            case "is not":
                passed = f"{name} {check.argument}"
                made += [Instruction(JUMP_IF_EQUAL, value, then=passed) for value in check.values[:-1]]
                made += [
                    Instruction(JUMP_IF_EQUAL, check.values[-1], otherwise=refused),
                    Instruction(JUMP_IF_AT_LEAST, 0, place=passed),  # nothing: the next check, or the end
                ]
    made.append(Instruction(RETURN, ALLOW))
    first = made[0]
    return [Instruction(first.code, first.value, first.then, first.otherwise, place=name), *made[1:]]
