"""A program that creates the namespaces in which an enroot is started, or runs a program inside them.

    python namespaces.py make PLACE PLAN STATUS    be the parent of process 1, whose host id is written to STATUS
    python namespaces.py join PLACE PLAN           run another program beside it
    python namespaces.py try PLACE PLAN            find out whether `make` could do its part

PLAN and STATUS are descriptors of open files. PLACE is the sandbox's directory and identifies the process. The program
uses the standard library only, and is run by its path.

Process 1 starts enroot, which starts a container that does nothing. Process 1 then enters the namespaces in which that
container has its root, drops all rights, and becomes the program of the plan. The container's own process ends then.

This program creates the namespaces of processes, network, IPC and host name around enroot. enroot's own switches are
not used, because older versions ignore them silently. For the same reason, programs come in by `join`: ``enroot exec``
enters the container's users and files, and stays outside its network and processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, NOEXEC, BIND, REC, SLAVE = 2, 4, 8, 4096, 16384, 1 << 19
READ_ONLY_NOSUID_NODEV = 0x1 | 0x2 | 0x4  # as mount_setattr(2) has them
SET_DUMPABLE, SET_SECCOMP, CAPBSET_DROP, SET_NO_NEW_PRIVS = 4, 22, 24, 38
CAPABILITY_VERSION = 0x20080522
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}

INNER = (("user", NEWUSER), ("cgroup", NEWCGROUP), ("mnt", NEWNS))  # those that enroot makes, in the order of entry
READY = b"ready\n"

libc = ctypes.CDLL(None, use_errno=True)
Plan = dict[str, Any]


def main(verb: str, plan: Plan, status: int | None) -> int:
    """Do what was asked; the exit status."""
    if status is not None:
        os.set_inheritable(status, False)
    procs = [os.open(f"{group}/cgroup.procs", os.O_WRONLY) for group in plan["groups"]]
    try:
        if verb == "join":
            return join(plan, procs)
        return make(plan, procs, status)
    except OSError as error:
        print(f"namespaces: {error.strerror or error}", file=sys.stderr)
        return 125


# --- making -----------------------------------------------------------------------------------------------------------


def make(plan: Plan, procs: list[int], status: int | None) -> int:
    """Make the namespaces and have process 1 start enroot in them; without a `status`, try all but that."""
    switch_user(plan["uid"])
    owner, group = os.getuid(), os.getgid()
    call("make a user namespace", libc.unshare, NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{plan['inside']} {owner} 1")
    Path("/proc/self/gid_map").write_text(f"{plan['inside']} {group} 1")
    kinds = NEWNS | NEWPID | NEWIPC | NEWUTS | (0 if plan["network"] else NEWNET)
    call("make namespaces", libc.unshare, kinds)
    child = os.fork()
    if child == 0:
        os._exit(child_exit_status(lambda: init_main(plan, procs, started=status is not None)))
    if status is not None:
        os.write(status, f"{child}\n".encode())
        os.close(status)
        detach_stdio()
    return wait(child)


def init_main(plan: Plan, procs: list[int], *, started: bool) -> None:
    """Become process 1: set its limits and mounts, start enroot, and run the program."""
    confine(plan, procs)
    call("keep mounts to itself", libc.mount, None, b"/", None, REC | SLAVE, None)
    call("mount the processes' file system", libc.mount, b"proc", b"/proc", b"proc", NOSUID | NODEV | NOEXEC, None)
    for memory in (b"/proc/1/mem", b"/proc/1/task/1/mem"):  # by which anybody inside could make this one do anything
        call("hide process 1", libc.mount, b"/dev/null", memory, None, BIND, None)
    if not plan["network"]:
        raise_loopback()
        socket.sethostname("sandbox")
    root = mount_overlay(plan)
    for number, source in enumerate(plan["mounts"]):
        bind_read_only(source, Path(plan["place"], "mounts", str(number)))
    run_in_child(lambda: populate_root(root, plan))
    if started:
        container, hold = start_enroot(plan)
        enter(opened((Path(f"/proc/{container}/ns", name), kind) for name, kind in INNER))
        os.close(hold)
        with contextlib.suppress(ChildProcessError):
            os.kill(container, signal.SIGKILL)
            os.waitpid(container, 0)
        os.write(1, READY)
        exec_program(plan)


def start_enroot(plan: Plan) -> tuple[int, int]:
    """Have enroot start the container; its process, and the end of a pipe with which that ends."""
    held, hold = os.pipe()
    told, tell = os.pipe()
    container = os.fork()
    if container == 0:
        os.dup2(held, 0)
        os.dup2(tell, 1)
        os._exit(child_exit_status(lambda: exec_with_default_signals(plan["enroot"], plan["enroot_environment"])))
    os.close(held)
    os.close(tell)
    said = b""
    while READY not in said:
        piece = os.read(told, 4096)
        if not piece:
            os._exit(wait(container) or 125)
        said += piece
    os.close(told)
    return container, hold


def mount_overlay(plan: Plan) -> Path:
    """Lay a private layer, in memory, over the image."""
    place = Path(plan["place"])
    layer, root = place / "layer", place / "data" / "box"
    size = f"size={plan['disk']},mode=755".encode()
    call("mount a layer in memory", libc.mount, b"tmpfs", os.fsencode(layer), b"tmpfs", NOSUID | NODEV, size)
    (layer / "upper").mkdir()
    (layer / "work").mkdir()
    options = f"lowerdir={plan['image']},upperdir={layer}/upper,workdir={layer}/work,userxattr"
    flags = NOSUID | NODEV
    call("lay it over", libc.mount, b"overlay", os.fsencode(root), b"overlay", flags, os.fsencode(options))
    return root


def bind_read_only(source: str, target: Path) -> None:
    """Show a path of the host at another, read-only with all that is mounted below it."""
    if Path(source).is_dir():
        target.mkdir()
    else:
        target.touch()
    call(f"show {source}", libc.mount, os.fsencode(source), os.fsencode(target), None, BIND | REC, None)
    attributes = struct.pack("=QQQQ", READ_ONLY_NOSUID_NODEV, 0, 0, 0)
    recursive = 0x8000  # AT_RECURSIVE
    number = ctypes.c_long(442)  # mount_setattr, on every architecture
    arguments = (ctypes.c_int(-100), os.fsencode(target), ctypes.c_uint(recursive), attributes, ctypes.c_size_t(32))
    call(f"make {source} read-only", libc.syscall, number, *arguments)


def populate_root(root: Path, plan: Plan) -> None:
    """Put into the root what every sandbox has. An image's links lead nowhere but into the image."""
    call("change to the root", libc.chroot, os.fsencode(root))
    os.umask(0o022)
    for directory in ("/dev", "/etc", "/proc", "/tmp", "/var/tmp", "/dev/pts", "/dev/shm", *plan["directories"]):
        Path(directory).mkdir(parents=True, exist_ok=True)
    for directory in ("/tmp", "/var/tmp", "/dev/shm"):
        Path(directory).chmod(0o1777)
    for name in (*DEVICES, *LINKS):
        Path("/dev", name).unlink(missing_ok=True)
    for name in DEVICES:
        Path("/dev", name).touch()
    for name, target in LINKS.items():
        Path("/dev", name).symlink_to(target)
    for name, text in plan["files"].items():
        path = Path(name)
        path.unlink(missing_ok=True)
        path.write_text(text)
    for name, line in plan["first_lines"].items():
        path = Path(name)
        rest = path.read_text(errors="surrogateescape") if path.is_file() else ""
        path.unlink(missing_ok=True)
        path.write_text(f"{line}\n{rest}", errors="surrogateescape")


def raise_loopback() -> None:
    """Let the sandbox reach itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        up = 0x1 | 0x40  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(asked, 0x8914, struct.pack("16sh22x", b"lo", up))  # SIOCSIFFLAGS


# --- joining ----------------------------------------------------------------------------------------------------------


def join(plan: Plan, procs: list[int]) -> int:
    """Run a program as one of the sandbox's processes, without any capability and behind the filter."""
    outer, inner = Path(f"/proc/{plan['parent']}/ns"), Path(f"/proc/{plan['first']}/ns")
    kinds = (("pid", NEWPID), ("net", NEWNET), ("ipc", NEWIPC), ("uts", NEWUTS), *INNER)
    namespaces = opened([(outer / "user", NEWUSER), *((inner / name, kind) for name, kind in kinds)])
    switch_user(plan["uid"])
    enter(namespaces)
    child = os.fork()
    if child == 0:
        os.setsid()
        os._exit(child_exit_status(lambda: run_confined(plan, procs)))
    detach_stdio()
    return wait(child)


def run_confined(plan: Plan, procs: list[int]) -> None:
    """Take the limits of the sandbox, and become the program."""
    confine(plan, procs)
    exec_program(plan)


# --- both -------------------------------------------------------------------------------------------------------------


def opened(namespaces: Iterable[tuple[Path, int]]) -> list[tuple[int, str, int]]:
    """Open namespaces, each given by its path and kind."""
    return [(os.open(path, os.O_RDONLY), path.name, kind) for path, kind in namespaces]


def enter(namespaces: list[tuple[int, str, int]]) -> None:
    """Enter namespaces that have been opened, in this order."""
    for descriptor, name, kind in namespaces:
        if not same_namespace(descriptor, name):
            call(f"join the {name} namespace", libc.setns, descriptor, kind)
        os.close(descriptor)


def exec_program(plan: Plan) -> None:
    """Give up what the agent must not have, and become the program."""
    os.umask(0o022)
    os.chdir(plan["workdir"])
    drop_rights(bytes.fromhex(plan["filter"]))
    exec_with_default_signals(plan["program"], plan["program_environment"])


def exec_with_default_signals(words: list[str], environment: dict[str, str]) -> None:
    """Become a program, for which every signal does what it does by default: Python ignores some, others may have."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execve(words[0], words, environment)


def drop_rights(filters: bytes) -> None:
    """Give up every capability for good, and pass all later system calls through the filter, if there is one."""
    capability = 0
    while libc.prctl(CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header, none = struct.pack("=Ii", CAPABILITY_VERSION, 0), bytes(24)
    call("drop capabilities", libc.capset, header, none)
    call("give up new privileges", libc.prctl, SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if filters:
        instructions = ctypes.create_string_buffer(filters, len(filters))
        program = struct.pack("@HP", len(filters) // 8, ctypes.addressof(instructions))
        call("filter system calls", libc.prctl, SET_SECCOMP, 2, program, 0, 0)


def switch_user(uid: int) -> None:
    """Be an ordinary user, where this is root."""
    if os.geteuid() == 0:
        for output in (1, 2):  # pipes, which others inside open anew by /proc
            os.fchown(output, uid, uid)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        call("be seen as that user", libc.prctl, SET_DUMPABLE, 1, 0, 0, 0)


def confine(plan: Plan, procs: list[int]) -> None:
    """Enter the control groups, and take the limits of each process."""
    for descriptor in procs:
        os.write(descriptor, b"0")
        os.close(descriptor)
    for name, limit in plan["limits"].items():
        number = getattr(resource, name)
        highest = resource.getrlimit(number)[1]
        most = limit if highest == resource.RLIM_INFINITY else min(limit, highest)
        resource.setrlimit(number, (most, most))


def detach_stdio() -> None:
    """Leave the input and the outputs to the child that has them."""
    nothing = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)


def same_namespace(descriptor: int, name: str) -> bool:
    """Whether this process is in a namespace already."""
    there, here = os.fstat(descriptor), Path(f"/proc/self/ns/{name}").stat()
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def run_in_child(work: Callable[[], None]) -> None:
    """Run a function in a child process."""
    child = os.fork()
    if child == 0:
        os._exit(child_exit_status(work))
    if code := wait(child):
        os._exit(code)


def child_exit_status(work: Callable[[], None]) -> int:
    """Do the work of a forked process; its exit status."""
    try:
        work()
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"namespaces: {error.strerror or error}{where}", file=sys.stderr, flush=True)
        return 125
    return 0


def wait(child: int) -> int:
    """Wait for a child; its exit status as a shell has it."""
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def call(what: str, function: Callable[..., int], *arguments: object) -> None:
    """Call the C library.

    Raises:
        OSError: it failed; the message begins with `what` it was to do.
    """
    if function(*arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"could not {what}: {os.strerror(code)}")


if __name__ == "__main__":
    with open(int(sys.argv[3]), encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123  (a descriptor)
        asked = json.load(file)
    sys.exit(main(sys.argv[1], asked, int(sys.argv[4]) if len(sys.argv) > 4 else None))
