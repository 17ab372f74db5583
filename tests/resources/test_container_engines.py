"""Containers of dockerd and podman: behaviour beyond the contract in `test_containers_contract.py`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import pytest

from agentfly.core.errors import PrerequisiteError, ResourceDied, ResourceError, ResourceStartError, ToolError
from agentfly.resources.containers.backend import Backend, reap
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.docker import images
from agentfly.resources.containers.docker.engine import connect
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.engine import orphans
from agentfly.resources.resource import Status
from agentfly.testing.resource_conformance import check_resource

Start = Callable[..., Coroutine[Any, Any, Container]]


class Ground(Protocol):
    """See `conftest.py`."""

    backend: Any
    image: str

    def spec(self, **fields: Any) -> ContainerSpec: ...


async def containers_of(ground: Ground, instance: str) -> list[str]:
    """The engine's ids of an instance's containers, running or not."""
    async with connect(ground.backend.address) as client:
        found = await client.containers.list(all=True, filters={"label": [f"agentfly.instance={instance}"]})
        return [container.id for container in found]


async def own_images(ground: Ground) -> list[str]:
    async with connect(ground.backend.address) as client:
        return sorted(image["Id"] for image in await client.images.list(filters={"label": ["agentfly.owner"]}))


@pytest.fixture
def settings(engine_ground: Ground, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What leads a process to the private engine by the usual ways."""
    variable = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}[engine_ground.backend.name]
    monkeypatch.setenv(variable, engine_ground.backend.address)
    return {variable: engine_ground.backend.address}


class Proxy:
    """A way to an engine that can go bad."""

    def __init__(self, engine: str) -> None:
        self._engine = engine.removeprefix("unix://")
        self._open: list[dict[str, bool]] = []
        self.refuse_next_removal = False
        self.removals = 0

    def drop_silently(self) -> None:
        """Let nothing through any more on the connections that there are, and close none."""
        for connection in self._open:
            connection["through"] = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(self._engine)
        connection = {"through": True}
        self._open.append(connection)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pass(reader, far_writer, writer, connection))
            group.create_task(self._pass(far_reader, writer, None, connection))

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: asyncio.StreamWriter | None,
        connection: dict[str, bool],
    ) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while chunk := await reader.read(65536):
                if answer is not None and chunk.startswith(b"DELETE "):
                    self.removals += 1
                    if self.refuse_next_removal:
                        self.refuse_next_removal = False
                        answer.write(b"HTTP/1.1 500 Server Error\r\nContent-Length: 4\r\n\r\nbusy")
                        continue
                if connection["through"]:
                    writer.write(chunk)
                    await writer.drain()
            if connection["through"]:
                writer.close()


@pytest.fixture
async def proxy(engine_ground: Ground, tmp_path: Path) -> AsyncIterator[tuple[Proxy, Backend]]:
    """A bad way to the engine, and a backend that goes it."""
    made = Proxy(engine_ground.backend.address)
    backend = type(engine_ground.backend)(f"unix://{tmp_path / 'proxy.sock'}")
    server = await asyncio.start_unix_server(made.serve, tmp_path / "proxy.sock")
    try:
        await asyncio.to_thread(backend.probe)
        yield made, backend
    finally:
        server.close()


# --- what an engine is asked for --------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_containers_of_engines_keep_the_contract_of_resources(
    engine_ground: Ground, settings: dict[str, str]
) -> None:
    spec = engine_ground.spec(backend=engine_ground.backend.name)
    await check_resource(
        spec,
        dirty=lambda box: box.run("echo mine > /workspace/mine; X=5; sleep 60 &"),
        is_clean=_is_clean,
    )


async def _is_clean(box: Container) -> bool:
    return (await box.run("ls /workspace; echo $X; jobs")).stdout == "\n"


async def test_an_image_that_is_not_there_is_refused_with_the_cure(engine_ground: Ground, start: Start) -> None:
    engine = engine_ground.backend.name
    with pytest.raises(ResourceStartError, match=rf"{engine} has no image 'no-such-image:1'[\s\S]*'{engine} images'"):
        await start(engine_ground, image="no-such-image:1")


async def test_an_engine_that_is_not_there_is_no_backend_and_says_how_to_get_it(engine_ground: Ground) -> None:
    absent = type(engine_ground.backend)("unix:///no/such.sock")
    assert not absent.probe().available
    with pytest.raises(PrerequisiteError, match="Install"):
        absent.probe().check(engine_ground.spec())


async def test_a_limit_or_runtime_that_cannot_be_is_refused_with_the_cure(engine_ground: Ground, start: Start) -> None:
    with pytest.raises(PrerequisiteError, match="user at 'agent'"):
        await start(engine_ground, disk="16MiB", user="root")
    with pytest.raises((PrerequisiteError, ResourceStartError), match="no-such-runtime"):
        await start(engine_ground, runtime="no-such-runtime")


@pytest.mark.parametrize("user", ["root", "agent"])
async def test_mounts_are_seen_and_cannot_be_written(
    engine_ground: Ground, start: Start, with_a_mount_below: Path, user: str
) -> None:
    (with_a_mount_below / "given").write_text("from the host")
    (with_a_mount_below / "below" / "given").write_text(", and below")
    box = await start(engine_ground, mounts=((str(with_a_mount_below), "/mnt/given"),), user=user)
    result = await box.run("cat /mnt/given/given /mnt/given/below/given; touch /mnt/given/{,below/}new")
    assert result.stdout == "from the host, and below"
    assert result.stderr.count("Read-only") == 2


async def test_a_workdir_that_has_files_in_the_image_is_not_hidden(engine_ground: Ground, start: Start) -> None:
    with pytest.raises(ResourceStartError, match="user='root' to work on them"):
        await start(engine_ground, workdir="/usr/share/perl5")
    box = await start(engine_ground, workdir="/usr/share/perl5", user="root")
    assert (await box.run("ls | wc -l; touch new; ls new")).stdout.endswith("\nnew\n")


async def test_no_capability_is_left_and_nothing_inside_reaches_the_supervisor(
    engine_ground: Ground, start: Start
) -> None:
    for user in ("agent", "root"):
        box = await start(engine_ground, user=user)
        found = (await box.run("grep -E '^Cap(Prm|Eff|Bnd)|NoNewPrivs|Seccomp:' /proc/self/status")).stdout.split()
        assert found[1::2] == ["0000000000000000"] * 3 + ["1", "2"]
        others = await box.run("id -u; grep CapEff /proc/self/status", user="root", new_process=True)
        assert others.stdout.split() == ["0", "CapEff:", "0000000000000000"]
        await box.run("kill -9 1; kill -9 -1", timeout=20)
        await box.run("true", timeout=20)  # its output may have been held by what was killed
        assert (await box.run("echo alive")).stdout == "alive\n"
    guarded = await start(engine_ground)
    assert (await guarded.run("cat /proc/1/environ; kill -0 1; ls /proc/1/fd")).stdout == ""


# --- resets -----------------------------------------------------------------------------------------------------------


async def test_commands_of_another_user_at_the_same_time_share_what_runs_them(
    engine_ground: Ground, start: Start
) -> None:
    begun_from_outside = r"grep -lP '^PPid:\t0$' /proc/[0-9]*/status | xargs dirname"
    keepers = f"for it in $({begun_from_outside}); do grep -ac agentfly_server $it/cmdline; done | grep -c 1"
    counts = []
    for at_once in (1, 3):
        box = await start(engine_ground)
        asked = (box.run("id -u", user="root", new_process=True) for _ in range(at_once))
        assert [result.stdout for result in await asyncio.gather(*asked)] == ["0\n"] * at_once
        counts.append((await box.run(keepers, user="root", new_process=True)).stdout)
    assert counts[0] == counts[1]


async def test_an_agents_box_is_reset_in_its_container_and_roots_in_a_new_one(
    engine_ground: Ground, start: Start
) -> None:
    for user, same in (("agent", True), ("root", False)):
        box = await start(engine_ground, user=user)
        before = await containers_of(engine_ground, box.instance)
        await box.run("echo x > /tmp/x; chmod 777 ~ 2>/dev/null; sleep 600 & echo y > /usr/local/y")
        await box.reset()
        left = await box.run("ls -A /tmp; ls /usr/local/y; stat -c %a ~; ps -eo comm | grep -c sleep")
        assert left.stdout == f"{755 if user == 'agent' else 700}\n0\n"
        after = await containers_of(engine_ground, box.instance)
        assert (before[0] in after and len(after) == 1) is same


async def test_what_cannot_be_undone_in_a_container_makes_its_reset_a_new_one(
    engine_ground: Ground, start: Start
) -> None:
    box = await start(engine_ground)
    before = await containers_of(engine_ground, box.instance)
    segment = "import ctypes; print(ctypes.CDLL(None).shmget(4711, 4096, 0o1666) >= 0)"
    assert (await box.run(f"python3 -c '{segment}'; wc -l < /proc/sysvipc/shm")).stdout == "True\n2\n"
    await box.reset()
    assert (await box.run("wc -l < /proc/sysvipc/shm")).stdout == "1\n"
    assert before[0] != (await containers_of(engine_ground, box.instance))[0]


# --- death and broken ways --------------------------------------------------------------------------------------------


async def test_a_session_killed_for_memory_is_told_and_followed_by_another(engine_ground: Ground, start: Start) -> None:
    box = await start(engine_ground)
    result = await box.run("x=$(head -c 600000000 /dev/zero | tr '\\0' x); echo ${#x}", timeout=60)
    assert result.killed_by == "memory"
    assert (await box.run("echo alive")).stdout == "alive\n"


async def test_a_container_that_is_killed_fails_its_commands_as_infrastructure_and_stays_broken(
    engine_ground: Ground, start: Start
) -> None:
    box = await start(engine_ground)
    call = asyncio.create_task(box.run("sleep 60"))
    await asyncio.sleep(0.1)
    async with connect(engine_ground.backend.address) as client:
        await client.containers.container((await containers_of(engine_ground, box.instance))[0]).kill()
    with pytest.raises(ResourceDied, match="exit code 137"):
        await call
    assert await box.status() is Status.BROKEN
    with pytest.raises(ResourceDied):
        await box.run("true")


async def test_a_stream_that_the_container_has_ended_leaves_no_open_connection(
    engine_ground: Ground, start: Start
) -> None:
    complaints = []
    loop = asyncio.get_running_loop()
    loop.set_debug(True)  # aiohttp complains of some only then
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    box = await start(engine_ground)
    streams = [await box._sandbox._open_as_agent(["/bin/true"]) for _ in range(3)]  # type: ignore[attr-defined]
    for stream in streams:
        while await stream.read() is not None:
            pass
    del stream, streams
    gc.collect()
    assert complaints == []


@pytest.mark.slow
async def test_a_connection_dropped_silently_in_the_middle_of_a_command_ends_the_call_in_time(
    engine_ground: Ground, proxy: tuple[Proxy, Backend]
) -> None:
    way, backend = proxy
    box = Container(engine_ground.spec(), f"dropped-{os.getpid()}", backend=backend)
    try:
        await box.start()
        call = asyncio.create_task(box.run("sleep 60", timeout=0.5))
        await asyncio.sleep(0.2)
        way.drop_silently()
        async with asyncio.timeout(45):
            with pytest.raises(ResourceDied, match="may be broken"):
                await call
        assert await box.status() is Status.BROKEN
    finally:
        await box.release()
    assert await containers_of(engine_ground, box.instance) == []


async def test_a_removal_that_the_engine_refuses_once_is_tried_again(
    engine_ground: Ground, proxy: tuple[Proxy, Backend]
) -> None:
    way, backend = proxy
    box = Container(engine_ground.spec(), f"refused-{os.getpid()}", backend=backend)
    try:
        await box.start()
        before, way.refuse_next_removal = way.removals, True
        await box.release()
        assert way.removals == before + 2
    finally:
        await box.release()
    assert await containers_of(engine_ground, box.instance) == []


async def test_a_start_cancelled_at_any_point_leaves_no_container(engine_ground: Ground) -> None:
    for wait in (0.0, 0.005, 0.02, 0.1, 0.3):
        box = Container(engine_ground.spec(), f"cancelled-{os.getpid()}-{wait}", backend=engine_ground.backend)
        start = asyncio.create_task(box.start())
        await asyncio.sleep(wait)
        start.cancel()
        await asyncio.wait([start])
        await box.release()
        assert await containers_of(engine_ground, box.instance) == []


@pytest.mark.slow
async def test_what_a_killed_process_left_is_reaped_and_a_living_run_is_untouched(
    engine_ground: Ground, start: Start, settings: dict[str, str]
) -> None:
    living = await start(engine_ground)
    instance = f"orphan-{os.getpid()}"
    program = f"""
import asyncio, json
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec
async def main():
    box = Container(ContainerSpec(image={engine_ground.image!r}, backend={engine_ground.backend.name!r}), {instance!r})
    before = box.traces
    await box.start()
    await box.run("setsid sleep 7409 >/dev/null 2>&1 &")
    print(json.dumps(before), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=subprocess.PIPE, env={**os.environ, **settings}
    )
    assert owner.stdout is not None
    traces = json.loads(await owner.stdout.readline())
    owner.kill()
    await owner.wait()
    assert await containers_of(engine_ground, instance) != []
    await asyncio.to_thread(reap, traces)
    assert await containers_of(engine_ground, instance) == []
    await asyncio.to_thread(reap, traces)
    assert (await living.run("echo alive")).stdout == "alive\n"


async def test_orphans_of_an_engine_that_does_not_answer_stay_in_the_ledger(engine_ground: Ground) -> None:
    traces = {engine_ground.backend.name: {"address": "unix:///no/such.sock", "instance": "x"}}
    with pytest.raises(ResourceError, match=r"no/such\.sock"):
        await asyncio.to_thread(reap, traces)


async def test_the_image_of_a_fork_goes_once_nobody_has_it(engine_ground: Ground, start: Start) -> None:
    box = await start(engine_ground)
    before = await own_images(engine_ground)
    spec = await box.fork()
    assert len(await own_images(engine_ground)) == len(before) + 1
    del spec
    gc.collect()
    other = await start(engine_ground)
    await other.release()
    assert await own_images(engine_ground) == before


async def test_files_with_holes_are_copied_into_a_fork_without_them(engine_ground: Ground, start: Start) -> None:
    box = await start(engine_ground)
    await box.run("truncate -s 100G sparse; echo end >> sparse")
    twin = await start(engine_ground, spec=await box.fork())
    assert (await twin.run("stat -c %s sparse; tail -c 4 sparse")).stdout == f"{100 * 2**30 + 4}\nend\n"


async def test_more_files_than_a_fork_can_copy_are_a_matter_for_the_model(
    engine_ground: Ground, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await start(engine_ground)
    await box.run("for n in {1..3000}; do : > $n; done")
    monkeypatch.setattr(images, "_ROOM", 2**20 - engine_ground.spec().disk_limit)
    with pytest.raises(ToolError, match="take more than"):
        await box.fork()
    assert (await box.run("rm -- *; echo alive", timeout=20)).stdout == "alive\n"
    await box.fork()


@pytest.mark.parametrize("moment", ["_run_to_end", "commit"])
async def test_what_a_process_leaves_that_is_killed_while_it_looks_into_an_image_is_reaped(
    engine_ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    program = """
    import asyncio, sys, time
    from agentfly.resources.containers.docker import backend, images
    from agentfly.resources.containers.spec import ContainerSpec

    def after(owner, name):
        function = getattr(owner, name)
        async def hang(*args, **more):
            await function(*args, **more)
            print("here", flush=True)
            await asyncio.sleep(600)
        setattr(owner, name, hang)

    after(images, "_run_to_end") if sys.argv[3] == "_run_to_end" else after(images.CommittedImages, "commit")
    engine = {"docker": backend.Docker, "podman": backend.Podman}[sys.argv[1]](sys.argv[2])
    asyncio.run(engine.prepare(ContainerSpec(image=sys.argv[4], backend=sys.argv[1])))
    """
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path))
    address = engine_ground.backend.probe().address
    before = set(await own_images(engine_ground))
    words = [engine_ground.backend.name, address, moment, engine_ground.image]
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(program), *words, stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"here\n"
    owner.kill()
    await owner.wait()
    assert await looking(engine_ground)
    assert bool(set(await own_images(engine_ground)) - before) == (moment == "commit")
    await orphans.reap_orphans()
    assert await looking(engine_ground) == []
    assert set(await own_images(engine_ground)) <= before


async def looking(ground: Ground) -> list[str]:
    """The containers by which images are looked into."""
    async with connect(ground.backend.probe().address) as client:
        return [one.id for one in await client.containers.list(all=True, filters={"name": ["agentfly-look"]})]
