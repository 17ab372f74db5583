"""What a container does on every backend. `conftest.py` has the backends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from agentfly.errors import PrerequisiteError, ResourceDied, ToolError, UsageError
from agentfly.resources.containers.backend import Backend
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec
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


# --- commands ---------------------------------------------------------------------------------------------------------


async def test_a_command_has_an_exit_code_and_two_outputs(box: Container) -> None:
    result = await box.run("echo out; echo err >&2; exit 7")
    assert (result.exit_code, result.stdout, result.stderr) == (7, "out\n", "err\n")
    assert not result.truncated
    assert not result.timed_out
    assert result.killed_by is None


async def test_the_session_keeps_its_directory_variables_and_functions(box: Container) -> None:
    assert (await box.run("pwd")).stdout == f"{box.workdir}\n"
    await box.run("mkdir sub; cd sub; X=5; export Y=6; f() { echo f$1; }")
    assert (await box.run("pwd; echo $X; f 1; bash -c 'echo $Y'")).stdout == f"{box.workdir}/sub\n5\nf1\n6\n"
    await box.run("exit 3")
    assert (await box.run("echo $X; pwd")).stdout == f"5\n{box.workdir}/sub\n"


async def test_what_is_for_one_command_does_not_last(box: Container) -> None:
    assert (await box.run("pwd; echo $V", cwd="/usr", env={"V": "it's"})).stdout == "/usr\nit's\n"
    assert (await box.run("pwd; echo $V")).stdout == f"{box.workdir}\n\n"


async def test_a_process_of_its_own_is_beside_the_session_and_at_the_same_time(box: Container) -> None:
    await box.run("X=5; cd /usr")
    long = asyncio.create_task(box.run("sleep 60"))
    result = await box.run("echo $X; pwd", new_process=True)
    assert result.stdout == f"\n{box.workdir}\n"
    assert not long.done()
    long.cancel()


@pytest.mark.parametrize("new_process", [False, True])
async def test_input_is_given_and_otherwise_at_its_end(box: Container, new_process: bool) -> None:
    assert (await box.run("cat; echo over", timeout=20, new_process=new_process)).stdout == "over\n"
    assert (await box.run("read -r x || echo end", timeout=20, new_process=new_process)).stdout == "end\n"
    given = os.urandom(100_000)
    assert (await box.run("wc -c", stdin=given, new_process=new_process)).stdout.strip() == "100000"


@pytest.mark.parametrize("new_process", [False, True])
async def test_children_that_outlive_their_command_do_not_hold_it_open(
    box: Container, processes_with: ProcessesWith, eventually: Eventually, new_process: bool
) -> None:
    marker = f"94{new_process:d}1"
    for command in (f"sleep {marker} & echo done", f"setsid sleep {marker} >/dev/null 2>&1 & echo done"):
        assert (await box.run(command, timeout=20, new_process=new_process)).stdout == "done\n"
    await eventually(lambda: len(processes_with(f"sleep\0{marker}")) == 2)
    await box.release()
    assert processes_with(f"sleep\0{marker}") == []


@pytest.mark.parametrize("new_process", [False, True])
async def test_a_command_out_of_time_is_killed_with_all_that_it_started(
    box: Container, processes_with: ProcessesWith, eventually: Eventually, new_process: bool
) -> None:
    marker = f"95{new_process:d}1"
    await box.run("X=5")
    result = await box.run(f"echo early; setsid sleep {marker} & sleep {marker}", timeout=1, new_process=new_process)
    assert (result.exit_code, result.timed_out, result.killed_by) == (124, True, "timeout")
    assert result.stdout == "early\n"
    await eventually(lambda: processes_with(f"sleep\0{marker}") == [])
    assert (await box.run("echo $X")).stdout == "5\n"


async def test_a_cancelled_call_ends_its_command(
    box: Container, processes_with: ProcessesWith, eventually: Eventually
) -> None:
    call = asyncio.create_task(box.run("sleep 9601"))
    await eventually(lambda: processes_with("sleep\09601") != [])
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await box.run("true")
    await eventually(lambda: processes_with("sleep\09601") == [])


async def test_a_signal_that_kills_a_command_is_told(box: Container) -> None:
    result = await box.run("kill -9 $BASHPID", new_process=True)
    assert (result.exit_code, result.killed_by) == (137, "SIGKILL")


# --- output -----------------------------------------------------------------------------------------------------------


async def test_huge_output_keeps_both_ends_in_bounded_memory(box: Container) -> None:
    result = await box.run("echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo; echo last", max_output=1000)
    assert result.truncated
    assert result.stdout.startswith("first\nxxx")
    assert result.stdout.endswith("xxx\nlast\n")
    assert result.omitted == 5_000_000 + len("first\n\nlast\n") - 1000
    assert len(result.stdout) < 1100


async def test_binary_output_is_replaced_and_never_raised(box: Container) -> None:
    assert (await box.run(r"printf 'a\xff\xfeb\0c\n'")).stdout == "a\ufffd\ufffdb\0c\n"


# --- files ------------------------------------------------------------------------------------------------------------


async def test_files_are_read_back_as_written(box: Container) -> None:
    content = bytes(range(256)) * 4000
    await box.write_file("deep/down/it's here.bin", content)
    assert await box.read_file(f"{box.workdir}/deep/down/it's here.bin") == content
    with pytest.raises(ToolError, match="No such file"):
        await box.read_file("none")
    with pytest.raises(ToolError, match="directory"):
        await box.read_file("deep")


def _some_files(place: Path) -> Path:
    (place / "in" / "sub" / "empty").mkdir(parents=True)
    (place / "in" / "large").write_bytes(os.urandom(9_000_001))
    (place / "in" / "sub" / "program").write_text("#!/bin/sh\necho ran\n")
    (place / "in" / "sub" / "program").chmod(0o755)
    (place / "in" / "sub" / "a 'name'").write_text("quoted")
    (place / "in" / "link").symlink_to("sub/program")
    os.mkfifo(place / "in" / "pipe")
    return place / "in"


async def test_directories_are_copied_both_ways(box: Container, tmp_path: Path) -> None:
    source, copy = _some_files(tmp_path), tmp_path / "out"
    await box.upload(source, "there")
    assert (await box.run("there/link; cat there/sub/a*; ls -A there/sub/empty; test ! -e there/pipe")).stdout == (
        "ran\nquoted"
    )
    assert await box.download("there", copy) == []
    assert (copy / "large").read_bytes() == (source / "large").read_bytes()
    assert (copy / "link").readlink() == Path("sub/program")
    assert (copy / "sub" / "program").stat().st_mode & 0o777 == 0o755
    assert (copy / "sub" / "empty").is_dir()


async def test_single_files_are_copied_both_ways(box: Container, tmp_path: Path) -> None:
    source, copy = tmp_path / "large", tmp_path / "new" / "copy"
    source.write_bytes(os.urandom(9_000_001))
    source.chmod(0o750)
    await box.upload(source, "deep/large")
    assert (await box.run("stat -c %a deep/large")).stdout == "750\n"
    await box.download("deep/large", copy)
    assert copy.read_bytes() == source.read_bytes()
    empty = tmp_path / "empty"
    empty.touch()
    await box.upload(empty, "deep/large")
    await box.download("deep/large", copy)
    assert copy.read_bytes() == b""


async def test_nothing_that_is_downloaded_leaves_its_directory(box: Container, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    await box.run(f"mkdir -p evil/d; cd evil; ln -s {victim} away; ln -s ../../.. up; ln -s d/../../x out; mkfifo p")
    await box.run("ln -s . here; ln -s here/../../x twice; ln -s d good; echo x > d/f; chmod 4755 d/f; cd ..")
    left_out = await box.download("evil", tmp_path / "copy")
    assert sorted(name.removeprefix("./") for name in left_out) == ["away", "out", "p", "twice", "up"]
    assert (tmp_path / "copy" / "good" / "f").read_text() == "x\n"
    assert (tmp_path / "copy" / "d" / "f").stat().st_mode & 0o7000 == 0
    assert list(victim.iterdir()) == []


async def test_copies_that_cannot_be_are_refused(box: Container, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    await box.run("mkdir d; head -c 3000000 /dev/zero > d/zeros")
    with pytest.raises(UsageError, match="not there on this host"):
        await box.upload(tmp_path / "none", "x")
    with pytest.raises(UsageError, match="is there already"):
        await box.download("d", tmp_path / "taken")
    with pytest.raises(UsageError, match="is a directory"):
        await box.download("d/zeros", tmp_path / "taken")
    with pytest.raises(ToolError, match="no such file"):
        await box.download("none", tmp_path / "x")
    for path in ("d", "d/zeros"):
        with pytest.raises(ToolError, match="larger than 1000000 bytes"):
            await box.download(path, tmp_path / "x", max_bytes=1_000_000)


# --- users ------------------------------------------------------------------------------------------------------------


async def test_the_user_is_the_one_of_the_spec(ground: Ground, start: Start) -> None:
    if ground.able.not_isolated:
        with pytest.raises(PrerequisiteError, match="user 0 inside"):
            await start(ground, user="root")
        return
    assert (await (await start(ground)).run("id -u; whoami; echo $HOME")).stdout == "1000\nagent\n/home/agent\n"
    assert (await (await start(ground, user="root")).run("id -u; whoami; echo $HOME")).stdout == "0\nroot\n/root\n"


async def test_another_user_runs_a_process_of_its_own_or_is_refused_with_the_cure(
    ground: Ground, box: Container
) -> None:
    assert (await box.run("echo $USER", user="agent")).stdout == "agent\n"
    with pytest.raises(UsageError, match="new_process=True"):
        await box.run("id -u", user="root")
    if ground.able.users:
        assert (await box.run("id -u", user="root", new_process=True)).stdout == "0\n"
    else:
        with pytest.raises(PrerequisiteError, match=r"Write ContainerSpec\(user='root'\)"):
            await box.run("id -u", user="root", new_process=True)


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_fork_bomb_is_bounded_and_survived(box: Container) -> None:
    await box.run("f() { f | f & }; f; sleep 1", timeout=3)
    await box.run("for i in $(seq 200); do sleep 30 & done; true", timeout=3)
    assert (await box.run("echo alive", timeout=30)).stdout == "alive\n"


async def test_a_memory_hog_is_killed_and_reported_as_that(box: Container) -> None:
    result = await box.run("bash -c 'x=$(head -c 600000000 /dev/zero | tr \\\\0 x); echo ${#x}'", timeout=60)
    assert result.exit_code != 0
    assert "600000000" not in result.stdout
    assert result.killed_by == "memory" or "cannot allocate" in result.stderr
    assert (await box.run("echo alive")).stdout == "alive\n"


async def test_a_disk_hog_is_stopped(ground: Ground, start: Start) -> None:
    if not ground.able.disk:
        with pytest.raises(PrerequisiteError, match="disk"):
            await start(ground, disk="32MiB")
        return
    box = await start(ground, disk="32MiB")
    result = await box.run("head -c 100000000 /dev/zero > hog; rm hog; echo room > file; cat file")
    assert "No space left" in result.stderr
    assert result.stdout == "room\n"


async def test_the_network_is_off_unless_the_spec_turns_it_on(ground: Ground, start: Start) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        box = await start(ground)
        reached = await box.run(f"read -r line < /dev/tcp/127.0.0.1/{port}; echo $line; cat /proc/net/dev")
        assert "hello" not in reached.stdout
        if ground.able.not_isolated:
            return  # it sees the host's devices, and can make no socket
        assert [line.split(":")[0].strip() for line in reached.stdout.splitlines() if ":" in line] == ["lo"]


async def test_the_environment_of_the_host_is_not_visible(
    ground: Ground, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "do-not-tell-4711")
    box = await start(ground, env=(("GIVEN", "yes"),))
    seen = await box.run("env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'")
    assert "4711" not in str(seen)
    assert "GIVEN=yes" in seen.stdout


async def test_files_of_the_host_cannot_be_seen_or_changed(box: Container, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host")
    secret.chmod(0o666)
    seen = await box.run(f"cat {secret}; mkdir -p {tmp_path}; echo inside > {secret}; echo x >> /etc/passwd")
    assert "host" not in seen.stdout
    assert secret.read_text() == "host"


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


# --- freezing ---------------------------------------------------------------------------------------------------------


async def test_a_frozen_box_does_nothing_and_goes_on_where_it_was(ground: Ground, start: Start) -> None:
    if ground.able.freezes == "none":
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


async def test_time_in_the_ice_does_not_count_for_a_command(ground: Ground, start: Start) -> None:
    if ground.able.freezes == "none":
        pytest.skip("this backend does not freeze here")
    box = await start(ground)
    call = asyncio.create_task(box.run("sleep 0.5; echo done", timeout=2))
    await asyncio.sleep(0.2)
    await box.freeze()
    await asyncio.sleep(2.5)
    await box.thaw()
    assert (await call).stdout == "done\n"


async def test_a_frozen_box_is_released_and_reset_all_the_same(
    ground: Ground, start: Start, processes_with: ProcessesWith
) -> None:
    if ground.able.freezes == "none":
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
    for _ in range(3):  # the second and later ones may find the next life ready
        everywhere = ". ~ ${TMPDIR:-/tmp}" + (" /var/tmp /tmp /dev/shm" if not ground.able.not_isolated else "")
        await box.run(f"for d in {everywhere}; do echo x > $d/mine; done; rm setup; X=5; cd /; sleep 9801 &")
        await box.run("python3 -c 'import socket; s = socket.socket(socket.AF_UNIX); s.bind(\"s\")' 2>/dev/null")
        await box.reset()
        assert processes_with("sleep\09801") == []
        left = await box.run(f"pwd; echo x$X $S; cat setup; find {everywhere} -name mine -o -name s")
        assert left.stdout == f"{box.workdir}\nx 1\nready\n"
        assert await box.status() is Status.HEALTHY


async def test_a_fork_has_the_files_of_one_moment_and_goes_its_own_way(ground: Ground, start: Start) -> None:
    if not ground.able.forks:
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
    if not ground.able.forks:
        pytest.skip("this backend does not fork here")
    depth = 17 if ground.able.backend == "bubblewrap" else 4  # where a fork takes a second
    box = await start(ground)
    for level in range(depth):
        await box.run(f"echo {level} > file{level}; rm -f file{level - 1}; echo {level} >> log")
        box = await start(ground, spec=await box.fork())
    assert (await box.run("ls; wc -l < log")).stdout == f"file{depth - 1}\nlog\n{depth}\n"


async def test_a_spec_of_a_fork_may_be_changed_but_not_its_backend(ground: Ground, start: Start) -> None:
    if not ground.able.forks:
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


async def test_many_boxes_work_at_once(ground: Ground, start: Start) -> None:
    boxes = await asyncio.gather(*(start(ground) for _ in range(8)))
    results = await asyncio.gather(*(box.run(f"echo {n} > mine; sleep 1; cat mine") for n, box in enumerate(boxes)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(8)]
