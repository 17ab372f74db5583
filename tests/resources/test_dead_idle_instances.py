"""Instances that died while idle: the next owner gets another one and sees no error."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentfly as af
from agentfly.core.errors import AcquireTimeout
from agentfly.core.events import EventStream, ResourceFailed
from agentfly.resources.containers.backend import get_backend
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.process.procfs import has_exited
from agentfly.resources.resource import Scope, Status
from agentfly.testing.fake_resource import FakeBackend, FakeResource, FakeSpec


async def idle(engine: ResourceEngine, spec: FakeSpec, count: int = 1) -> list[str]:
    """Have so many instances stand idle; the last is the first to be given out."""
    leases = [await engine.acquire(spec, f"before {number}") for number in range(count)]
    for lease in leases:
        await engine.release(lease)
        await asyncio.sleep(0.1)
    return [lease.instance for lease in leases]


def test_the_next_owner_gets_one_that_lives_and_is_told_nothing(play: Callable[..., None]) -> None:
    seen: list[ResourceFailed] = []
    events = EventStream()

    async def scene(engine: ResourceEngine) -> None:
        spec = FakeSpec(capacity=3, check_interval_s=None)
        first, second, third = await idle(engine, spec, 3)
        spec.world.kill(third)
        spec.world.kill(second)
        lease = await engine.acquire(spec, "a")
        assert lease.instance == first
        lease = await engine.acquire(spec, "b")
        assert lease.instance not in (first, second, third)
        await asyncio.sleep(1)
        assert spec.world.alive == {first, lease.instance}

    def keep(event: object) -> None:
        if isinstance(event, ResourceFailed):
            seen.append(event)

    with events.subscribed(keep):
        play(scene, events=events)
    assert ["had died" in event.error for event in seen] == [True, True]


def test_who_waited_first_is_served_first_though_what_it_was_given_was_dead(play: Callable[..., None]) -> None:
    async def scene(engine: ResourceEngine) -> None:
        spec = FakeSpec(capacity=1, check_interval_s=None)
        served: list[str] = []

        async def use(owner: str) -> None:
            lease = await engine.acquire(spec, owner)
            served.append(owner)
            await engine.release(lease)

        (dead,) = await idle(engine, spec)
        spec.world.kill(dead)
        await asyncio.gather(*(use(owner) for owner in "abcd"))
        assert served == ["a", "b", "c", "d"]

    play(scene)


def test_requests_that_share_a_place_wait_on_together(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(engine: ResourceEngine) -> None:
        spec = FakeSpec(capacity=1, check_interval_s=None)
        holder = await engine.acquire(spec, "before")
        waiting = [asyncio.create_task(engine.acquire(spec, "a")) for _ in range(3)]
        await asyncio.sleep(0.1)
        healthy_until_its_reset(monkeypatch, holder.instance)
        await engine.release(holder)
        leases = await asyncio.gather(*waiting)
        assert len({lease.id for lease in leases}) == 1
        assert leases[0].instance != holder.instance
        assert spec.world.count("reset") == 1

    play(scene)


def healthy_until_its_reset(monkeypatch: pytest.MonkeyPatch, instance: str) -> None:
    """Have an instance die between the health check after its reset and its hand-out."""

    def status(resource: FakeResource) -> Status:
        return Status.BROKEN if resource.instance == instance else Status.HEALTHY

    monkeypatch.setattr(FakeResource, "quick_status", status)


def test_of_a_set_the_dead_part_alone_is_waited_for_again(play: Callable[..., None]) -> None:
    async def scene(engine: ResourceEngine) -> None:
        world = FakeBackend()
        specs = [FakeSpec(world=world, name=name, capacity=1, check_interval_s=None) for name in ("box", "game", "db")]
        names = [(await idle(engine, spec))[0] for spec in specs]
        world.kill(names[0])
        world.kill(names[2])
        leases = await engine.acquire_all(specs, "a")
        assert [lease.spec for lease in leases] == specs
        assert leases[1].instance == names[1]
        assert not {lease.instance for lease in leases} & {names[0], names[2]}

    play(scene)


def test_a_shared_instance_that_is_dead_is_given_to_no_further_owner(play: Callable[..., None]) -> None:
    async def scene(engine: ResourceEngine) -> None:
        spec = FakeSpec(capacity=2, check_interval_s=None)
        first = await engine.acquire(spec, "a", scope=Scope.GLOBAL)
        spec.world.kill(first.instance)
        second, third = await asyncio.gather(*(engine.acquire(spec, owner, scope=Scope.GLOBAL) for owner in "bc"))
        assert second.instance == third.instance != first.instance
        assert await engine.check(first) is Status.BROKEN

    play(scene)


def test_a_request_that_has_to_wait_again_keeps_its_time_limit(play: Callable[..., None]) -> None:
    async def scene(engine: ResourceEngine) -> None:
        spec = FakeSpec(capacity=1, check_interval_s=None)
        (dead,) = await idle(engine, spec)
        spec.world.kill(dead)

        async def start_slowly(operation: str, instance: str) -> None:
            await asyncio.sleep(20 if operation == "start" else 0)

        spec.world.hook = start_slowly
        began = asyncio.get_running_loop().time()
        with pytest.raises(AcquireTimeout):
            await engine.acquire(spec, "a", timeout=5)
        assert asyncio.get_running_loop().time() == began + 5

    play(scene)


def test_a_quick_status_that_fails_is_that_of_a_broken_instance(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(engine: ResourceEngine) -> None:
        spec = FakeSpec(capacity=1)
        (broken,) = await idle(engine, spec)

        def fail(resource: FakeResource) -> Status:
            if resource.instance == broken:
                raise RuntimeError("no idea")
            return Status.HEALTHY

        monkeypatch.setattr(FakeResource, "quick_status", fail)
        assert (await engine.acquire(spec, "a")).instance != broken

    play(scene)


class Simulator:
    def reset(self) -> None:
        pass

    def pid(self) -> int:
        return os.getpid()


async def resting(engine: ResourceEngine) -> Any:
    """The resource behind the engine's only instance, once nobody has it and nothing is done with it."""
    async with asyncio.timeout(30):
        while (instance := engine.snapshot().pools[0].instances[0]).state != "idle":  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return engine._instances[instance.name]


async def test_a_simulator_whose_process_was_killed_while_idle_costs_the_next_owner_nothing(tmp_path: Path) -> None:
    spec = af.EnvironmentSpec(factory=Simulator, runs="process", reuse="reset", capacity=1, check_interval_s=None)
    async with ResourceEngine(ledger=tmp_path) as engine:
        lease = await engine.acquire(spec, "first")
        await engine.release(lease)
        pid = await (await resting(engine)).pid()
        kill_and_wait(pid)
        lease = await engine.acquire(spec, "second")
        assert await lease.resource.pid() != pid


async def test_a_sandbox_that_was_killed_while_idle_costs_the_next_owner_nothing(tmp_path: Path) -> None:
    if not (able := get_backend("bubblewrap").probe()).available:
        pytest.skip(" ".join(able.missing))
    spec = af.ContainerSpec(memory="64MiB", pids=16, capacity=1, check_interval_s=None, backend="bubblewrap")
    async with ResourceEngine(ledger=tmp_path) as engine:
        lease = await engine.acquire(spec, "first")
        await engine.release(lease)
        kill_and_wait((await resting(engine))._sandbox.process.launched.process.pid)
        lease = await engine.acquire(spec, "second")
        assert str(await lease.resource.run("echo alive")) == "alive"


def kill_and_wait(pid: int) -> None:
    """Kill a process and see it end, without the event loop getting to know."""
    descriptor = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        while not has_exited(descriptor):
            pass
    finally:
        os.close(descriptor)
