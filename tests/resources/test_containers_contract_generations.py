"""The contract of containers over their lifetime, on every backend: ports, freezing, resets, forks, release."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from agentfly.core.errors import PrerequisiteError, ResourceDied, SandboxFlooded, UsageError
from agentfly.resources.containers.backend import Backend
from agentfly.resources.containers.bubblewrap import shell as pipe_shell
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.containers.stream_shell import shell as stream_shell
from agentfly.resources.resource import Status

Eventually = Callable[[Callable[[], bool]], Coroutine[Any, Any, None]]
ProcessesWith = Callable[[str], list[int]]


class Ground(Protocol):
    """See `conftest.py`."""

    backend: Backend
    image: str

    @property
    def able(self) -> Capabilities: ...

    def spec(self, **fields: Any) -> ContainerSpec: ...


Start = Callable[..., Coroutine[Any, Any, Container]]


@pytest.fixture
def box(contract_box: Container) -> Container:
    return contract_box


# --- ports ------------------------------------------------------------------------------------------------------------

_SERVER = """
import socket
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(('0.0.0.0', 8000))
listener.listen()
while True:
    caller, _ = listener.accept()
    said = b''
    while chunk := caller.recv(65536):
        said += chunk
    caller.sendall(b'%d bytes' % len(said))
    caller.close()
"""


async def _ask(host: str, port: int, words: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(words)
        writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_port_inside_is_reached_from_the_host_though_there_is_no_network(ground: Ground, start: Start) -> None:
    if not ground.able.ports:
        with pytest.raises(PrerequisiteError, match="ports"):
            await start(ground, ports=(8000,))
        return
    box = await start(ground, ports=(8000,))
    where = await box.port(8000)
    assert where == await box.port(8000)
    assert await _ask(*where, b"nobody listens yet") == b""
    await box.write_file("server.py", _SERVER)
    await box.run("python3 server.py > /dev/null 2>&1 &")
    async with asyncio.timeout(20):
        while await _ask(*where, b"x") != b"1 bytes":  # noqa: ASYNC110  (a server comes up in another process)
            await asyncio.sleep(0.05)
    answers = await asyncio.gather(*(_ask(*where, b"x" * 300_000) for _ in range(8)))
    assert answers == [b"300000 bytes"] * 8
    with pytest.raises(UsageError, match="ports="):
        await box.port(8001)
    await box.release()
    with pytest.raises(OSError):  # noqa: PT011  (whatever the kernel says)
        await _ask(*where, b"x")


def _listeners() -> set[str]:
    """The TCP sockets on which this process listens."""
    sockets = {
        f"socket:[{line.split()[9]}]" for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line
    }
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(descriptor.readlink()))
    return found & sockets


async def test_a_port_asked_for_many_times_at_once_is_one_and_a_new_one_after_a_reset(
    ground: Ground, start: Start
) -> None:
    if not ground.able.ports:
        pytest.skip("this backend has no ports")
    box = await start(ground, ports=(8000, 8001))
    for _ in range(2):
        asked = [box.port(inside) for inside in (8000, 8001, 8000, 8001)]
        first, second, *again = await asyncio.gather(*asked)
        assert [first, second] == again
        assert first != second
        await box.reset()


async def test_a_port_that_is_opened_while_its_box_is_released_leaves_no_listener(ground: Ground, start: Start) -> None:
    if not ground.able.ports:
        pytest.skip("this backend has no ports")
    before = await asyncio.to_thread(_listeners)
    for turns in range(1, 4):
        box = await start(ground, ports=(8000,))
        opening = asyncio.create_task(box.port(8000))
        for _ in range(turns):
            await asyncio.sleep(0)
        await box.release()
        with contextlib.suppress(ResourceDied):  # unless it was quicker
            await opening
        assert await asyncio.to_thread(_listeners) == before


# --- freezing ---------------------------------------------------------------------------------------------------------


async def test_a_frozen_box_does_nothing_and_goes_on_where_it_was(ground: Ground, start: Start) -> None:
    if ground.able.freeze == "none":
        with pytest.raises(PrerequisiteError, match="stopped"):
            await start(ground, idle="freeze")
        return
    box = await start(ground, idle="freeze")
    await box.run("X=5; n=0; (while :; do n=$((n + 1)); echo $n > count; done) &")
    await box.freeze()
    await box.freeze()
    assert await box.status() is Status.HEALTHY
    with pytest.raises(UsageError, match="thaw"):
        await box.run("true")
    await box.thaw()
    await box.thaw()
    counted = "a=$(<count); until [[ $(<count) != $a ]]; do sleep 0.01; done; echo $X"
    assert (await box.run(counted, timeout=30)).stdout == "5\n"


async def test_a_box_that_cannot_be_frozen_says_so_and_works_on(
    ground: Ground, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await start(ground)
    unable = replace(ground.able, freeze="none")
    monkeypatch.setattr(ground.backend, "probe", lambda: unable)
    with pytest.raises(PrerequisiteError, match=r"freeze\(\)"):
        await box.freeze()
    assert (await box.run("echo alive")).stdout == "alive\n"
    await box.thaw()


@pytest.mark.slow
async def test_time_in_the_ice_does_not_count_for_a_command(ground: Ground, start: Start) -> None:
    if ground.able.freeze == "none":
        pytest.skip("this backend does not freeze here")
    box = await start(ground)
    call = asyncio.create_task(box.run("sleep 0.5; echo done", timeout=2))
    await asyncio.sleep(0.2)
    await box.freeze()
    await asyncio.sleep(2.5)
    await box.thaw()
    assert (await call).stdout == "done\n"


async def test_commands_that_are_beginning_when_their_box_is_frozen_have_all_their_time_after(
    ground: Ground, start: Start
) -> None:
    if ground.able.freeze == "none":
        pytest.skip("this backend does not freeze here")
    box = await start(ground)
    for turns in (0, 1, 3, 10):
        calls = [asyncio.create_task(box.run("echo done", timeout=20, new_process=True)) for _ in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await box.freeze()
        await box.thaw()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        begun = [end for end in ends if not isinstance(end, UsageError)]  # the others came after the freeze
        assert [(end.stdout, end.timed_out) for end in begun] == [("done\n", False)] * len(begun)  # type: ignore[union-attr]
        assert len(begun) == 3 or turns == 0


@pytest.mark.slow
@pytest.mark.parametrize("new_process", [False, True])
async def test_a_call_that_is_cancelled_while_its_box_is_frozen_ends_its_command_and_not_the_box(
    ground: Ground,
    start: Start,
    processes_with: ProcessesWith,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    new_process: bool,
) -> None:
    if ground.able.freeze == "none":
        pytest.skip("this backend does not freeze here")
    for module in (stream_shell, pipe_shell):
        monkeypatch.setattr(module, "_RESTART_GRACE_S", 1.0)
    box = await start(ground)
    await box.run("X=5")
    for cancelled_first in (False, True):
        call = asyncio.create_task(box.run("sleep 9702", new_process=new_process))
        await eventually(lambda: processes_with("sleep\09702") != [])
        if cancelled_first:
            call.cancel()
            await asyncio.wait([call])
        await box.freeze()
        call.cancel()
        await asyncio.sleep(5)  # longer than the end of a command may take
        await box.thaw()
        assert (await box.run("echo $X", timeout=20)).stdout == "5\n"
        await eventually(lambda: processes_with("sleep\09702") == [])


async def test_a_frozen_box_is_released_and_reset_all_the_same(
    ground: Ground, start: Start, processes_with: ProcessesWith
) -> None:
    if ground.able.freeze == "none":
        pytest.skip("this backend does not freeze here")
    box = await start(ground)
    for end in (box.reset, box.release):
        await box.run("sleep 9701 &")
        await box.freeze()
        await end()
        assert processes_with("sleep\09701") == []


# --- resets and forks -------------------------------------------------------------------------------------------------


async def test_a_reset_leaves_nothing_of_the_one_before(
    ground: Ground, start: Start, processes_with: ProcessesWith
) -> None:
    box = await start(ground, setup=("echo ready > setup; S=1",))
    for _ in range(3):  # the second and later ones may find the next generation ready
        everywhere = ". ~ ${TMPDIR:-/tmp}" + (" /var/tmp /tmp /dev/shm" if not ground.able.isolation_gaps else "")
        await box.run(f"for d in {everywhere}; do echo x > $d/mine; done; rm setup; X=5; cd /; sleep 9801 &")
        await box.run("python3 -c 'import socket; s = socket.socket(socket.AF_UNIX); s.bind(\"s\")' 2>/dev/null")
        await box.reset()
        assert processes_with("sleep\09801") == []
        left = await box.run(f"pwd; echo x$X $S; cat setup; find {everywhere} -name mine -o -name s")
        assert left.stdout == f"{box.workdir}\nx 1\nready\n"
        assert await box.status() is Status.HEALTHY


async def test_a_fork_has_the_files_of_one_moment_and_goes_its_own_way(ground: Ground, start: Start) -> None:
    if not ground.able.fork:
        with pytest.raises(PrerequisiteError, match="copy of a container's files"):
            await (await start(ground)).fork()
        return
    box = await start(ground, setup=("echo set up >> setup",))
    await box.run("echo a > /workspace/a; echo a > ~/a; echo a > /tmp/a; rm -rf /var/tmp; X=5; sleep 60 & P=$!")
    spec = await box.fork()
    await box.run("echo changed > a; rm ~/a")
    twins = [await start(ground, spec=spec) for _ in range(2)]
    look = "cat a ~/a /tmp/a setup; test -e /var/tmp/x || echo none"
    for twin in twins:
        assert (await twin.run(look)).stdout == "a\na\na\nset up\nnone\n"
    await twins[0].run("echo mine > a; rm /tmp/a")
    assert (await twins[1].run(look)).stdout == "a\na\na\nset up\nnone\n"
    assert (await box.run("cat a; echo $X; kill -0 $P && echo lives")).stdout == "changed\n5\nlives\n"
    await twins[0].reset()
    assert (await twins[0].run(look)).stdout == "a\na\na\nset up\nnone\n"


@pytest.mark.slow
async def test_forks_of_forks_have_all_that_came_before(ground: Ground, start: Start) -> None:
    if not ground.able.fork:
        pytest.skip("this backend does not fork here")
    depth = 17 if ground.able.backend == "bubblewrap" else 4  # where a fork takes a second
    box = await start(ground)
    for level in range(depth):
        await box.run(f"echo {level} > file{level}; rm -f file{level - 1}; echo {level} >> log")
        box = await start(ground, spec=await box.fork())
    assert (await box.run("ls; wc -l < log")).stdout == f"file{depth - 1}\nlog\n{depth}\n"


async def test_a_spec_of_a_fork_may_be_changed_but_not_its_backend(ground: Ground, start: Start) -> None:
    if not ground.able.fork:
        pytest.skip("this backend does not fork here")
    box = await start(ground)
    await box.write_file("a", "a")
    spec = replace(await box.fork(), pids=32, setup=("echo b > b",))
    twin = await start(ground, spec=spec)
    assert (await twin.run("cat a b")).stdout == "ab\n"
    with pytest.raises(PrerequisiteError, match="of one backend"):
        ground.able.check(replace(spec, backend="auto"))


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_a_box_that_is_gone_says_so_and_does_not_come_back(box: Container) -> None:
    await box.release()
    await box.release()
    assert await box.status() is Status.BROKEN
    for call in (box.run("true"), box.read_file("x"), box.reset(), box.freeze()):
        with pytest.raises(ResourceDied):
            await call


@pytest.mark.slow
async def test_many_boxes_work_at_once(ground: Ground, start: Start) -> None:
    boxes = await asyncio.gather(*(start(ground) for _ in range(8)))
    results = await asyncio.gather(*(box.run(f"echo {n} > mine; sleep 1; cat mine") for n, box in enumerate(boxes)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(8)]


# --- what its processes write to its shell ----------------------------------------------------------------------------

_FLOOD = r"""
trap '' PIPE
for session in /run/agentfly/*-session; do
    [[ -e $session ]] || continue
    name=${session##*/}
    while :; do printf '\x1e%s e 0 0\n' "${name%-session}"; done
done
while :; do echo e 0 0 1; done >/proc/$$/fd/201
"""


async def test_a_box_whose_processes_flood_its_shell_is_ended_for_its_owner_and_new_after_a_reset(
    box: Container, start: Start, ground: Ground
) -> None:
    beside = await start(ground)
    with pytest.raises(SandboxFlooded, match="processes in it flooded"):
        async with asyncio.timeout(60):
            await box.run(_FLOOD, timeout=50)
    with pytest.raises(SandboxFlooded):
        await box.read_file("file")
    assert await box.status() is Status.HEALTHY
    assert (await beside.run("echo mine")).stdout == "mine\n"
    await box.reset()
    assert (await box.run("echo new", timeout=20)).stdout == "new\n"
