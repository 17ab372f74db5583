"""Bubblewrap containers: resets and their generations, the lifetime of snapshots, freezing."""

# ruff: noqa: ASYNC240  (looking at the host's files is what these tests are about)

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agentfly.core.errors import ResourceDied, ResourceError, ResourceStartError, ToolError
from agentfly.resources.containers.backend import reap
from agentfly.resources.containers.bubblewrap import snapshots
from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.bubblewrap.rootfs import OverlayRootfsBuilder
from agentfly.resources.containers.bubblewrap.snapshots import SnapshotStore
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.runtime_directory import runtime_directory
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.process.cgroups import Cgroup, writable_cgroup_parent
from agentfly.resources.resource import Status

pytestmark = pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))
forks = pytest.mark.skipif(not probe().fork, reason="needs to mount")

SPEC = ContainerSpec(memory="256MiB", pids=64, backend="bubblewrap")


def lives_of(instance: str) -> list[str]:
    home = runtime_directory() / instance
    return sorted(path.name for path in home.iterdir()) if home.exists() else []


def groups_of(instance: str) -> list[Path]:
    home = writable_cgroup_parent()
    return [path for parent in home.parents.values() for path in parent.glob(f"agentfly-{instance}-*")] if home else []


# --- generations ------------------------------------------------------------------------------------------------------


async def test_after_the_first_reset_the_next_life_stands_ready_and_goes_with_the_box(
    eventually: Callable[[Callable[[], bool]], Awaitable[None]], name: Callable[[], str]
) -> None:
    box = Container(SPEC, name())
    await box.start()
    assert lives_of(box.instance) == ["0"]
    await box.reset()
    await eventually(lambda: lives_of(box.instance) == ["1", "2"])
    await box.reset()
    await box.run("echo x > /workspace/x")
    await box.reset()
    assert (await box.run("ls")).stdout == ""
    await box.release()
    assert lives_of(box.instance) == []
    assert groups_of(box.instance) == []


async def test_a_life_that_stood_ready_and_died_is_not_used(
    eventually: Callable[[Callable[[], bool]], Awaitable[None]], name: Callable[[], str]
) -> None:
    box = Container(SPEC, name())
    await box.start()
    await box.reset()
    ready = await asyncio.shield(box._sandbox._standby)  # type: ignore[attr-defined]
    ready.process.kill()
    await eventually(lambda: not ready.alive)
    await box.reset()
    assert (await box.run("echo alive")).stdout == "alive\n"
    await box.release()
    assert lives_of(box.instance) == []
    assert groups_of(box.instance) == []


async def test_a_next_life_that_cannot_begin_is_the_next_resets_matter(
    monkeypatch: pytest.MonkeyPatch, name: Callable[[], str]
) -> None:
    box = Container(SPEC, name())
    await box.start()
    launch = Launcher.launch

    def fail(*_: object) -> None:
        raise OSError("as in the test")

    begin = box._sandbox._begin  # type: ignore[attr-defined]
    began = []

    async def begin_once() -> object:
        began.append(1)
        if len(began) > 1:
            monkeypatch.setattr(Launcher, "launch", fail)
        return await begin()

    monkeypatch.setattr(box._sandbox, "_begin", begin_once)
    await box.reset()
    await asyncio.wait({box._sandbox._standby})  # type: ignore[attr-defined]
    assert await box.status() is Status.HEALTHY
    with pytest.raises(ResourceStartError, match="as in the test"):
        await box.reset()
    monkeypatch.setattr(Launcher, "launch", launch)
    await box.release()
    assert lives_of(box.instance) == []


async def test_a_release_during_a_reset_at_any_point_leaves_nothing(name: Callable[[], str]) -> None:
    for wait in (0.0, 0.001, 0.003, 0.006, 0.01, 0.02):
        box = Container(SPEC, name())
        await box.start()
        await box.reset()
        reset = asyncio.create_task(box.reset())
        await asyncio.sleep(wait)
        await box.release()
        await asyncio.wait([reset])
        assert lives_of(box.instance) == []
        assert groups_of(box.instance) == []


@pytest.mark.slow
async def test_counts_of_a_life_before_are_not_taken_for_those_of_the_next(
    processes_with: Callable[[str], list[int]], name: Callable[[], str]
) -> None:
    box = Container(SPEC, name())
    await box.start()
    hog = "x=$(head -c 600000000 /dev/zero | tr '\\0' x); echo ${#x}"
    assert (await box.run(hog, timeout=60)).exit_code != 0
    await box.reset()
    result = await box.run("exit 1")
    assert result.killed_by is None
    await box.release()


# --- snapshots --------------------------------------------------------------------------------------------------------


def snapshots_of(box: Container) -> SnapshotStore:
    trees = box._sandbox._launcher._rootfs_builder  # type: ignore[attr-defined]
    assert isinstance(trees, OverlayRootfsBuilder)
    return trees.snapshots


@forks
async def test_a_twin_is_acquired_through_the_engine_as_any_other() -> None:
    async with ResourceEngine() as engine:
        first = await engine.acquire(SPEC, "a rollout")
        await first.resource.run("echo here > file; echo x > /usr/local/share/file; rm /usr/bin/yes")
        twin = await engine.acquire(await first.resource.fork(), "a rollout")
        assert twin.resource.instance != first.resource.instance
        look = "cat file /usr/local/share/file; ls /usr/bin/yes"
        assert (await twin.resource.run(look)).stdout == "here\nx\n"
        await engine.release(first)
        assert (await twin.resource.run(look)).stdout == "here\nx\n"
        await engine.release(twin)


@pytest.mark.slow
@forks
async def test_a_snapshot_lasts_as_long_as_a_spec_or_a_box_needs_it(name: Callable[[], str]) -> None:
    box = Container(SPEC, name())
    await box.start()
    await box.run("head -c 1000000 /dev/urandom > file")
    spec = await box.fork()
    snapshots = snapshots_of(box)
    known = spec.image.rpartition(":")[2]
    await box.release()
    twin = Container(spec, name())
    await twin.start()
    del spec
    gc.collect()
    await twin.reset()
    assert (await twin.run("wc -c < file")).stdout == "1000000\n"
    assert known in snapshots._snapshots
    await twin.release()
    del twin
    gc.collect()
    other = Container(SPEC, name())
    await other.start()
    await other.release()
    assert known not in snapshots._snapshots


@forks
async def test_a_copy_of_a_snapshots_name_is_refused_once_the_snapshot_is_gone(name: Callable[[], str]) -> None:
    box = Container(SPEC, name())
    await box.start()
    copy = pickle.loads(pickle.dumps(await box.fork()))
    gc.collect()
    twin = Container(copy, name())
    with pytest.raises(ResourceStartError, match="as long as the spec that fork\\(\\) returned is referenced"):
        await twin.start()
    await twin.release()
    await box.release()


@forks
async def test_a_fork_that_is_cancelled_while_it_lets_go_does_not_leave_the_next_one_frozen(
    monkeypatch: pytest.MonkeyPatch, name: Callable[[], str]
) -> None:
    box = Container(SPEC, name())
    await box.start()
    thaws, thawed = threading.Event(), threading.Event()
    thaw = Cgroup.thaw

    def slowly(group: Cgroup) -> None:
        thaws.set()
        time.sleep(0.05)
        thaw(group)
        thawed.set()

    with monkeypatch.context() as patched:
        patched.setattr(Cgroup, "thaw", slowly)
        fork = asyncio.create_task(box.fork())
        await asyncio.to_thread(thaws.wait, 10)
        fork.cancel()
        await asyncio.wait([fork])
        await asyncio.to_thread(thawed.wait, 10)
    await box.fork()
    assert (await box.run("echo alive", timeout=10)).stdout == "alive\n"
    await box.release()


@pytest.mark.slow
@forks
async def test_a_fork_that_is_cancelled_or_fails_leaves_nothing_and_the_box_goes_on(
    monkeypatch: pytest.MonkeyPatch, name: Callable[[], str]
) -> None:
    box = Container(SPEC, name())
    await box.start()
    snapshots = snapshots_of(box)
    before = {path.name for path in snapshots._home.iterdir()} if snapshots._home.exists() else set()

    def fail(*_: object) -> None:
        raise ResourceError("as in the test")

    with monkeypatch.context() as patched:
        patched.setattr(SnapshotStore, "copy_layers", fail)
        with pytest.raises(ResourceError, match="as in the test"):
            await box.fork()
    for moment in (0.0, 0.001, 0.002, 0.005, 0.01):  # while it is stopped, copied, and let go on
        fork = asyncio.create_task(box.fork())
        await asyncio.sleep(moment)
        fork.cancel()
        await asyncio.wait([fork])
        assert (await box.run("echo alive", timeout=10)).stdout == "alive\n"
    seen = Path(f"{snapshots._thread_root}{snapshots._home}")
    assert {path.name for path in seen.iterdir()} - before <= {
        snapshot.directory.name for snapshot in snapshots._snapshots.values()
    }
    await box.release()


@forks
async def test_files_that_lie_too_deep_to_be_copied_are_a_matter_for_the_model(name: Callable[[], str]) -> None:
    box = Container(SPEC, name())
    await box.start()
    deep = "import os; [(os.mkdir('deep' * 20), os.chdir('deep' * 20)) for _ in range(100)]"
    await box.run(f'python3 -c "{deep}"')
    with pytest.raises(ToolError, match="File name too long") as refused:
        await box.fork()
    assert len(str(refused.value)) < 500
    await box.run("rm -rf deep*")
    twin = Container(await box.fork(), name())
    await twin.start()
    assert (await twin.run("ls")).stdout == ""
    await asyncio.gather(box.release(), twin.release())


@forks
async def test_the_limit_of_private_files_holds_in_a_fork_too(name: Callable[[], str]) -> None:
    box = Container(ContainerSpec(memory="256MiB", disk="16MiB"), name())
    await box.start()
    await box.run("head -c 12000000 /dev/zero > file")
    twin = Container(await box.fork(), name())
    await twin.start()
    result = await twin.run("head -c 30000000 /dev/zero > hog; wc -c < file")
    assert "No space left" in result.stderr
    assert result.stdout == "12000000\n"
    await asyncio.gather(box.release(), twin.release())


# --- ice --------------------------------------------------------------------------------------------------------------


async def test_a_box_that_is_killed_in_the_ice_is_broken(
    eventually: Callable[[Callable[[], bool]], Awaitable[None]], name: Callable[[], str]
) -> None:
    box = Container(SPEC, name())
    await box.start()
    await box.freeze()
    box._sandbox.process.kill()  # type: ignore[attr-defined]
    await eventually(lambda: not box._sandbox.alive)
    assert await box.status() is Status.BROKEN
    await box.thaw()
    with pytest.raises(ResourceDied):
        await box.run("true")
    await box.release()
    assert lives_of(box.instance) == []


@pytest.mark.slow
async def test_frozen_boxes_of_a_process_that_is_killed_are_reaped(
    eventually: Callable[[Callable[[], bool]], Awaitable[None]], name: Callable[[], str]
) -> None:
    instance = name()
    program = f"""
import asyncio, json
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec
async def main():
    box = Container(ContainerSpec(memory="256MiB", backend="bubblewrap"), {instance!r})
    await box.start()
    await box.reset()
    await box.run("sleep 9991 &")
    await box.freeze()
    print(json.dumps(box.traces), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    traces = json.loads(await owner.stdout.readline())
    owner.kill()
    await owner.wait()
    await asyncio.to_thread(reap, traces)
    assert lives_of(instance) == []
    assert groups_of(instance) == []


def test_a_snapshot_that_cannot_be_removed_is_tried_again_and_fails_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("mount", "unmount"):
        monkeypatch.setattr(snapshots, call, lambda *_: None)
    store = SnapshotStore(tmp_path / "home")
    made = [store.create({"": "/below"}, 1) for _ in range(3)]
    held = [store.publish(one) for one in made]
    busy = made[0].directory / "busy"
    busy.touch()  # as a mount point in use
    held.clear()
    gc.collect()
    store.remove_unreferenced()
    assert [one.directory.exists() for one in made] == [True, False, False]
    busy.unlink()
    store.remove_unreferenced()
    assert not made[0].directory.exists()


@pytest.mark.parametrize("failing", ["the end of the old generation", "the start of the new one"])
async def test_a_reset_that_fails_in_one_half_waits_for_the_other_and_leaves_nothing_after_the_release(
    monkeypatch: pytest.MonkeyPatch, name: Callable[[], str], failing: str
) -> None:
    box = Container(SPEC, name())
    await box.start()
    sandbox = box._sandbox
    done = []

    begin, end = sandbox._begin, sandbox._end  # type: ignore[attr-defined]

    async def fails() -> object:
        raise OSError("as in the test")

    async def begins() -> object:
        await asyncio.sleep(0.05)
        done.append("begin")
        return await begin()

    async def ends(generation: object) -> None:
        if generation is None:  # there was no standby
            return
        if failing == "the end of the old generation":
            await fails()
        await asyncio.sleep(0.05)
        done.append("end")
        await end(generation)

    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "_begin", begins if failing == "the end of the old generation" else fails)
        patch.setattr(sandbox, "_end", ends)
        with pytest.raises(OSError, match="as in the test"):
            await box.reset()
        assert len(done) == 1
    assert await box.status() is Status.BROKEN
    await box.release()
    assert lives_of(box.instance) == []
    assert groups_of(box.instance) == []
