"""The contract of containers on every backend. `conftest.py` has the backends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import pytest

from agentfly.core.errors import PrerequisiteError, ResourceError, ToolError, UsageError
from agentfly.resources.containers.backend import Backend
from agentfly.resources.containers.bubblewrap import shell as pipe_shell
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec

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


@pytest.mark.slow
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


async def test_the_end_of_a_command_whose_caller_has_left_is_heard_and_not_waited_out(
    ground: Ground,
    start: Start,
    processes_with: ProcessesWith,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipe_shell, "_KEEP_GRACE_S", 3600.0)
    box = await start(ground)
    call = asyncio.create_task(box.run("sleep 9603", new_process=True))
    await eventually(lambda: processes_with("sleep\09603") != [])
    call.cancel()
    await asyncio.wait([call])
    async with asyncio.timeout(20):
        assert (await box.run("echo alive")).stdout == "alive\n"


@pytest.mark.slow
async def test_a_call_cancelled_as_its_command_begins_ends_it_and_not_the_box(
    box: Container, processes_with: ProcessesWith
) -> None:
    for wait in (0, 0.001, 0.003, 0.01, 0.1):
        call = asyncio.create_task(box.run("sleep 9602", new_process=True, stdin=b"x" * 100_000))
        await asyncio.sleep(wait)
        call.cancel()
        await asyncio.wait([call])
        assert (await box.run("echo alive")).stdout == "alive\n"
        assert processes_with("sleep\09602") == []


async def test_the_session_keeps_its_variables_whenever_a_call_is_cancelled(box: Container) -> None:
    for turn in range(20):
        await box.run(f"X={turn}")
        call = asyncio.create_task(box.run("sleep 9604" if turn % 2 else "while :; do :; done"))
        await asyncio.sleep((0, 0, 0.0001, 0.0005, 0.002)[turn % 5])
        call.cancel()
        await asyncio.wait([call])
        assert (await box.run("echo $X")).stdout == f"{turn}\n"


async def test_signals_do_inside_what_they_do_by_default_whatever_their_owner_ignores(
    ground: Ground, start: Start
) -> None:
    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGPIPE, signal.SIGXFSZ)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}  # as under nohup
    try:
        box = await start(ground)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for new_process in (False, True):
        status = await box.run("cat /proc/self/status", new_process=new_process)
        masks = dict(re.findall(r"(SigIgn|SigBlk):\s+(\w+)", status.stdout))
        standard = 2**31 - 1
        assert {name: int(mask, 16) & standard for name, mask in masks.items()} == {"SigIgn": 0, "SigBlk": 0}
        endless = "(while :; do echo y; done) | { read -r line; echo $line; }; echo ${PIPESTATUS[0]}"
        assert (await box.run(endless, timeout=20, new_process=new_process)).stdout == f"y\n{128 + signal.SIGPIPE}\n"


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


async def test_directories_that_nobody_may_write_are_copied_with_all_that_is_in_them(
    box: Container, tmp_path: Path
) -> None:
    place = tmp_path / "in" / "sealed"
    place.mkdir(parents=True)
    for name in ("a", "b"):
        (place / name).write_bytes(os.urandom(5_000_001))
    place.chmod(0o555)
    await box.upload(tmp_path / "in", "there")
    await box.run("chmod 555 there/sealed")
    assert await box.download("there", tmp_path / "out") == []
    assert (tmp_path / "out" / "sealed" / "b").read_bytes() == (place / "b").read_bytes()


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
    excluded = await box.download("evil", tmp_path / "copy")
    assert sorted(name.removeprefix("./") for name in excluded) == ["away", "out", "p", "twice", "up"]
    assert (tmp_path / "copy" / "good" / "f").read_text() == "x\n"
    assert (tmp_path / "copy" / "d" / "f").stat().st_mode & 0o7000 == 0
    assert list(victim.iterdir()) == []


async def test_copies_that_cannot_be_are_refused(box: Container, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    await box.run("mkdir d; head -c 3000000 /dev/zero > d/zeros")
    with pytest.raises(UsageError, match="not there on this host"):
        await box.upload(tmp_path / "none", "x")
    (tmp_path / "nowhere").symlink_to("none")
    with pytest.raises(UsageError, match="not there on this host"):
        await box.upload(tmp_path / "nowhere", "x")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="neither a file nor a directory"):
        await asyncio.wait_for(box.upload(tmp_path / "pipe", "x"), 10)
    with pytest.raises(UsageError, match="is there already"):
        await box.download("d", tmp_path / "taken")
    with pytest.raises(UsageError, match="is a directory"):
        await box.download("d/zeros", tmp_path / "taken")
    with pytest.raises(ToolError, match="no such file"):
        await box.download("none", tmp_path / "x")
    for path in ("d", "d/zeros"):
        with pytest.raises(ToolError, match=r"more than 1000000 bytes.*download\(max_bytes=…\) allows more"):
            await box.download(path, tmp_path / "x", max_bytes=1_000_000)
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        ("mkdir d; cd d; for n in {1..40}; do mkdir $n; done", {"max_entries": 40}),
        ("mkdir d; cd d; for n in {1..20}; do mkdir n && cd n; done", {"max_depth": 19}),
        ("mkdir d; head -c 1000 /dev/zero > d/f", {"max_bytes": 999}),
        ("mkdir d; truncate -s 64M d/f", {"max_bytes": 10**6}),
    ],
)
async def test_a_directory_of_more_than_may_be_is_a_matter_for_the_model(
    box: Container, tmp_path: Path, command: str, limit: dict[str, int]
) -> None:
    await box.run(command)
    for place in ("new", "there"):
        (tmp_path / "there").mkdir(exist_ok=True)
        with pytest.raises(ToolError, match=f"holds more than.*{next(iter(limit))}=…"):
            await box.download("d", tmp_path / place, **limit)
        assert not list((tmp_path / place).glob("*"))
    if "truncate" not in command:
        just = {name: value + 1 for name, value in limit.items()}
        assert await box.download("d", tmp_path / "new", **just) == []


@pytest.mark.parametrize(
    "limit", [{"max_bytes": 0}, {"max_entries": "5"}, {"max_depth": -1}, {"timeout": float("nan")}]
)
async def test_limits_that_cannot_be_are_the_users(box: Container, tmp_path: Path, limit: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"download\("):
        await box.download("/etc", tmp_path / "x", **limit)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda box: box.read_file(Path("a")), "path"),
        (lambda box: box.read_file(b"a"), "path"),
        (lambda box: box.write_file(None, "x"), "path"),
        (lambda box: box.write_file("a", 5), "data"),
        (lambda box: box.write_file("a", ["x"]), "data"),
        (lambda box: box.upload(5, "a"), "host_path"),
        (lambda box: box.upload("/tmp", Path("a")), "inside"),
        (lambda box: box.download(5, "/tmp/a"), "inside"),
        (lambda box: box.download("a", None), "host_path"),
        (lambda box: box.port("80"), "inside"),
    ],
)
async def test_an_argument_of_a_wrong_type_is_the_caller_s_mistake_and_named(
    call: Callable[[Container], Coroutine[Any, Any, object]], argument: str
) -> None:
    box = Container(ContainerSpec(), "never-started")
    with pytest.raises(UsageError, match=rf"\({argument}=…\) was given"):
        await call(box)


async def test_what_this_host_does_not_read_or_take_is_told(box: Container, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read on this host"):
        await box.upload("/proc/self/mem", "x")
    (tmp_path / "file").touch()
    await box.run("mkdir d; echo x > d/f")
    for path in ("d", "d/f"):
        with pytest.raises(ResourceError, match=r"could not be copied to .* on this host"):
            await box.download(path, tmp_path / "file" / "copy")


# --- users ------------------------------------------------------------------------------------------------------------


async def test_the_user_is_the_one_of_the_spec(ground: Ground, start: Start) -> None:
    if ground.able.backend == "landlock":
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
    if ground.able.multiple_users:
        assert (await box.run("id -u", user="root", new_process=True)).stdout == "0\n"
    else:
        with pytest.raises(PrerequisiteError, match=r"Write ContainerSpec\(user='root'\)"):
            await box.run("id -u", user="root", new_process=True)


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_fork_bomb_is_bounded_and_survived(ground: Ground, box: Container) -> None:
    try:
        await box.run("f() { f | f & }; f; sleep 1", timeout=3)
        await box.run("for i in $(seq 200); do sleep 30 & done; true", timeout=3)
        assert (await box.run("echo alive", timeout=30)).stdout == "alive\n"
    except ResourceError:
        # an engine's limit counts the keeper of the shell too, which a bomb may leave no room to fork
        assert ground.backend.name in ("docker", "podman")
        await box.reset()
        assert (await box.run("echo alive", timeout=30)).stdout == "alive\n"


@pytest.mark.slow
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
        if ground.able.backend == "landlock":
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
