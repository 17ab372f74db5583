"""Memory limits of simulators in processes, including their child processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from agentfly.core.errors import ResourceDied
from agentfly.resources.environments.environment import Environment
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.environments.worker_process import reap
from agentfly.resources.process import cgroups
from agentfly.resources.process.cgroups import writable_cgroup_parent
from agentfly.resources.resource import Status

HOG = "import time; held = bytearray(b'x') * {count}; time.sleep(60)"


class Hog:
    """A simulator that takes memory as it is told."""

    def fill(self, count: int) -> int:
        self.held = bytearray(b"x") * count
        return count

    def leave_children(self, number: int, count: int) -> None:
        for _ in range(number):
            subprocess.Popen([sys.executable, "-c", HOG.format(count=count)])

    def start_children(self, number: int, count: int) -> int:
        """Children that take so much each."""
        children = [subprocess.Popen([sys.executable, "-c", HOG.format(count=count)]) for _ in range(number)]
        for child in children:
            child.wait(timeout=60)
        raise BrokenPipeError("my children do not answer")

    def reserve(self, count: int) -> int:
        """Address space that is not used, as a virtual machine reserves it."""
        import mmap

        self.reserved = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        return count


@pytest.fixture(params=["control group", "measuring"], autouse=True)
def how_it_is_bounded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "measuring":
        monkeypatch.setattr(cgroups, "writable_cgroup_parent", lambda: None)
    elif writable_cgroup_parent() is None:
        pytest.skip("No control groups can be made here. Run the tests as root, or where a group is delegated.")
    return str(request.param)


async def hog() -> Environment:
    environment = Environment(EnvironmentSpec(factory=Hog, runs="process", memory="300MiB"), "hog-1")
    await environment.start()
    return environment


async def gone_for_lack_of_memory(environment: Environment) -> None:
    assert await environment.status() is Status.BROKEN
    groups = [Path(path) for path in environment.traces["memory_limit"]["directories"].values()]
    await environment.release()
    assert not any(group.exists() for group in groups)


@pytest.mark.slow
async def test_a_simulator_that_takes_too_much_is_gone_and_that_is_said() -> None:
    environment = await hog()
    assert await environment.fill(2**20) == 2**20
    with pytest.raises(ResourceDied, match=r"environment:Hog ran out of its limit of 300MiB during fill\(\)"):
        await environment.fill(2**29)
    await gone_for_lack_of_memory(environment)


@pytest.mark.slow
async def test_what_it_starts_counts_whatever_it_makes_of_the_loss() -> None:
    environment = await hog()
    with pytest.raises(ResourceDied, match=r"ran out of its limit of 300MiB during start_children\(\)"):
        await environment.start_children(3, 150 * 2**20)
    await gone_for_lack_of_memory(environment)


@pytest.mark.slow
async def test_it_is_noticed_between_calls() -> None:
    environment = await hog()
    await environment.leave_children(3, 150 * 2**20)
    for _ in range(100):
        if await environment.status() is Status.BROKEN:
            break
        await asyncio.sleep(0.1)
    with pytest.raises(ResourceDied, match="cannot be used"):
        await environment.fill(1)
    await gone_for_lack_of_memory(environment)


async def test_address_space_that_is_not_used_does_not_count() -> None:
    environment = await hog()
    assert await environment.reserve(2**33) == 2**33
    assert await environment.fill(100) == 100
    await environment.release()


async def test_what_a_killed_supervisor_left_under_the_bound_is_cleared_by_its_traces(how_it_is_bounded: str) -> None:
    environment = await hog()
    traces = environment.traces
    groups = [Path(path) for path in traces["memory_limit"]["directories"].values()]
    assert bool(groups) == (how_it_is_bounded == "control group")
    assert all(group.is_dir() for group in groups)
    await asyncio.to_thread(reap, traces)
    assert not any(group.exists() for group in groups)
    await environment.release()
