"""Processes in containers that try to outlive their container, or to reach other processes, cannot."""

# ruff: noqa: ASYNC240  (looking at the host's processes is what these tests are about)

from __future__ import annotations

import asyncio
import errno
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentfly.resources.containers.backend import get_backend
from agentfly.resources.containers.bubblewrap import backend as bubblewrap_backend
from agentfly.resources.containers.bubblewrap.backend import Bubblewrap, probe
from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.landlock.backend import Landlock, LandlockLauncher, make_launcher
from agentfly.resources.containers.runtime_directory import runtime_directory, sandbox_uid
from agentfly.resources.containers.sandbox_processes import InitProcess
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.process.cgroups import writable_cgroup_parent

PYTHON = "/usr/bin/python3"
pytestmark = [
    pytest.mark.skipif(shutil.which("python3", path="/usr/bin") is None, reason="needs the system's python3"),
]
needs_bubblewrap = pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))
needs_landlock = pytest.mark.skipif(
    not get_backend("landlock").probe().available, reason=" ".join(get_backend("landlock").probe().missing)
)
x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="knows the registers of x86_64 alone")

TRACING = """
import ctypes, errno, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = libc.syscall.restype = ctypes.c_long
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
TRACE_ME, SINGLE_STEP, GET_REGISTERS, SET_REGISTERS, ATTACH = 0, 9, 12, 13, 16
def trace(request, pid, data=None):
    if libc.ptrace(request, pid, None, data) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace {request}")
"""
# Process 1 waits in a system call: it is made to call prctl(PR_SET_PDEATHSIG, 0) in its place, and held stopped.
HOLD = f"""{TRACING}
class Registers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in (
        "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base "
        "ds es fs gs").split()]
trace(ATTACH, 1)
os.waitpid(1, 0x40000000)
registers = Registers()
trace(GET_REGISTERS, 1, ctypes.byref(registers))
registers.rip -= 2
registers.rax, registers.rdi, registers.rsi, registers.orig_rax = 157, 1, 0, 2**64 - 1
trace(SET_REGISTERS, 1, ctypes.byref(registers))
trace(SINGLE_STEP, 1)
os.waitpid(1, 0x40000000)
trace(GET_REGISTERS, 1, ctypes.byref(registers))
print("held", registers.rax, flush=True)
time.sleep(600)
"""


def python(source: str) -> str:
    """A command that runs Python source."""
    return f"{PYTHON} -c {shlex.quote(source)}"


def first_process(box: Container) -> int:
    return box._sandbox.process.pid_namespace.init_pid  # type: ignore[attr-defined]


async def hold(box: Container) -> None:
    """Have a process inside see to it that process 1 does not end with who started it."""
    await box.write_file("hold.py", HOLD)
    await box.run(f"setsid {PYTHON} hold.py >held 2>&1 &")
    async with asyncio.timeout(20):
        while "held 0" not in (said := (await box.run("cat held", new_process=True, timeout=5)).stdout):
            assert "Error" not in said, said
            await asyncio.sleep(0.02)


# --- process 1 --------------------------------------------------------------------------------------------------------


@pytest.fixture
def box(launched_box: Container) -> Container:
    return launched_box


@needs_bubblewrap
async def test_process_1_can_be_neither_traced_nor_written_to(box: Container) -> None:
    attach = python(f"{TRACING}\ntrace(ATTACH, 1)")
    assert "[Errno 1]" in (await box.run(attach)).stderr
    calls = "".join(f"print(libc.syscall({number}, 1, 0, 0, 0, 0, 0), ctypes.get_errno())\n" for number in (310, 311))
    if platform.machine() == "x86_64":
        written = await box.run(python(f"{TRACING}\n{calls}"))
        assert written.stdout == f"-1 {errno.EPERM}\n" * 2
    for path in ("/proc/1/mem", "/proc/1/task/1/mem"):
        assert "denied" in (await box.run(f": 1<> {path}")).stderr


@needs_bubblewrap
async def test_other_processes_can_be_debugged(box: Container) -> None:
    source = f"""{TRACING}
child = os.fork()
if child == 0:
    trace(TRACE_ME, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(7)
print(os.WIFSTOPPED(os.waitpid(child, 0)[1]))
os.kill(child, signal.SIGKILL)
sleeper = os.posix_spawn("/bin/sleep", ["sleep", "60"], {{}})
trace(ATTACH, sleeper)
print(os.WIFSTOPPED(os.waitpid(sleeper, 0)[1]))
os.kill(sleeper, signal.SIGKILL)
"""
    assert (await box.run(python(source))).stdout == "True\n" * 2


OWNER = """
import asyncio, os, sys
from agentfly.resources.containers.bubblewrap.backend import Bubblewrap
from agentfly.resources.containers.bubblewrap.launcher import Tier
from agentfly.resources.containers.bubblewrap.backend import make_launcher
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec
sys.path.insert(0, sys.argv[3])
from test_containers_escaping_processes import first_process, hold

async def main():
    launcher = make_launcher(Tier.USER, cgroups=False) if sys.argv[2] == "user" else make_launcher()
    launcher._filters = False
    box = Container(ContainerSpec(), sys.argv[1], backend=Bubblewrap(launcher))
    await box.start()
    await hold(box)
    print(first_process(box), flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@needs_bubblewrap
@x86_64
@pytest.mark.slow
@pytest.mark.parametrize("tier", ["best", "user"])
async def test_reap_kills_what_has_outlived_its_owner_and_does_not_forget_it_before(
    name: Callable[[], str], tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = name()
    words = [sys.executable, "-c", OWNER, instance, tier, str(Path(__file__).parent)]
    ran = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, check=False)
    assert ran.returncode == -9, ran.stderr
    left = InitProcess.of(int(ran.stdout))  # it lives: without the filter it could be made to
    scratch = runtime_directory() / instance
    traces = {"scratch": str(scratch)}
    with monkeypatch.context() as patched:
        patched.setattr(InitProcess, "_kill", lambda self: None)
        patched.setattr(bubblewrap_backend, "_REAP_TIMEOUT_S", 0.1)
        with pytest.raises(TimeoutError, match=rf"{left.pid}.*did not end"):
            await asyncio.to_thread(bubblewrap_backend.reap_bubblewrap, traces)
    assert left.alive
    assert scratch.exists()
    await asyncio.to_thread(bubblewrap_backend.reap_bubblewrap, traces)
    assert not left.alive
    assert not scratch.exists()


@needs_bubblewrap
@x86_64
async def test_a_release_kills_process_1_also_where_it_has_outlived_bubblewrap(
    launcher: Launcher, name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_filters", False)
    box = Container(ContainerSpec(), name(), backend=Bubblewrap(launcher))
    try:
        await box.start()
        await hold(box)
        first = InitProcess.of(first_process(box))
        os.kill(box._sandbox.process.launched.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        await box._sandbox.process.exited.wait()  # type: ignore[attr-defined]
        assert first.alive
    finally:
        await box.release()
    assert not first.alive


async def test_a_process_that_has_the_id_of_a_first_one_that_is_gone_is_left_alone(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220
    try:
        InitProcess(sleeper.pid, InitProcess.of(sleeper.pid).started - 1).save(tmp_path)
        earlier = InitProcess.load(tmp_path)
        assert earlier is not None
        assert not earlier.alive
        earlier.kill(1)
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


async def test_who_only_looks_at_a_box_is_not_ended_with_it(name: Callable[[], str]) -> None:
    if sandbox_uid() == os.geteuid():
        pytest.skip("only root's sandboxes have a user of their own")
    scratch = runtime_directory() / name()
    looker = subprocess.Popen(["sh", "-c", "sleep 60; :", f"{scratch}/0/shell/command"])  # noqa: ASYNC220
    try:
        await asyncio.to_thread(bubblewrap_backend.reap_bubblewrap, {"scratch": str(scratch)})
        assert looker.poll() is None
    finally:
        looker.kill()
        looker.wait()


async def test_who_is_left_in_a_control_group_is_killed_before_it_is_removed(name: Callable[[], str]) -> None:
    home = writable_cgroup_parent()
    if home is None:
        pytest.skip("this process may make no control groups")
    group = home.cgroup(name())
    group.create(memory=2**28, pids=64, cpus=0)
    sleeper = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220
    try:
        group.attach(sleeper.pid)
        await asyncio.to_thread(group.remove, 20.0)
        assert sleeper.wait() == -signal.SIGKILL
        assert not any(path.exists() for path in group.paths)
    finally:
        sleeper.kill()


# --- processes of others ----------------------------------------------------------------------------------------------

OTHERS = {
    "limits": "import resource; resource.prlimit({pid}, resource.RLIMIT_CPU, (0, 0))",
    "limits read": "import resource; resource.prlimit({pid}, resource.RLIMIT_CPU)",
    "priority": "import os; os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
    "priority of a group": "import os; os.setpriority(os.PRIO_PGRP, os.getpgid({pid}), 19)",
    "priority of a user": "import os; os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    "processors": "import os; os.sched_setaffinity({pid}, os.sched_getaffinity(0))",
    "scheduler": "import os; os.sched_setscheduler({pid}, os.SCHED_IDLE, os.sched_param(0))",
    "trace": TRACING + "trace(ATTACH, {pid})",
}
ITSELF = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); resource.prlimit(0, resource.RLIMIT_NOFILE)
os.nice(1); os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + 1)
os.sched_setaffinity(0, os.sched_getaffinity(0)); os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
print("done")
"""


@needs_landlock
async def test_without_namespaces_no_process_of_others_can_be_limited_slowed_moved_or_traced(
    name: Callable[[], str],
) -> None:
    made = make_launcher()
    assert isinstance(made, LandlockLauncher)
    box = Container(ContainerSpec(isolation="weak"), name(), backend=Landlock(made))
    sleeper = subprocess.Popen(["sleep", "60"], user=sandbox_uid(), start_new_session=True)  # noqa: ASYNC220
    try:
        await box.start()
        limits = Path(f"/proc/{sleeper.pid}/limits")
        before = limits.read_text()
        for what, call in OTHERS.items():
            tried = await box.run(python(call.replace("{pid}", str(sleeper.pid))))
            assert "[Errno 1]" in tried.stderr, what
        assert limits.read_text() == before
        assert os.getpriority(os.PRIO_PROCESS, sleeper.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        assert (await box.run(python(ITSELF))).stdout == "done\n"
    finally:
        await box.release()
        sleeper.kill()
        sleeper.wait()


@needs_bubblewrap
async def test_no_limits_but_its_own_are_changed_by_a_process_inside(box: Container) -> None:
    limited = await box.run(python(OTHERS["limits"].replace("{pid}", "1")))
    assert "[Errno 1]" in limited.stderr
    assert (await box.run(python(ITSELF))).stdout == "done\n"
