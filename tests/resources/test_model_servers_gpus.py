"""Placement of model servers on GPUs: no two share one, unless they may."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentfly.core.errors import ResourceError, ResourceStartError
from agentfly.core.shared_file import lock_file
from agentfly.resources.model_server.gpu_allocator import GPUAllocator, visible_gpus
from agentfly.resources.model_server.server import ModelServer
from agentfly.resources.model_server.spec import ModelServerSpec
from agentfly.resources.process.procfs import ProcessIdentity


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "gpus"


@pytest.fixture
def file(directory: Path) -> Path:
    return directory / ProcessIdentity.current().boot


async def test_servers_get_devices_of_their_own_until_there_are_none(directory: Path) -> None:
    gpus = GPUAllocator(directory, ("0", "1", "2", "3"))
    first, second = await gpus.allocate("a", 2, 2), await gpus.allocate("b", 2, 2)
    assert {*first, *second} == {"0", "1", "2", "3"}
    with pytest.raises(ResourceStartError, match=rf"a \(process {os.getpid()}\) has 1 of {', '.join(first)}"):
        await gpus.allocate("c", 1, 1)
    await gpus.release("a")
    assert await gpus.allocate("c", 2, 2) == first


async def test_servers_that_say_so_share_a_device_and_leave_the_others_free(directory: Path) -> None:
    gpus = GPUAllocator(directory, ("0", "1"))
    assert await gpus.allocate("a", 1, 0.5) == await gpus.allocate("b", 1, 0.5)
    assert await gpus.allocate("c", 1, 1) == ("1",)
    with pytest.raises(ResourceStartError, match=r"needs 0\.1 of each of 1 GPUs"):
        await gpus.allocate("d", 1, 0.1)


async def test_what_a_dead_process_had_is_free(directory: Path) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path; "
        "from agentfly.resources.model_server.gpu_allocator import GPUAllocator; "
        "asyncio.run(GPUAllocator(Path(sys.argv[1]), ('0',)).allocate('a', 1, 1))"
    )
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program, str(directory)], check=True)
    assert await GPUAllocator(directory, ("0",)).allocate("b", 1, 1) == ("0",)


async def test_servers_that_ask_at_the_same_time_never_get_the_same(directory: Path) -> None:
    devices = tuple(map(str, range(16)))

    def ask(name: str) -> tuple[str, ...]:
        return asyncio.run(GPUAllocator(directory, devices).allocate(name, 2, 2))

    asked = (asyncio.to_thread(ask, f"server-{number}") for number in range(8))
    got = [device for claimed in await asyncio.gather(*asked) for device in claimed]
    assert sorted(got, key=int) == [*devices]


@pytest.mark.slow
async def test_a_file_that_cannot_be_used_is_named_with_the_cure(directory: Path, file: Path) -> None:
    gpus = GPUAllocator(directory, ("0",))
    with lock_file(file), pytest.raises(ResourceError, match=r"another process has held it.*AGENTFLY_STATE_DIR"):
        await gpus.allocate("a", 1, 1)


@pytest.mark.parametrize("content", [b"not ours", b"[]", b'{"a": 1}', b'{"a": {"pid": 1, "devices": ["0"]}}'])
async def test_a_file_that_holds_something_else_is_named_with_the_cure(
    directory: Path, file: Path, content: bytes
) -> None:
    gpus = GPUAllocator(directory, ("0",))
    with lock_file(file) as held:
        held.write(content)
    with pytest.raises(ResourceError, match=r"gpus/\S+, in which .* remove it while no server runs"):
        await gpus.allocate("a", 1, 1)


def write(file: Path, process: ProcessIdentity) -> None:
    """Have a process of somewhere else claim the device 0."""
    with lock_file(file) as held:
        claim = {"process": dataclasses.asdict(process), "devices": ["0"], "share": 1000}
        held.write(json.dumps({"other": claim}).encode())


async def test_claims_of_machines_that_share_the_directory_are_kept_apart(directory: Path) -> None:
    here = ProcessIdentity.current()
    node = dataclasses.replace(here, machine="node", boot="of-the-node", started=here.started + 1)
    write(directory / node.boot, node)
    before = (directory / node.boot).read_bytes()
    gpus = GPUAllocator(directory, ("0",))
    assert await gpus.allocate("a", 1, 1) == ("0",)
    await gpus.release("a")
    assert (directory / node.boot).read_bytes() == before


async def test_a_claim_of_a_container_on_the_same_machine_counts_and_the_refusal_says_how_to_free_it(
    directory: Path, file: Path
) -> None:
    here = ProcessIdentity.current()
    write(file, dataclasses.replace(here, machine="a1b2c3", namespace="pid:[1]", started=here.started + 1))
    gpus = GPUAllocator(directory, ("0", "1"))
    assert await gpus.allocate("a", 1, 1) == ("1",)
    with pytest.raises(ResourceStartError, match=r"other \(process \d+ in the container a1b2c3\).*is gone, remove /"):
        await gpus.allocate("b", 1, 1)


def test_claims_of_earlier_boots_leave_nothing(directory: Path, file: Path) -> None:
    write(directory / "earlier", dataclasses.replace(ProcessIdentity.current(), boot="earlier"))
    asyncio.run(GPUAllocator(directory, ("0",)).allocate("a", 1, 1))
    assert [*directory.iterdir()] == [file]


async def test_who_waits_for_the_file_holds_up_nobody(directory: Path, file: Path) -> None:
    with lock_file(file):
        waiting = asyncio.create_task(GPUAllocator(directory, ("0",)).allocate("a", 1, 1))
        await asyncio.sleep(0.02)
        assert not waiting.done()
    assert await waiting == ("0",)


def test_a_process_has_the_devices_that_its_environment_names_or_all(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, MIG-7"}, tmp_path) == ("2", "MIG-7")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


STAND_IN = str(Path(__file__).with_name("stand_in_model_server.py"))


@pytest.mark.slow
async def test_a_server_is_told_its_devices_and_gives_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    spec = ModelServerSpec(model="m", engine=STAND_IN, python=sys.executable, device="gpu", tensor_parallel=2)
    for _ in range(2):
        server = ModelServer(spec, "server")
        await server.start()
        told = (await server.complete("your devices?")).text
        too_many = ModelServer(spec, "too-many")
        with pytest.raises(ResourceStartError, match=r"server \(process \d+\) has 1 of 4, 5"):
            await too_many.start()
        await too_many.release()
        await server.release()
        assert told == "devices 4,5"


async def test_a_server_whose_spec_names_devices_gets_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    chosen = (("CUDA_VISIBLE_DEVICES", "7"),)
    server = ModelServer(
        ModelServerSpec(model="m", engine=STAND_IN, python=sys.executable, device="gpu", env=chosen), "server"
    )
    await server.start()
    told = (await server.complete("your devices?")).text
    await server.release()
    assert told == "devices 7"
