"""Program that runs another one confined to a few writable directories, and kills all its processes at the end.

It stands in for bubblewrap, with bubblewrap's option names, on machines without namespaces. It needs only Python's
standard library. It consists of two processes. The child confines itself by Landlock (landlock(7)), a system call
filter and resource limits, and executes the program. The parent is not confined. It adopts all orphans of the program,
and kills them at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import stat
import sys
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_RULE_PATH_BENEATH = 1
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CHILD_SUBREAPER, _PR_NO_NEW_PRIVS = 1, 22, 36, 38
_SECCOMP_MODE_FILTER = 2

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_MAKE_DEVICES = 1 << 6 | 1 << 11
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_KNOWN = {
    1: 1 << 13,
    2: 1 << 14,
    3: 1 << 15,
    4: 1 << 15,
}  # by version of Landlock: the lowest right that it does not have


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


libc = ctypes.CDLL(None, use_errno=True)


def check_result(result: int, what: str) -> int:
    """Return the result of a call of the C library.

    Raises:
        OSError: the call failed.
    """
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 if it has none."""
    return max(0, int(libc.syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(1))))


def restrict_files(read: list[str], write: list[str], write_to: list[str]) -> None:
    """Permanently deny this process and its children all files but these, and the files below them.

    Args:
        read: paths that may be read and executed.
        write: paths that may also be changed in every way.
        write_to: directories whose files may be read and written, but not created, removed or replaced.
    """
    version = landlock_version()
    known = _KNOWN.get(version, 1 << 16) - 1
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0
    rules = _Ruleset(known, 0, scoped)
    size = ctypes.sizeof(rules) if version >= 6 else 8
    ruleset = check_result(
        libc.syscall(ctypes.c_long(_CREATE_RULESET), ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint(0)),
        "create a Landlock ruleset",
    )
    reading = _EXECUTE | _READ_FILE | _READ_DIRECTORY
    for paths, rights in ((read, reading), (write, known & ~_MAKE_DEVICES), (write_to, reading | _WRITE_FILE)):
        for path in paths:
            _allow(ruleset, path, rights & known)
    check_result(
        libc.syscall(ctypes.c_long(_RESTRICT_SELF), ctypes.c_int(ruleset), ctypes.c_uint(0)), "confine by Landlock"
    )
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # it does not exist on this machine
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        rights &= _OF_FILES
    rule = _PathBeneath(rights, descriptor)
    number, kind = ctypes.c_long(_ADD_RULE), ctypes.c_int(_RULE_PATH_BENEATH)
    try:
        added = libc.syscall(number, ctypes.c_int(ruleset), kind, ctypes.byref(rule), ctypes.c_uint(0))
        check_result(added, f"allow {path}")
    finally:
        os.close(descriptor)


def filter_calls(program: bytes) -> None:
    """Permanently filter the system calls of this process and its children."""
    filters = _FilterProgram(len(program) // 8, program)
    check_result(
        libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(filters), 0, 0),
        "filter system calls",
    )


def limit_processes(more: int) -> None:
    """Limit the processes and threads of this user to the current number plus `more`."""
    here = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == os.getuid():
                    here += len(os.listdir(entry / "task"))  # noqa: PTH208
            except OSError:
                continue
    resource.setrlimit(resource.RLIMIT_NPROC, (here + more, here + more))


def reset_signals() -> None:
    """Restore the default of every signal, including those that Python or the parent process ignores."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def exec_confined(options: argparse.Namespace, environment: dict[str, str]) -> None:
    """Confine this process, and execute the program in it."""
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    libc.prctl(_PR_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)  # the shell adopts orphans, as process 1 would
    if options.block_fd >= 0 and not os.read(options.block_fd, 1):
        return  # the sandbox is not wanted any more
    os.setsid()  # otherwise a signal to its process group would reach the parent
    os.chdir(options.chdir)
    os.umask(0o022)
    if options.pids > 0:
        limit_processes(options.pids)
    if options.file_size > 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_size, options.file_size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    program = os.pread(options.seccomp, 65536, 0)
    check_result(libc.prctl(_PR_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0), "give up new privileges")
    reset_signals()
    restrict_files(options.read, options.write, options.write_to)
    filter_calls(program)
    os.execve(options.command[0], options.command, environment)


def reap_until_exit(first: int) -> int:
    """Wait until the program has exited, and kill all its processes. Return its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
    while (ended := _next_to_end()) != first:
        os.waitpid(ended, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _, status = os.waitpid(first, 0)  # not before: until then its process id cannot be reused, so it can be signalled
    while left := descendants(os.getpid()):
        stopped: set[int] = set()
        while fresh := left - stopped:  # stop all before any is killed, so that none escapes by forking
            _signal(fresh, signal.SIGSTOP)
            stopped |= fresh
            left = descendants(os.getpid())
        _signal(stopped, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _next_to_end() -> int:
    """Wait until a child has exited. Return its process id, without reaping it."""
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_pid


def descendants(pid: int) -> set[int]:
    """Return all running descendants of a process."""
    found: set[int] = set()
    edge = {pid}
    while edge:
        edge = {child for parent in edge for child in _children(parent)} - found
        found |= edge
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    except OSError:
        pass
    return found


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


def main() -> None:
    """Start the program, and wait for its end."""
    parser = argparse.ArgumentParser()
    for name in ("--info-fd", "--block-fd", "--seccomp", "--args", "--pids", "--file-size"):
        parser.add_argument(name, type=int, default=-1)
    parser.add_argument("--read", action="append", default=[])
    parser.add_argument("--write", action="append", default=[])
    parser.add_argument("--write-to", action="append", default=[])
    parser.add_argument("--chdir", default="/")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    environment: dict[str, str] = {}
    if options.args >= 0:  # "--setenv", a name and a value for each variable
        words = os.fsdecode(os.pread(options.args, os.fstat(options.args).st_size, 0)).split("\0")
        environment = {words[at + 1]: words[at + 2] for at in range(0, len(words) - 2, 3)}
    passed = [number for number in (options.info_fd, options.block_fd, options.seccomp, options.args) if number >= 0]
    for descriptor in passed:
        os.set_inheritable(descriptor, False)
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    libc.prctl(_PR_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
    first = os.fork()
    if first == 0:
        try:
            exec_confined(options, environment)
        except OSError as error:
            print(error, file=sys.stderr)
        os._exit(127)
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    if options.info_fd >= 0:
        os.write(options.info_fd, json.dumps({"child-pid": first}).encode() + b"\n")
    for descriptor in passed:
        os.close(descriptor)
    sys.exit(reap_until_exit(first))


if __name__ == "__main__":
    main()
