"""Containers in the engine: few sandboxes for many rollouts, no state passes between owners, and none is left."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from agentfly.core.errors import PrerequisiteError, ResourceDied, ResourceError
from agentfly.resources.containers.backend import reap
from agentfly.resources.containers.bubblewrap.backend import Bubblewrap, probe
from agentfly.resources.containers.bubblewrap.launcher import Launcher, Tier
from agentfly.resources.containers.bubblewrap.program import BubblewrapProgram
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.runtime_directory import runtime_directory
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.engine import orphans
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.kind import ResourceKind
from agentfly.resources.process.procfs import descendants
from agentfly.resources.resource import Status

pytestmark = pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))

SPEC = ContainerSpec(memory="128MiB", pids=64, capacity=4)


async def test_rollouts_share_few_sandboxes_and_never_see_what_another_left(tmp_path: Path) -> None:
    used: set[str] = set()

    async def rollout(engine: ResourceEngine, owner: str) -> None:
        lease = await engine.acquire(SPEC, owner)
        again = await engine.acquire(SPEC, owner)
        assert again is lease
        used.add(lease.instance)
        box = lease.resource
        assert str(await box.run("ls -A /workspace /tmp; echo -n $SECRET")) == "/tmp:\n\n/workspace:"
        await box.run(f"SECRET={owner}; echo {owner} > /workspace/secret; sleep 600 & cd /tmp; touch mine")
        assert (await box.run("cat /workspace/secret; echo $SECRET")).stdout == f"{owner}\n{owner}\n"
        await engine.release_owner(owner)

    async with ResourceEngine(ledger=tmp_path) as engine:
        await asyncio.gather(*(rollout(engine, f"rollout-{n}") for n in range(24)))
        assert len(used) <= 4
    assert not any((runtime_directory() / instance).exists() for instance in used)


async def test_a_sandbox_that_dies_is_replaced_for_the_next_owner(tmp_path: Path) -> None:
    async with ResourceEngine(ledger=tmp_path) as engine:
        lease = await engine.acquire(SPEC, "first")
        sandbox = lease.resource._sandbox
        assert sandbox is not None
        sandbox.process.kill()  # type: ignore[attr-defined]
        with pytest.raises(ResourceDied):
            await lease.resource.run("sleep 60")
        assert await engine.check(lease) is Status.BROKEN
        await engine.release_owner("first")
        other = await engine.acquire(SPEC, "second")
        assert str(await other.resource.run("echo alive")) == "alive"


async def test_an_owners_reset_and_a_health_check_do_not_disturb_each_other(tmp_path: Path) -> None:
    async with ResourceEngine(ledger=tmp_path) as engine:
        lease = await engine.acquire(SPEC, "first")
        reset = asyncio.create_task(lease.resource.reset())
        while not reset.done():
            assert await engine.check(lease) is Status.HEALTHY
            await asyncio.sleep(0.001)
        await reset
        assert str(await lease.resource.run("echo alive")) == "alive"


@pytest.mark.slow
async def test_a_box_takes_no_processor_time_while_its_owner_does_not_use_it(tmp_path: Path) -> None:
    async with ResourceEngine(ledger=tmp_path) as engine:
        lease = await engine.acquire(replace(SPEC, idle="freeze"), "owner")
        first = lease.resource._sandbox.process.pid_namespace.init_pid  # type: ignore[attr-defined]

        def taken() -> int:
            """Ticks of processor time that its processes have taken."""
            times = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in descendants(first)]
            return sum(int(fields[11]) + int(fields[12]) for fields in times)

        for _ in range(2):
            await lease.resource.run("(while :; do :; done) & sleep 0.3; kill -0 $!")
            async with asyncio.timeout(20):
                before = -1
                while before != (before := taken()):  # noqa: ASYNC110  (until other processes are stopped)
                    await asyncio.sleep(0.2)
            assert before > 0
            assert await engine.check(lease) is Status.HEALTHY
            assert (await lease.resource.run("kill $!; echo alive")).stdout == "alive\n"
        await engine.release_owner("owner")


class StuckSpec(ContainerSpec):
    """A sandbox whose bubblewrap never says that it is up, and never closes what it should say it on."""


@pytest.mark.slow
async def test_a_sandbox_that_never_gets_up_fails_in_time_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    program = runtime_directory() / f"bwrap-{os.getpid()}"  # where any user can read it
    program.write_text('#!/bin/bash\n[[ "$*" != *--info-fd* ]] || sleep 7321\n')
    program.chmod(0o755)
    stuck = await asyncio.to_thread(Launcher, Tier.USER, BubblewrapProgram(program), None)
    made = []

    def make(spec: ContainerSpec, instance: str) -> Container:
        made.append(instance)
        return Container(spec, instance, backend=Bubblewrap(stuck))

    StuckSpec.kind = ResourceKind("container", make, reap=reap)
    async with ResourceEngine(ledger=tmp_path) as engine:
        spec = replace(SPEC, capacity=9)
        starts = [engine.acquire(spec, f"healthy-{n}") for n in range(9)]
        never = engine.acquire(StuckSpec(memory="128MiB", start_timeout_s=2), "stuck")
        refusal, *leases = await asyncio.gather(never, *starts, return_exceptions=True)
        assert isinstance(refusal, ResourceError)
        assert "start" in str(refusal)
        for lease in leases:
            assert not isinstance(lease, BaseException)
            assert str(await lease.resource.run("echo alive")) == "alive"
        assert made
    # the last failed start is cleaned up off the caller's path; once the engine has closed, nothing may be left
    assert [instance for instance in made if (runtime_directory() / instance).exists()] == []
    stuck.close()
    program.unlink()


async def test_a_spec_that_cannot_be_enforced_fails_its_request_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = PrerequisiteError("Leave cpus at 0, or do this.")

    def check(*_: object) -> None:
        raise refuses

    monkeypatch.setattr("agentfly.resources.containers.bubblewrap.launcher.BubblewrapCapabilities.check", check)
    async with ResourceEngine(ledger=tmp_path) as engine:
        with pytest.raises(Exception, match="Leave cpus at 0, or do this"):
            await engine.acquire(SPEC, "first")


@pytest.mark.slow
async def test_the_next_engine_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    program = """
    import asyncio, sys
    from pathlib import Path
    from agentfly.resources.containers.spec import ContainerSpec
    from agentfly.resources.engine.engine import ResourceEngine

    async def main():
        async with ResourceEngine(ledger=Path(sys.argv[1])) as engine:
            spec = ContainerSpec(memory="128MiB", pids=64)
            leases = [await engine.acquire(spec, f"rollout-{n}") for n in range(3)]
            await leases[0].resource.reset()
            print(*(lease.instance for lease in leases), flush=True)
            await asyncio.sleep(60)

    asyncio.run(main())
    """
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(program), str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    instances = (await owner.stdout.readline()).decode().split()
    owner.kill()
    await owner.wait()
    async with ResourceEngine(ledger=tmp_path) as engine:
        assert [(runtime_directory() / instance).exists() for instance in instances] == [False] * 3
        lease = await engine.acquire(SPEC, "next")
        assert await orphans.reap_orphans(tmp_path) == []
        assert str(await lease.resource.run("echo alive")) == "alive"
