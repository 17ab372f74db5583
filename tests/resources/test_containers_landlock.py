"""Containers without namespaces: which host files Landlock protects, who gets them, and complete removal."""

# ruff: noqa: ASYNC240  (looking at the host's files is what these tests are about)

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from agentfly.core.errors import PrerequisiteError, ResourceDied
from agentfly.resources.containers.backend import get_backend, reap, select_backend
from agentfly.resources.containers.bubblewrap import backend as tiers
from agentfly.resources.containers.bubblewrap.launcher import BubblewrapCapabilities, Tier
from agentfly.resources.containers.bubblewrap.shell_io import OutputPipes
from agentfly.resources.containers.command import BoundedOutput
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.landlock import backend as launching
from agentfly.resources.containers.landlock.backend import Landlock, LandlockLauncher, make_launcher
from agentfly.resources.containers.runtime_directory import runtime_directory
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.resource import Status

pytestmark = pytest.mark.skipif(
    not get_backend("landlock").probe().available, reason=" ".join(get_backend("landlock").probe().missing)
)

SPEC = ContainerSpec(isolation="weak", memory="256MiB", pids=64)


@pytest.fixture(params=[True, False], ids=["control groups", "resource limits"])
def landlock(request: pytest.FixtureRequest) -> Landlock:
    made = make_launcher(cgroups=request.param)
    assert isinstance(made, LandlockLauncher)
    return Landlock(made)


@pytest.fixture
async def box(landlock: Landlock) -> AsyncIterator[Container]:
    box = Container(SPEC, f"landlocked-{os.getpid()}", backend=landlock)
    try:
        await box.start()
        yield box
    finally:
        await box.release()


def first_process(box: Container) -> int:
    return box._sandbox.process.pid_namespace.init_pid  # type: ignore[attr-defined]


def attendant(box: Container) -> int:
    return box._sandbox.process.launched.process.pid  # type: ignore[attr-defined]


async def test_nothing_of_the_host_can_be_written_however_open_it_is(box: Container, tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents):
        if "pytest" in directory.name:  # what pytest makes is for its user alone
            directory.chmod(0o777)
    victim = tmp_path / "victim"
    victim.write_text("host")
    victim.chmod(0o666)
    tries = f"echo x > {victim}; echo x > {tmp_path}/new; rm {victim}; mv {victim} {victim}2; mkdir {tmp_path}/d"
    result = await box.run(
        f"{tries}; ln -s x {tmp_path}/l; cat {victim}; : > {victim}; echo x > /dev/shm/new-{os.getpid()}"
    )
    assert "host" not in result.stdout
    assert victim.read_text() == "host"
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    assert not Path(f"/dev/shm/new-{os.getpid()}").exists()


async def test_the_pipes_that_the_host_opens_cannot_be_replaced_by_links_to_its_files(box: Container) -> None:
    await box.run("true", new_process=True)
    shell_directory = box._sandbox.process.shell_directory  # type: ignore[attr-defined]
    before = sorted(path.name for path in shell_directory.iterdir())
    tries = (
        "rm -f $d/$p; mv $d/$p $d/q; ln -sf /etc/shadow $d/$p; ln -s /etc/shadow $d/new; mkfifo $d/fifo; mv $d $d.old"
    )
    result = await box.run(
        f"d={shell_directory}; for p in {{0..3}}.out {{0..3}}.err session.sh command spawn; do {tries}; done"
    )
    assert result.stdout == ""
    assert sorted(path.name for path in shell_directory.iterdir()) == before
    assert (await box.run("echo alive", new_process=True)).stdout == "alive\n"


def test_what_is_in_the_place_of_a_pipe_is_not_read(tmp_path: Path) -> None:
    async def begin() -> None:
        pipes = OutputPipes(str(tmp_path / "0"), None)
        (tmp_path / "secret").write_text("secret")
        for put_there in (lambda path: path.write_text("file"), lambda path: path.symlink_to(tmp_path / "secret")):
            (tmp_path / "0.out").unlink()
            put_there(tmp_path / "0.out")
            output = BoundedOutput(100)
            with pytest.raises(OSError, match=r"no longer a pipe|symbolic"):
                pipes.start(output, BoundedOutput(100))
            assert output.total == 0

    asyncio.run(begin())


@pytest.mark.parametrize(
    "command", ["kill 0", "kill -9 0", "kill $$", "kill -- -1", "trap 'kill 0' EXIT; sleep 60 & exit"]
)
async def test_a_command_that_ends_its_group_or_asks_the_shell_to_end_does_not_end_the_box(
    box: Container, command: str
) -> None:
    for beside in (False, True):
        await box.run(command, timeout=20, new_process=beside)
        assert (await box.run("echo alive")).stdout == "alive\n"
        assert (await box.run("echo beside", new_process=True)).stdout == "beside\n"


async def test_a_command_that_a_dying_session_has_read_of_and_not_begun_is_run_by_the_next(box: Container) -> None:
    allowed = os.sched_getaffinity(0)
    here = {min(allowed)}
    await box.run("kept=5")
    session = box._sandbox.shell._shell_processes.session  # type: ignore[attr-defined]
    try:
        os.sched_setaffinity(0, here)
        os.sched_setaffinity(session, here)
        os.sched_setscheduler(session, os.SCHED_IDLE, os.sched_param(0))  # it finds the signal and the request together
        await asyncio.sleep(0.01)
        os.kill(session, signal.SIGTERM)
        assert (await box.run("echo alive $kept; echo once >> file")).stdout == "alive 5\n"
    finally:
        os.sched_setaffinity(0, allowed)
    assert (await box.run("cat file")).stdout == "once\n"


async def test_secrets_of_the_host_and_of_its_processes_cannot_be_read(box: Container) -> None:
    seen = await box.run(f"cat /etc/shadow /proc/{os.getpid()}/environ /proc/{attendant(box)}/environ; ls ~root /home")
    assert seen.stdout == ""
    assert seen.stderr.count("denied") == 5


async def test_processes_outside_cannot_be_ended(box: Container) -> None:
    sleeper = subprocess.Popen(["sleep", "60"], user=Path(f"/proc/{first_process(box)}").stat().st_uid)  # noqa: ASYNC220
    try:
        result = await box.run(f"kill -9 {sleeper.pid}; kill -9 {attendant(box)}; echo $?")
        assert result.stdout == "1\n" or "may end processes" in str(get_backend("landlock").probe().isolation_gaps)
        assert sleeper.poll() is None or "may end processes" in str(get_backend("landlock").probe().isolation_gaps)
    finally:
        sleeper.kill()
        sleeper.wait()


async def test_no_socket_no_shared_memory_and_no_new_privilege(box: Container) -> None:
    for call in ("socket.socket()", "socket.socket(socket.AF_UNIX)", "socket.socket(type=socket.SOCK_DGRAM)"):
        assert "not permitted" in (await box.run(f"python3 -c 'import socket; {call}'")).stderr
    shared = "import ctypes; print(ctypes.CDLL(None).shmget(4711, 4096, 0o1600))"
    assert (await box.run(f"python3 -c '{shared}'")).stdout == "-1\n"
    assert "NoNewPrivs:\t1\n" in (await box.run("cat /proc/self/status")).stdout
    assert (
        await box.run(
            "python3 -c 'import multiprocessing as m; m.Pipe(); import asyncio; asyncio.run(asyncio.sleep(0))'"
        )
    ).exit_code == 0


async def test_a_shell_that_is_killed_takes_everything_with_it(
    box: Container,
    processes_with: Callable[[str], list[int]],
    eventually: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:
    await box.run("setsid sh -c 'trap \"\" TERM HUP; sleep 9901; sleep 9901' >/dev/null 2>&1 & (setsid sleep 9901 &)")
    await eventually(lambda: len(processes_with("sleep\09901")) == 2)
    with pytest.raises(ResourceDied):
        await box.run(f"kill -9 {first_process(box)}; sleep 60", timeout=20)
    await eventually(lambda: processes_with("9901") == [])
    assert await box.status() is Status.BROKEN


@pytest.mark.slow
async def test_nothing_outlives_an_owner_that_is_killed_and_reap_removes_the_rest(
    processes_with: Callable[[str], list[int]], eventually: Callable[[Callable[[], bool]], Awaitable[None]]
) -> None:
    instance = f"landlocked-owner-{os.getpid()}"
    program = f"""
import asyncio, json
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec
async def main():
    box = Container(ContainerSpec(isolation="weak", backend="landlock"), {instance!r})
    await box.start()
    await box.run("setsid sleep 9902 >/dev/null 2>&1 &")
    print("up", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"up\n"
    owner.kill()
    await owner.wait()
    await eventually(lambda: processes_with("9902") == [])
    scratch = runtime_directory() / instance
    assert scratch.exists()
    await asyncio.to_thread(reap, {"landlock": {"scratch": str(scratch)}})
    assert not scratch.exists()


async def test_reap_ends_a_box_that_still_runs_with_all_that_it_started(
    box: Container,
    processes_with: Callable[[str], list[int]],
    eventually: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:
    await box.run("setsid sleep 9903 >/dev/null 2>&1 &")
    await eventually(lambda: processes_with("sleep\09903") != [])
    await asyncio.to_thread(reap, dict.fromkeys(("bubblewrap", "landlock"), box.traces["landlock"]))
    assert processes_with("9903") == []
    await eventually(lambda: not box._sandbox.alive)


# --- who gets one -----------------------------------------------------------------------------------------------------


async def test_it_is_refused_unless_the_spec_says_that_weak_isolation_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = BubblewrapCapabilities(
        available=False, tier=Tier.NONE, missing=("Namespaces are forbidden. Allow them.",)
    )
    monkeypatch.setattr(tiers, "_launcher_or_failure", lambda: nothing)
    with pytest.raises(PrerequisiteError, match=r"(?s)Allow them.*sees the host's processes.*isolation='weak'"):
        await select_backend(ContainerSpec())
    assert (await select_backend(SPEC)).name == "landlock"


@pytest.mark.skipif(tiers.probe().tier == "none", reason=" ".join(tiers.probe().missing))
async def test_full_isolation_comes_first_where_there_is_some() -> None:
    assert (await select_backend(SPEC)).name == "bubblewrap"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image": "/some/image"}, "takes 'host'"),
        ({"user": "root"}, "user 0 inside"),
        ({"mounts": (("/usr", "/data"),)}, "at other paths"),
        ({"ports": (80,)}, "ports inside"),
        ({"disk": "1MiB"}, "private files"),
    ],
)
def test_what_it_cannot_do_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(PrerequisiteError, match=words):
        get_backend("landlock").probe().check(ContainerSpec(isolation="weak", **fields))  # type: ignore[arg-type]


def test_a_kernel_without_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "landlock_version", lambda: 0)
    found = make_launcher()
    assert not isinstance(found, LandlockLauncher)
    assert "Linux 5.13" in found.missing[0]
    with pytest.raises(PrerequisiteError, match=r"Linux 5\.13"):
        found.check(SPEC)


def test_an_older_version_is_told_by_what_it_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "landlock_version", lambda: 3)
    found = make_launcher()
    assert isinstance(found, LandlockLauncher)
    assert any("end processes of the same user" in weak for weak in found.capabilities.isolation_gaps)
    found.close()
