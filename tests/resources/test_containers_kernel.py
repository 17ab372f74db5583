"""System calls that a sandbox can make, and keyrings, which belong to no namespace."""

from __future__ import annotations

import asyncio
import errno
import platform
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable

import pytest

from agentfly.resources.containers import seccomp
from agentfly.resources.containers.bubblewrap import launcher as launching
from agentfly.resources.containers.bubblewrap.backend import Bubblewrap, make_launcher, probe
from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.seccomp import filter_program
from agentfly.resources.containers.spec import ContainerSpec

pytestmark = [
    pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing)),
    pytest.mark.skipif(shutil.which("python3", path="/usr/bin") is None, reason="needs the system's python3"),
]
filtered = pytest.mark.skipif(not probe().seccomp_filter, reason="no filter of system calls here")
x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86_64")

PYTHON = "/usr/bin/python3"
KEYCTL, ADD_KEY = (250, 248) if platform.machine() == "x86_64" else (219, 217)
CALL = f"""
import ctypes, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    return errno.errorcode[ctypes.get_errno()] if result < 0 else result
def add_key(name, secret):
    return call({ADD_KEY}, b"user", name, secret, len(secret), -3)
def find_key(name):
    return call({KEYCTL}, 10, -3, b"user", name, 0)
"""


def python(source: str) -> str:
    """A command that runs Python source, which can use `CALL`."""
    return f"{PYTHON} -c {shlex.quote(CALL + source)}"


@pytest.fixture
def box(launched_box: Container) -> Container:
    return launched_box


# --- the filter -------------------------------------------------------------------------------------------------------


@filtered
async def test_every_process_inside_is_filtered(box: Container) -> None:
    for new_process in (False, True):
        status = await box.run("cat /proc/1/status /proc/$$/status /proc/self/status", new_process=new_process)
        assert [line.split()[1] for line in status.stdout.splitlines() if line.startswith("Seccomp:")] == ["2"] * 3


@filtered
async def test_calls_that_no_program_inside_needs_are_refused(box: Container) -> None:
    column = 0 if platform.machine() == "x86_64" else 1
    numbers = {name: row[column] for name, row in seccomp._REFUSED.items() if row[column] is not None}
    # -1 in every argument: what is not filtered fails with another error than EPERM, or with ENOSYS
    calls = f"for name, number in {numbers}.items(): print(name, call(number, -1, -1, -1, -1, -1))"
    answers = dict(line.split() for line in (await box.run(python(calls))).stdout.splitlines())
    assert answers == dict.fromkeys(numbers, "EPERM")


@filtered
async def test_no_socket_leads_out_of_the_namespaces(box: Container) -> None:
    # to the hypervisor, to the machine itself and to other boxes; to the kernel's ciphers; around the filter
    source = """
import socket
def made(family, kind):
    try:
        socket.socket(family, kind)
        return "made"
    except OSError as error:
        return errno.errorcode[error.errno]
print(made(socket.AF_VSOCK, socket.SOCK_STREAM), made(socket.AF_ALG, socket.SOCK_SEQPACKET), call(425, 4, 0))
print({made(family, socket.SOCK_STREAM) for family in (socket.AF_UNIX, socket.AF_INET)})
"""
    assert (await box.run(python(source))).stdout == "EAFNOSUPPORT EAFNOSUPPORT EPERM\n{'made'}\n"


@filtered
async def test_no_call_makes_a_namespace(box: Container) -> None:
    clone = seccomp._CHECKED["clone"][0][0 if platform.machine() == "x86_64" else 1]
    calls = f"for flags in (0x10000000, 0x20000, 0x40000000): print(call({clone}, flags | 17, 0, 0, 0, 0))"
    assert (await box.run(python(calls))).stdout.split() == ["EPERM"] * 3
    assert (await box.run(python("print(call(435, 0, 0))"))).stdout == "ENOSYS\n"


@filtered
@x86_64
async def test_the_calls_of_the_x32_abi_do_not_exist(box: Container) -> None:
    assert (await box.run(python("print(call(0x40000000 + 39))"))).stdout == "ENOSYS\n"


@filtered
@x86_64
async def test_a_process_that_calls_as_another_architecture_is_killed(box: Container) -> None:
    getpid_of_i386 = bytes.fromhex("b814000000cd80c3")  # mov eax, 20; int 0x80; ret
    source = f"""
import mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write({getpid_of_i386!r})
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
    result = await box.run(python(source))
    assert (result.exit_code, result.stdout) == (128 + 31, "")


@filtered
async def test_ordinary_programs_run_under_the_filter(box: Container) -> None:
    source = """
import subprocess, threading
thread = threading.Thread(target=lambda: print("thread", flush=True))
thread.start()
thread.join()
print(subprocess.run(["echo", "child"], capture_output=True, text=True, check=True).stdout, end="")
import multiprocessing
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(sum(pool.map(abs, range(-3, 0))))
"""
    result = await box.run(f"{python(source)} && echo a | cat | sort")
    assert (result.stdout, result.stderr) == ("thread\nchild\n6\na\n", "")


@filtered
@pytest.mark.skipif(
    any(shutil.which(program, path="/usr/bin") is None for program in ("gcc", "git")), reason="needs gcc and git"
)
async def test_compilers_and_version_control_run_under_the_filter(box: Container) -> None:
    made = "echo 'int main(void) { return 3; }' > a.c && gcc a.c -o a; ./a; echo $?"
    assert (await box.run(made)).stdout == "3\n"
    kept = "git init -q . && git -c user.name=a -c user.email=a@b.c commit -q --allow-empty -m one && git log --oneline"
    assert (await box.run(kept)).stdout.endswith(" one\n")


def test_a_machine_without_a_filter_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "filter_program", lambda machine, **_: None)
    made = make_launcher()
    assert isinstance(made, Launcher)
    made.close()
    assert not made.capabilities.seccomp_filter
    assert any("No system call filter" in lack for lack in made.capabilities.missing)


def test_there_is_a_filter_for_two_architectures_only() -> None:
    assert filter_program("x86_64") is not None
    assert filter_program("aarch64") is not None
    assert filter_program("riscv64") is None


def answer(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """What a filter answers to a call, computed as the kernel does it."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions = list(struct.iter_unpack("=HBBI", program))
    at = value = 0
    while True:
        code, if_true, if_false, constant = instructions[at]
        at += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("<I", data, constant)
            case 0x06:
                return int(constant)
            case _:
                holds = {
                    0x15: value == constant,
                    0x25: value > constant,
                    0x35: value >= constant,
                    0x45: bool(value & constant),
                }[code]
                at += if_true if holds else if_false


ALLOWED, REFUSED = 0x7FFF0000, 0x00050000
MACHINES = [("x86_64", 0xC000003E, 0), ("aarch64", 0xC00000B7, 1)]
KINDS = [
    {"namespaces": namespaces, "network": network, "accounted": accounted}
    for namespaces in (True, False)
    for network in (True, False)
    for accounted in (True, False)
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("machine", "architecture", "column"), MACHINES)
def test_a_filter_answers_by_architecture_and_number(
    machine: str, architecture: int, column: int, kind: dict[str, bool]
) -> None:
    program = filter_program(machine, **kind)
    assert program is not None
    rules = seccomp.filter_rules(**kind)
    names = {both[column]: name for name, both in rules.numbers.items()}
    for number in range(500):
        name = names.get(number)
        if name not in rules.checks:
            expected = REFUSED | rules.errors[name] if name in rules.errors else ALLOWED
            assert answer(program, architecture, number) == expected, name or number
    assert answer(program, 0x40000003, 20) == 0x80000000


@pytest.mark.parametrize(("machine", "architecture", "column"), MACHINES)
def test_a_filter_answers_by_what_a_call_asks(machine: str, architecture: int, column: int) -> None:
    eperm, enospc, enosys, family = (
        REFUSED | error for error in (errno.EPERM, errno.ENOSPC, errno.ENOSYS, errno.EAFNOSUPPORT)
    )
    apart = {"namespaces": False}
    measured = {"accounted": False}
    itself, first, other = 0, 1, 4711
    for name, kind, arguments, expected in (
        ("clone", {}, (0x003D0F00,), ALLOWED),  # a thread
        ("clone", {}, (0x10000011,), eperm),
        *(("socket", {}, (n,), ALLOWED if n in (1, 2, 10, 16) else family) for n in range(64)),
        ("socket", apart | {"network": False}, (1,), eperm),
        *(("prlimit64", kind, (itself,), ALLOWED) for kind in ({}, apart)),
        *(("prlimit64", kind, (pid,), eperm) for kind in ({}, apart) for pid in (first, other)),
        ("prlimit64", {}, (other << 32,), ALLOWED),  # the kernel takes the lower half alone
        ("ptrace", {}, (16, first), eperm),
        ("ptrace", {}, (16, first | 1 << 32), eperm),
        *(("ptrace", {}, (request, pid), ALLOWED) for request, pid in ((0, 0), (16, other))),
        ("ptrace", apart, (0, 0), eperm),
        *(("process_vm_writev", {}, (pid,), expected) for pid, expected in ((first, eperm), (other, ALLOWED))),
        ("setpriority", {}, (0, other), ALLOWED),
        ("setpriority", {}, (2, 0), eperm),
        ("setpriority", apart, (0, itself), ALLOWED),
        *(("setpriority", apart, asked, eperm) for asked in ((0, other), (1, 0), (2, 0))),
        ("ioprio_set", apart, (1, itself), ALLOWED),
        *(("ioprio_set", apart, asked, eperm) for asked in ((1, other), (2, 0), (3, 0))),
        ("ioprio_set", {}, (3, 0), eperm),
        *(
            (name, apart, (pid,), ALLOWED if pid == itself else eperm)
            for name in ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr", "move_pages")
            for pid in (itself, first, other)
        ),
        ("shmget", measured, (0, 4096), ALLOWED),
        ("shmget", measured, (0, 4097), enospc),
        ("shmget", measured, (0, 1 << 32), enospc),
        ("memfd_create", measured, (), enosys),
    ):
        program = filter_program(machine, **kind)
        assert program is not None
        number = seccomp.filter_rules(**({"namespaces": True, "network": True, "accounted": True} | kind)).numbers[
            name
        ][column]
        assert number is not None
        assert answer(program, architecture, number, *arguments) == expected, (name, kind, arguments)


# --- keyrings ---------------------------------------------------------------------------------------------------------

IN_A_LOGIN = f"""
import asyncio
from agentfly.resources.containers.bubblewrap import launcher as launching
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.containers.bubblewrap.backend import Bubblewrap
from agentfly.resources.containers.bubblewrap.backend import make_launcher
{CALL}
if isinstance(call({KEYCTL}, 1, b"login"), str) or isinstance(add_key(b"mysecret", b"4713"), str):
    sys.exit(77)
assert isinstance(find_key(b"mysecret"), int)
launching.filter_program = lambda machine, **_: None

async def main():
    launcher = make_launcher()
    box = Container(ContainerSpec(), "kernel-login-" + sys.argv[1], backend=Bubblewrap(launcher))
    await box.start()
    print((await box.run(sys.argv[2])).stdout)
    await box.release()
    launcher.close()

asyncio.run(main())
"""


async def test_a_key_of_the_hosts_login_is_not_found_inside_even_without_a_filter(name: Callable[[], str]) -> None:
    look = python('print(find_key(b"mysecret"))') + "; cat /proc/keys"
    command = [sys.executable, "-c", IN_A_LOGIN, name(), look]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    if ran.returncode == 77:
        pytest.skip("the kernel's keyrings cannot be used here")
    assert (ran.returncode, ran.stdout.split()) == (0, ["ENOKEY"]), ran.stderr


async def test_a_key_of_one_box_is_not_seen_in_another_even_without_a_filter(
    monkeypatch: pytest.MonkeyPatch, launcher: Launcher, name: Callable[[], str]
) -> None:
    monkeypatch.setattr(launcher, "_filters", False)
    boxes = [Container(ContainerSpec(), name(), backend=Bubblewrap(launcher)) for _ in range(2)]
    try:
        for box in boxes:
            await box.start()
        added = await boxes[0].run(python('print(add_key(b"shared", b"4714"), find_key(b"shared"))'))
        if not added.stdout.split()[0].isdigit():
            pytest.skip("the kernel's keyrings cannot be used here")
        assert len(set(added.stdout.split())) == 1
        assert (await boxes[1].run(python('print(find_key(b"shared"))'))).stdout == "ENOKEY\n"
    finally:
        for box in boxes:
            await box.release()


async def test_the_names_of_keys_are_not_listed_inside(box: Container) -> None:
    assert (await box.run("cat /proc/keys")).stdout == ""


@filtered
async def test_keyrings_cannot_be_used_inside(box: Container) -> None:
    assert (await box.run(python('print(add_key(b"mine", b"x"), find_key(b"mine"))'))).stdout == "EPERM EPERM\n"
