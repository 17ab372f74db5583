"""The Linux system calls that sandboxes need and Python lacks: mounts, keyrings, dropping root.

Every function acts on the calling thread alone. So one thread can get a private view of the mounts and drop root, while
the rest of the process is unchanged.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from functools import cache
from pathlib import Path

CLONE_NEWNS = 0x20000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 1 << 18
MNT_DETACH = 2

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_IDMAP = 0x100000
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same numbers on every architecture

_PR_SET_KEEPCAPS = 8
_CAPABILITY_VERSION_3 = 0x20080522
# the capabilities that the launching thread keeps, to mount and to prepare directories of any owner
CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_SYS_ADMIN = 0, 1, 3, 21

# setgroups, setresgid, setresuid: the raw calls change one thread, the C library's wrappers change all of them
_SET_IDS = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147), "riscv64": (159, 149, 147)}

_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219}
_KEYCTL_JOIN_SESSION_KEYRING, _KEYCTL_CHOWN = 1, 4
_KEY_SPEC_SESSION_KEYRING = -3
_UNCHANGED = ctypes.c_uint(0xFFFFFFFF)
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


class _MountAttr(ctypes.Structure):
    _fields_ = [
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    ]


class _CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _CapData(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _syscall(number: int, *arguments: object, what: str) -> int:
    return _checked(_libc().syscall(ctypes.c_long(number), *arguments), what)


def unshare_mounts() -> None:
    """Give the calling thread and its children a private copy of the mounts. Needs CAP_SYS_ADMIN."""
    _checked(_libc().unshare(CLONE_NEWNS), "unshare the mounts")
    mount(None, Path("/"), None, MS_REC | MS_PRIVATE)


def mount(source: str | None, target: Path | str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system; see mount(2).

    Raises:
        OSError: the kernel refused.
    """
    _checked(
        _libc().mount(
            source.encode() if source is not None else None,
            os.fsencode(target),
            kind.encode() if kind is not None else None,
            ctypes.c_ulong(flags),
            options.encode() if options is not None else None,
        ),
        f"mount {kind or 'bind'} on {target}",
    )


def unmount(target: Path) -> None:
    """Detach a mount. It is removed once its last user has closed it. A target that is not a mount is left alone."""
    _libc().umount2(os.fsencode(target), MNT_DETACH)


def attach_idmapped(source: Path, target: Path, userns_fd: int) -> None:
    """Mount `source` at `target`, with owners mapped as in a user namespace (mount_setattr(2), Linux 5.12).

    Raises:
        OSError: the kernel or the file system of `source` does not support this.
    """
    tree = _syscall(
        _OPEN_TREE,
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(source),
        ctypes.c_uint(_OPEN_TREE_CLONE | os.O_CLOEXEC),
        what=f"open the tree {source}",
    )
    try:
        attributes = _MountAttr(attr_set=_MOUNT_ATTR_IDMAP, userns_fd=userns_fd)
        _syscall(
            _MOUNT_SETATTR,
            ctypes.c_int(tree),
            b"",
            ctypes.c_uint(_AT_EMPTY_PATH),
            ctypes.byref(attributes),
            ctypes.c_size_t(ctypes.sizeof(attributes)),
            what=f"map the owners of {source}",
        )
        _syscall(
            _MOVE_MOUNT,
            ctypes.c_int(tree),
            b"",
            ctypes.c_int(_AT_FDCWD),
            os.fsencode(target),
            ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH),
            what=f"attach {source} at {target}",
        )
    finally:
        os.close(tree)


def leave_session_keyring() -> None:
    """Give the calling thread and its children a new and empty session keyring.

    Namespaces do not isolate session keyrings. A program can read the keys in the one that it inherits, such as the
    keys of the user's login. The keyring is kept where the kernel has none, where a container's filter refuses the call
    (also to the sandbox), and beyond the user's quota (kernel.keys.maxkeys).
    """
    number = _KEYCTL.get(platform.machine())
    if number is None:
        return
    keyctl, call = _libc().syscall, ctypes.c_long(number)
    if keyctl(call, ctypes.c_int(_KEYCTL_JOIN_SESSION_KEYRING), None) >= 0:
        # a user may have 200 keys, root a million: a thread that may mount can also charge the key to root
        keyctl(call, ctypes.c_int(_KEYCTL_CHOWN), ctypes.c_int(_KEY_SPEC_SESSION_KEYRING), ctypes.c_uint(0), _UNCHANGED)


def filters_calls() -> bool:
    """Return whether the kernel supports system call filters (seccomp)."""
    # if so, it rejects the null address of this filter
    refused = _libc().prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), None, 0, 0) < 0
    return bool(refused and ctypes.get_errno() == errno.EFAULT)


def give_up_root(uid: int, keep: tuple[int, ...]) -> None:
    """Permanently make the calling thread an ordinary user, with only the capabilities in `keep`.

    Programs that the thread executes have no capability at all, because its ambient and inheritable sets are empty.

    Raises:
        OSError: the thread may not change its user, or `uid` does not exist in this user namespace.
    """
    numbers = _SET_IDS.get(platform.machine())
    if numbers is None:
        raise OSError(f"dropping root in one thread is not supported on the architecture {platform.machine()}")
    setgroups, setresgid, setresuid = numbers
    _checked(_libc().prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "keep capabilities")
    _syscall(setgroups, ctypes.c_size_t(0), None, what="drop the supplementary groups")
    ids = (ctypes.c_uint(uid),) * 3
    _syscall(setresgid, *ids, what=f"become group {uid}")
    _syscall(setresuid, *ids, what=f"become user {uid}")
    mask = sum(1 << capability for capability in keep)
    header = _CapHeader(_CAPABILITY_VERSION_3, 0)
    data = (_CapData * 2)(_CapData(mask, mask, 0), _CapData(0, 0, 0))
    _checked(_libc().capset(ctypes.byref(header), data), "set the capabilities")
