"""Frozen sandboxes: they use no processor time, work after thawing, and can always be removed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agentfly.contexts.context import Context
from agentfly.core.task import Task
from agentfly.core.trajectory import Trajectory
from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.resources.containers.runtime_directory import runtime_directory
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.engine import orphans
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.resource import Status

pytestmark = pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))

SPEC = ContainerSpec(memory="128MiB", pids=64, capacity=4, idle="freeze")
SPIN = "(while :; do :; done) & echo started"


def is_frozen(engine: ResourceEngine, instance: str) -> bool:
    found = [each for pool in engine.snapshot().pools for each in pool.instances if each.name == instance]
    return found[0].frozen


def files_in(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def until_frozen(engine: ResourceEngine, instance: str) -> None:
    """Return when an instance has been frozen: it counts as that from before the freeze."""
    async with asyncio.timeout(20):
        while not is_frozen(engine, instance):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        taken = -1
        while taken != (taken := ticks_of(instance)):  # noqa: ASYNC110
            await asyncio.sleep(0.3)


def ticks_of(instance: str) -> int:
    """The processor time that everything in a sandbox has taken."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if instance.encode() in (entry / "environ").read_bytes() + (entry / "cgroup").read_bytes():
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    total += int(fields[11]) + int(fields[12])
            except OSError:
                continue
    return total


@pytest.mark.slow
async def test_what_runs_in_a_box_stands_still_while_the_model_thinks_and_goes_on_after(tmp_path: Path) -> None:
    async with ResourceEngine(ledger=tmp_path) as engine:
        context = Context(Trajectory("r0", "g0", Task("do it")), engine)
        async with context.call() as call:
            box = await call.acquire(SPEC)
            busy = "while :; do for i in {1..10000}; do :; done; echo >> /tmp/ticks; sleep 0.01; done"
            await box.run(f"cd /tmp; X=kept; echo > ticks; ({busy}) & echo started")
        for _ in range(3):
            await until_frozen(engine, box.instance)
            async with context.call() as call:
                box = await call.acquire(SPEC)
                first = await box.run("wc -l < /tmp/ticks; echo $X $PWD")
                count, state = str(first).splitlines()
                assert state == "kept /tmp"
                went_on = f"until (( $(wc -l < /tmp/ticks) > {count} )); do sleep 0.01; done"
                assert (await box.run(went_on, timeout=30)).exit_code == 0
            await until_frozen(engine, box.instance)
            before = ticks_of(box.instance)
            assert before > 0 or probe().tier == "user"  # where they cannot be told from others
            await asyncio.sleep(0.5)
            assert ticks_of(box.instance) == before
        await context.close()


@pytest.mark.slow
async def test_a_frozen_box_is_healthy_is_reset_for_the_next_and_can_be_removed(tmp_path: Path) -> None:
    async with ResourceEngine(ledger=tmp_path) as engine:
        lease = await engine.acquire(SPEC, "first")
        await lease.resource.run(SPIN)
        await until_frozen(engine, lease.instance)
        assert await engine.check(lease) is Status.HEALTHY
        assert is_frozen(engine, lease.instance)
        await engine.release(lease)
        again = await engine.acquire(SPEC, "second")
        assert str(await again.resource.run("echo fine")) == "fine"
        await again.resource.run(SPIN)
        await until_frozen(engine, again.instance)
    assert not (runtime_directory() / lease.instance).exists()
    assert files_in(tmp_path) == []


@pytest.mark.slow
async def test_sixteen_frozen_boxes_are_all_removed_at_once(tmp_path: Path) -> None:
    spec = ContainerSpec(memory="64MiB", pids=32, capacity=16, idle="freeze")
    async with ResourceEngine(ledger=tmp_path) as engine:
        leases = await asyncio.gather(*(engine.acquire(spec, f"r{n}") for n in range(16)))
        await asyncio.gather(*(lease.resource.run("trap '' TERM; sleep 600 & echo") for lease in leases))
        await asyncio.gather(*(until_frozen(engine, lease.instance) for lease in leases))
    assert not any((runtime_directory() / lease.instance).exists() for lease in leases)
    assert files_in(tmp_path) == []


FREEZES = """
    import asyncio, sys
    from pathlib import Path
    from agentfly.resources.containers.spec import ContainerSpec
    from agentfly.resources.engine.engine import ResourceEngine

    async def main():
        async with ResourceEngine(ledger=Path(sys.argv[1])) as engine:
            lease = await engine.acquire(ContainerSpec(memory="64MiB", pids=32, idle="freeze"), "r")
            await lease.resource.run("(while :; do :; done) & sleep 600 & echo")
            while not engine.snapshot().pools[0].instances[0].frozen:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            print(lease.instance, flush=True)
            await asyncio.sleep(600)

    asyncio.run(main())
"""


@pytest.mark.slow
def test_a_box_that_was_frozen_when_its_process_was_killed_is_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(FREEZES), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    instance = process.stdout.readline().strip()
    process.kill()
    process.communicate()
    asyncio.run(orphans.reap_orphans(tmp_path))
    assert not (runtime_directory() / instance).exists()
    assert ticks_of(instance) == 0
    assert files_in(tmp_path) == []
