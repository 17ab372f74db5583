"""The choice of a backend: only backends that support the image are tried and named."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentfly.core.errors import PrerequisiteError, ResourceUnreachable
from agentfly.resources.containers import backend as backends
from agentfly.resources.containers.backend import candidate_backends, get_backend, reap, select_backend
from agentfly.resources.containers.bubblewrap import backend as bubblewrap_backend
from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.resources.containers.docker.backend import Docker, Podman
from agentfly.resources.containers.landlock import backend as landlock_backend
from agentfly.resources.containers.spec import ContainerSpec


@pytest.fixture
def without_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine where no engine answers and enroot is not installed."""
    for variable in ("DOCKER_HOST", "CONTAINER_HOST"):
        monkeypatch.setenv(variable, f"unix://{tmp_path}/no.sock")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("image", "names"),
    [
        ("host", ["bubblewrap", "landlock"]),
        ("/srv/rootfs", ["bubblewrap", "enroot"]),
        ("debian:12", ["docker", "podman", "enroot"]),
    ],
)
def test_only_backends_that_take_the_image_are_candidates(image: str, names: list[str]) -> None:
    assert candidate_backends(ContainerSpec(image=image)) == names


@pytest.mark.usefixtures("without_engines")
async def test_an_image_by_name_without_an_engine_says_which_programs_take_one_and_how_to_get_them() -> None:
    with pytest.raises(PrerequisiteError) as refusal:
        await select_backend(ContainerSpec(image="debian:12"))
    first, *others = str(refusal.value).splitlines()
    assert "needs one of docker, podman and enroot" in first
    assert [line.split()[0] for line in others] == ["docker", "podman", "enroot"]
    assert "isolation" not in str(refusal.value)
    assert "bubblewrap" not in str(refusal.value)


@pytest.mark.usefixtures("without_engines")
async def test_a_name_that_is_a_directory_here_is_answered_with_its_whole_path(tmp_path: Path) -> None:
    (tmp_path / "images" / "rootfs").mkdir(parents=True)
    with pytest.raises(PrerequisiteError, match=f"If {tmp_path}/images/rootfs is meant, write this whole path"):
        await select_backend(ContainerSpec(image="images/rootfs"))


def test_an_orphan_is_looked_for_in_every_backend_that_may_have_had_it_whichever_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    failures = {"docker": ResourceUnreachable("no daemon"), "podman": OSError("stuck")}

    def fail(name: str, traces: dict[str, str]) -> None:
        asked.append(name)
        if name in failures:
            raise failures[name]

    for name in ("docker", "podman", "enroot"):
        monkeypatch.setattr(get_backend(name), "reap", lambda traces, name=name: fail(name, traces))
    with pytest.raises(OSError, match="stuck"):
        reap({"docker": {}, "podman": {}, "enroot": {}})
    assert asked == ["docker", "podman", "enroot"]
    del failures["podman"]
    with pytest.raises(ResourceUnreachable):
        reap({"docker": {}, "podman": {}})


OTHERS = ("docker", "enroot", "landlock", "stream_shell")
LOADING = f"""
import asyncio, sys
import agentfly as af
from agentfly.resources.engine.engine import ResourceEngine

async def main():
    async with ResourceEngine() as engine:
        lease = await engine.acquire(af.ContainerSpec(), "owner")
        print((await lease.resource.run("echo started")).stdout)
        await engine.release(lease)

asyncio.run(main())
print([name for name in sys.modules if name.split(".")[-2:-1] in [[other] for other in {OTHERS}]])
print([name for name in ("aiohttp", "aiodocker") if name in sys.modules])
"""


@pytest.mark.slow
@pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))
def test_a_box_of_bubblewrap_loads_no_other_backend(tmp_path: Path) -> None:
    environment = {**os.environ, "AGENTFLY_STATE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, env=environment, check=False)
    assert ran.stdout.split("\n") == ["started", "", "[]", "[]", ""], ran.stderr


LISTING = """
import sys
from agentfly.resources.containers.backend import candidate_backends, traces
from agentfly.resources.containers.spec import ContainerSpec
print(list(traces(ContainerSpec(), "box-1")), candidate_backends(ContainerSpec()))
print([name for name in sys.modules if name.startswith("agentfly.resources.containers.") and name.endswith("backend")])
"""


def test_what_is_written_down_before_a_choice_loads_no_backend() -> None:
    ran = subprocess.run([sys.executable, "-c", LISTING], capture_output=True, text=True, check=False)
    first, second = ran.stdout.splitlines()
    assert first == "['bubblewrap'] ['bubblewrap', 'landlock']", ran.stderr
    assert second == "['agentfly.resources.containers.backend']"


def test_the_two_backends_of_the_hosts_files_leave_the_same_traces_and_reap_alike() -> None:
    spec = ContainerSpec()
    bubblewrap, landlock = get_backend("bubblewrap"), get_backend("landlock")
    assert bubblewrap.traces(spec, "box-1") == landlock.traces(spec, "box-1")
    assert bubblewrap_backend.reap_bubblewrap is landlock_backend.reap_bubblewrap  # type: ignore[attr-defined]


@pytest.mark.usefixtures("without_engines")
@pytest.mark.parametrize("address", ["ssh://nobody@nowhere", "nonsense", "unix://", "tcp://", "http://[", "fd://\0"])
async def test_an_address_that_no_engine_can_have_is_a_reason_like_another_and_hides_no_backend(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    made = {"docker": Docker(address), "podman": Podman(address), "enroot": get_backend("enroot")}
    monkeypatch.setattr(backends, "_loaded", made)
    assert not (await asyncio.to_thread(made["docker"].probe)).available
    with pytest.raises(PrerequisiteError) as refusal:
        await select_backend(ContainerSpec(image="debian:12"))
    assert [line.split()[0] for line in str(refusal.value).splitlines()[1:]] == ["docker", "podman", "enroot"]


@pytest.mark.parametrize("answer", [b"[]", b"{}", b"no json", b'{"ApiVersion": 7}', b'{"ApiVersion": "1.41"}', b"null"])
async def test_a_server_that_is_no_engine_is_told_from_one(tmp_path: Path, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (await reader.readline()).strip():
            pass
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(answer) + answer)
        writer.close()

    server = await asyncio.start_unix_server(serve, tmp_path / "socket")
    try:
        found = await asyncio.to_thread(Docker(f"unix://{tmp_path / 'socket'}").probe)
    finally:
        server.close()
    assert not found.available
    assert found.missing
