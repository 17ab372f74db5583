"""Containers from start to release: the state after a reset, and nothing is left afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agentfly.benchmarks.resources.sandboxes import measure_bubblewrap
from agentfly.core.errors import ResourceDied, ResourceStartError
from agentfly.resources.containers.backend import reap
from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.runtime_directory import runtime_directory
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.process.cgroups import writable_cgroup_parent
from agentfly.resources.resource import Status

pytestmark = pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))

SPEC = ContainerSpec(memory="256MiB", pids=64)


def first_process(box: Container) -> int:
    """The host's id of a container's process 1."""
    assert box._sandbox is not None
    assert box._sandbox.process.pid_namespace is not None  # type: ignore[attr-defined]
    return box._sandbox.process.pid_namespace.init_pid  # type: ignore[attr-defined]


def traces_of(instance: str) -> list[Path]:
    """Directories on the host that go by the name of an instance."""
    home = writable_cgroup_parent()
    groups = (
        [path for parent in home.parents.values() for path in parent.glob(f"agentfly-{instance}-*")] if home else []
    )
    return [path for path in (runtime_directory() / instance, *groups) if path.exists()]


async def test_reset_brings_back_the_state_after_start(
    name: Callable[[], str], processes_with: Callable[[str], list[int]]
) -> None:
    box = Container(ContainerSpec(setup=("echo ready > /workspace/setup; S=1; cd /tmp",)), name())
    try:
        await box.start()
        await box.run("echo x > /workspace/mine; echo x > ~/mine; echo x > /var/tmp/mine; echo x > /dev/shm/mine")
        await box.run("rm /workspace/setup; X=5; cd /; sleep 7307 & echo x > /usr/local/bin/mine")
        await box.reset()
        assert processes_with("7307") == []
        left = await box.run("pwd; echo x$X $S; find /workspace /home /var/tmp /tmp /dev/shm /usr/local -name mine")
        assert left.stdout == "/tmp\nx 1\n"
        assert await box.read_file("setup") == b"ready\n"
        assert await box.status() is Status.HEALTHY
    finally:
        await box.release()


async def test_a_health_check_during_a_reset_finds_the_container_healthy(box: Container) -> None:
    reset = asyncio.create_task(box.reset())
    found = set()
    while not reset.done():
        found.add(await box.status())
        await asyncio.sleep(0.001)
    await reset
    assert found == {Status.HEALTHY}
    assert (await box.run("echo alive")).stdout == "alive\n"


async def test_resets_at_once_come_one_after_the_other(box: Container) -> None:
    await asyncio.gather(*(box.reset() for _ in range(3)))
    assert (await box.run("echo alive")).stdout == "alive\n"


async def test_a_reset_that_fails_or_is_cancelled_leaves_a_broken_container(
    tmp_path: Path,
    name: Callable[[], str],
    processes_with: Callable[[str], list[int]],
    eventually: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "flag").touch()
    spec = ContainerSpec(mounts=((str(data), "/data"),), setup=("[[ -e /data/flag ]]", "sleep 0.3"))
    box = Container(spec, name())
    try:
        await box.start()
        reset = asyncio.create_task(box.reset())
        await eventually(lambda: processes_with("0.3") != [])
        reset.cancel()
        await asyncio.wait([reset])
        assert await box.status() is Status.BROKEN
        (data / "flag").unlink()
        with pytest.raises(ResourceStartError, match="flag"):
            await box.reset()
        assert await box.status() is Status.BROKEN
    finally:
        await box.release()
    assert traces_of(box.instance) == []


async def test_a_release_ends_a_reset_under_way_and_nothing_is_started_after_it(
    name: Callable[[], str],
    processes_with: Callable[[str], list[int]],
    eventually: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:
    box = Container(ContainerSpec(setup=("sleep 0.4",)), name())
    await box.start()
    resets = [asyncio.create_task(box.reset()) for _ in range(2)]
    await eventually(lambda: processes_with("0.4") != [])
    await box.release()
    for reset in resets:
        with pytest.raises(ResourceDied, match="released"):
            await reset
    assert await box.status() is Status.BROKEN
    assert traces_of(box.instance) == []


async def test_releases_at_once_are_fine_for_container_and_sandbox(box: Container) -> None:
    sandbox = box._sandbox
    assert sandbox is not None
    await asyncio.gather(box.release(), sandbox.stop(), sandbox.stop(), box.release())
    assert traces_of(box.instance) == []


def test_a_measurement_that_fails_leaves_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reset(box: Container) -> None:
        raise ResourceDied("as in the test")

    monkeypatch.setattr(Container, "reset", reset)
    with pytest.raises(ResourceDied, match="as in the test"):
        measure_bubblewrap(rounds=1, commands=1, count=1)
    assert [path for path in runtime_directory().iterdir() if path.name.startswith(f"bench-{os.getpid()}")] == []


async def test_a_setup_command_that_fails_fails_the_start_with_its_output(name: Callable[[], str]) -> None:
    box = Container(ContainerSpec(setup=("true", "echo because; exit 5")), name())
    with pytest.raises(ResourceStartError, match=r"because[\s\S]*exit code 5"):
        await box.start()
    await box.release()
    assert traces_of(box.instance) == []


async def test_release_leaves_no_process_directory_or_control_group(
    box: Container,
    processes_with: Callable[[str], list[int]],
    eventually: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:
    await box.run("setsid sleep 7308 >/dev/null 2>&1 & (setsid sh -c 'trap \"\" TERM HUP INT; sleep 7308' &)")
    await eventually(lambda: len(processes_with("7308")) >= 2)
    assert traces_of(box.instance) != []
    await box.release()
    assert processes_with("7308") == []
    assert traces_of(box.instance) == []
    await box.release()


async def test_release_before_start_and_after_a_failed_start_is_fine(name: Callable[[], str]) -> None:
    box = Container(SPEC, name())
    await box.release()
    other = Container(ContainerSpec(image="/no/such/image"), name())
    with pytest.raises(ResourceStartError, match="no directory with an unpacked root file system"):
        await other.start()
    await other.release()
    assert traces_of(other.instance) == []


async def test_a_name_that_is_taken_harms_nobody(box: Container) -> None:
    twin = Container(SPEC, box.instance)
    with pytest.raises(ResourceStartError):
        await twin.start()
    await twin.release()
    assert (await box.run("echo alive")).stdout == "alive\n"


async def test_a_killed_sandbox_is_broken_and_its_commands_fail_as_infrastructure(box: Container) -> None:
    call = asyncio.create_task(box.run("sleep 60"))
    await asyncio.sleep(0.05)
    os.kill(first_process(box), 9)
    with pytest.raises(ResourceDied):
        await call
    assert await box.status() is Status.BROKEN
    with pytest.raises(ResourceDied):
        await box.run("true")


async def test_a_start_cancelled_at_any_point_leaves_nothing(name: Callable[[], str]) -> None:
    for wait in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.012):
        box = Container(SPEC, name())
        start = asyncio.create_task(box.start())
        await asyncio.sleep(wait)
        start.cancel()
        await asyncio.wait([start])
        await box.release()
        assert traces_of(box.instance) == []


async def test_sixteen_start_work_and_end_at_once(name: Callable[[], str]) -> None:
    boxes = [Container(SPEC, name()) for _ in range(16)]
    try:
        await asyncio.gather(*(box.start() for box in boxes))
        results = await asyncio.gather(*(box.run(f"echo {n} > mine; cat mine") for n, box in enumerate(boxes)))
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(16)]
    finally:
        await asyncio.gather(*(box.release() for box in boxes))
    assert [traces_of(box.instance) for box in boxes] == [[]] * 16


@pytest.mark.slow
async def test_sandboxes_die_with_a_process_that_is_killed_and_reap_removes_their_traces(
    name: Callable[[], str],
    processes_with: Callable[[str], list[int]],
    eventually: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:
    instance = name()
    program = f"""
import asyncio, json
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec
async def main():
    box = Container(ContainerSpec(memory="256MiB"), {instance!r})
    before = box.traces
    await box.start()
    await box.run("setsid sleep 7309 >/dev/null 2>&1 &")
    print(json.dumps([before, box.traces]), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    before, after = json.loads(await owner.stdout.readline())
    owner.kill()
    await owner.wait()
    await eventually(lambda: processes_with("7309") == [])
    assert traces_of(instance) != []
    assert before["bubblewrap"]["scratch"] == after["bubblewrap"]["scratch"]
    reap(before)
    assert traces_of(instance) == []
    reap(after)


async def test_reap_ends_a_sandbox_that_still_runs_and_no_other(
    box: Container, name: Callable[[], str], eventually: Callable[[Callable[[], bool]], Awaitable[None]]
) -> None:
    other = Container(SPEC, name())
    await other.start()
    traces = other.traces
    await asyncio.to_thread(reap, traces)
    assert traces_of(other.instance) == []
    assert (await box.run("echo alive")).stdout == "alive\n"
    await eventually(lambda: other._sandbox.shell is not None and other._sandbox.shell.dead)  # type: ignore[attr-defined]
    await other.release()
