"""Hostile processes in containers: their output, remains and forgeries cost the host almost nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agentfly.core.errors import ResourceDied, ResourceError, ToolError
from agentfly.resources.containers.archives.unpacker import Unpacker
from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.resources.containers.bubblewrap.shell_io import MAX_LINGERING_PIPES
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.runtime_directory import runtime_directory
from agentfly.resources.containers.sandbox_processes import PidNamespace
from agentfly.resources.containers.spec import ContainerSpec
from tests.support.archives import DIRECTORY, SYMLINK, What, all_of, header, sparse_map, tar

pytestmark = pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))

SPEC = ContainerSpec(memory="256MiB", pids=128)
Name = Callable[[], str]
ProcessesWith = Callable[[str], list[int]]
HUGE = b"x" * 80_000_000


def exchanged(box: Container) -> list[str]:
    """The files by which host and sandbox pass commands and their output."""
    return [path.name for path in box._sandbox.process.shell_directory.iterdir()]  # type: ignore[attr-defined]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def input_on_its_way(box: Container) -> asyncio.Task[object]:
    """A command whose input is just being passed in."""
    call: asyncio.Task[object] = asyncio.create_task(box.run("wc -c", stdin=HUGE))
    while not any(file.endswith(".in") for file in exchanged(box)):  # noqa: ASYNC110  (a file appears)
        await asyncio.sleep(0)
    return call


# --- what is left behind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_process", [False, True])
async def test_commands_that_leave_processes_behind_take_a_bounded_number_of_the_hosts_files(
    box: Container, new_process: bool
) -> None:
    await box.run("true")  # the session has its own pipes by now
    before = open_files()
    for _ in range(3 * MAX_LINGERING_PIPES):
        await box.run("sleep 600 &", new_process=new_process)
    assert open_files() <= before + 2 * MAX_LINGERING_PIPES
    assert len(exchanged(box)) <= 2 * (MAX_LINGERING_PIPES + 2) + 3
    assert (await box.run("echo alive; echo err >&2")).stdout == "alive\n"


async def test_an_old_process_left_behind_cannot_print_into_a_later_command(box: Container) -> None:
    await box.run("(trap '' PIPE; until [[ -e /tmp/go ]]; do sleep 0.01; done; echo forged; touch /tmp/went) &")
    for _ in range(MAX_LINGERING_PIPES + 1):
        await box.run("sleep 600 &")
    result = await box.run("touch /tmp/go; until [[ -e /tmp/went ]]; do sleep 0.01; done; echo mine", timeout=20)
    assert (result.stdout, result.stderr) == ("mine\n", "")


async def test_input_that_is_cancelled_on_its_way_leaves_no_file(box: Container) -> None:
    call = await input_on_its_way(box)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [file for file in exchanged(box) if file.endswith((".in", ".sh", ".cmd")) and file[0].isdigit()] == []
    assert (await box.run("echo alive")).stdout == "alive\n"


async def test_a_release_while_input_is_on_its_way_fails_the_command_as_infrastructure(box: Container) -> None:
    call = await input_on_its_way(box)
    await box.release()
    with pytest.raises(ResourceDied):
        await call
    assert not (runtime_directory() / box.instance).exists()


# --- what is forged ---------------------------------------------------------------------------------------------------


async def test_forged_beginnings_of_the_shell_are_not_heeded(box: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    await box.run("true", new_process=True)  # both parts of the shell have reported by now
    looked_up = []
    find = PidNamespace.host_pid
    monkeypatch.setattr(PidNamespace, "host_pid", lambda self, *asked: (looked_up.append(asked), find(self, *asked))[1])  # type: ignore[func-returns-value]
    assert box._sandbox.shell is not None  # type: ignore[attr-defined]
    keepers = box._sandbox.shell.shell_pids  # type: ignore[attr-defined]
    lines = "for n in {1..10}; do echo h 2; echo f 3; echo e 0 1; echo f 4; done"
    result = await box.run(f"X=5; {lines} > /proc/1/fd/201; echo done", timeout=60)
    assert result.stdout == "done\n"
    assert box._sandbox.shell.shell_pids == keepers  # type: ignore[attr-defined]
    assert len(looked_up) == 0
    assert (await box.run("echo $X")).stdout == "5\n"


async def test_a_shell_that_is_killed_is_heard_of_though_its_reports_could_be_forged(box: Container) -> None:
    for _ in range(5):
        assert (await box.run("kill -9 $BASHPID", timeout=20)).exit_code == 137
    assert (await box.run("echo alive")).stdout == "alive\n"


async def test_programs_that_the_agent_put_first_are_not_those_that_files_go_through(box: Container) -> None:
    forge = "for name in head cat mkdir; do printf '#!/bin/sh\\necho forged' > $d/$name; chmod +x $d/$name; done"
    await box.run(f"for d in /usr/local/bin /usr/local/sbin; do {forge}; done")
    await box.write_file("deep/file", b"content")
    assert await box.read_file("deep/file") == b"content"


FORGED: dict[str, bytes] = {
    "a file as a directory": tar({"a": b"", "a/b": b""}),
    "a long name": tar({"n" * 300: b""}),
    "no archive": b"1" * 100_000,
    "a map of a sparse file of very many parts": sparse_map(2**13),
    "very many directories": tar({"/".join("d" * 1900): (DIRECTORY, "")}),
    "a number of many digits": header(b"p", tarfile.XHDTYPE, content=b"1" * 200_000),
}


@pytest.mark.parametrize("kind", FORGED)
async def test_an_archive_that_an_agents_own_tar_made_up_is_a_matter_for_the_model(
    box: Container, tmp_path: Path, kind: str
) -> None:
    await forge_tar(box, FORGED[kind])
    with pytest.raises(ToolError, match="could not be copied"):
        await box.download("d", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


async def test_a_forged_archive_cannot_have_anything_of_the_host_removed(box: Container, tmp_path: Path) -> None:
    host = tmp_path / "host"
    host.mkdir()
    (host / "link").symlink_to("anything")
    before = all_of(host)
    entries: list[tuple[str, What]] = [("x", (DIRECTORY, "")), ("x/link", (SYMLINK, "/a")), ("x", (SYMLINK, str(host)))]
    await forge_tar(box, tar(entries))
    assert await box.download("d", tmp_path / "copy") == ["x"]
    assert all_of(host) == before


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), TimeoutError("it took longer")])
async def test_a_host_that_is_full_or_slow_is_no_matter_for_the_model(
    box: Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(Unpacker, "remove_escaping_links", fail)
    await box.run("mkdir d; touch d/f")
    with pytest.raises(ResourceError, match=r"could not be copied to .* on this host") as failed:
        await box.download("d", tmp_path / "copy")
    assert not failed.value.by_policy
    assert not (tmp_path / "copy").exists()


async def test_a_download_that_is_cancelled_stops_and_leaves_nothing(
    box: Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def for_ever(unpacker: Unpacker) -> None:
        loop.call_soon_threadsafe(begun.set)
        while True:
            unpacker._token.check()

    monkeypatch.setattr(Unpacker, "remove_escaping_links", for_ever)
    await box.run("mkdir d; touch d/f")
    download = asyncio.create_task(box.download("d", tmp_path / "copy"))
    await begun.wait()
    assert (tmp_path / "copy" / "f").exists()
    download.cancel()
    with pytest.raises(asyncio.CancelledError):
        await download
    assert not (tmp_path / "copy").exists()


async def forge_tar(box: Container, archive: bytes) -> None:
    """Have a box's tar write an archive of the agent's making."""
    await box.write_file("/tmp/archive", archive)
    await box.write_file("/tmp/tar", "#!/bin/sh\ncat /tmp/archive")
    forged = await box.run("mkdir d; chmod +x /tmp/tar; mv -f /tmp/tar /usr/bin")
    if forged.exit_code:
        pytest.skip("programs cannot be replaced inside: start the tests as root")


async def test_output_is_given_as_it_is_even_where_it_names_the_shells_scripts(box: Container) -> None:
    line = "/run/agentfly/1.sh: line 1: no\n"
    assert (await box.run(f"echo '{line[:-1]}'")).stdout == line


# --- words that cannot be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["a\0b", "a\ud83db"])
async def test_words_that_no_shell_can_take_are_a_matter_for_the_model(box: Container, wrong: str) -> None:
    for call in (
        lambda: box.run(wrong),
        lambda: box.run("true", cwd=wrong),
        lambda: box.run("true", env={"A": wrong}),
        lambda: box.read_file(wrong),
        lambda: box.write_file(wrong, b""),
    ):
        with pytest.raises(ToolError, match="at position 1"):
            await call()


async def test_a_name_that_is_not_utf8_is_written_as_python_writes_it(box: Container) -> None:
    path = os.fsdecode(b"b\xff")
    await box.write_file(path, "text")
    assert (await box.run("cat $'b\\xff'")).stdout == "text"
    assert (await box.run(f"cat {path}", cwd="/workspace")).stdout == "text"
    assert await box.read_file(path) == b"text"


# --- signals to whoever is near ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", ["STOP", "KILL"])
async def test_a_signal_to_the_process_group_reaches_nobody_outside(box: Container, number: str) -> None:
    await box.run(f"kill -{number} 0", timeout=1)
    assert (await box.run("echo alive")).stdout == "alive\n"
    assert box._sandbox.process.launched is not None  # type: ignore[attr-defined]
    assert state_of(box._sandbox.process.launched.process.pid) == "S"  # type: ignore[attr-defined]


async def test_what_attends_to_a_box_is_stopped_and_the_box_is_released_all_the_same(box: Container) -> None:
    assert box._sandbox.process.launched is not None  # type: ignore[attr-defined]
    os.kill(box._sandbox.process.launched.process.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
    async with asyncio.timeout(10):
        await box.release()


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
async def test_a_time_that_cannot_be_is_a_matter_for_the_model(box: Container, timeout: float) -> None:
    with pytest.raises(ToolError, match="seconds above 0"):
        await box.run("true", timeout=timeout)


# --- ports ------------------------------------------------------------------------------------------------------------


async def test_who_is_connected_to_a_port_is_told_when_the_box_goes(name: Name) -> None:
    box = Container(replace(SPEC, ports=(8000,)), name())
    await box.start()
    try:
        where = await box.port(8000)
        listen = (
            "import socket; s = socket.create_server(('127.0.0.1', 8000)); c, _ = s.accept(); c.recv(9); c.send(b'y')"
        )
        await box.run(f'python3 -c "{listen}; c.recv(1)" > /dev/null 2>&1 &')
        async with asyncio.timeout(20):
            said = b""
            while not said:
                reader, writer = await asyncio.open_connection(*where)
                writer.write(b"x")
                said = await reader.read(1)
    finally:
        await box.release()
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("turns", [0, 1, 3, 10])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_release_while_a_port_is_opened_leaves_nothing_that_listens(
    name: Name, processes_with: ProcessesWith, turns: int, cancelled: bool
) -> None:
    box = Container(replace(SPEC, ports=(8000,)), name())
    await box.start()
    before = open_files(), processes_with("sockets_inside.py")
    opening = asyncio.create_task(box.port(8000))
    for _ in range(turns):
        await asyncio.sleep(0)
    if cancelled:
        opening.cancel()
    await box.release()
    with contextlib.suppress(ResourceDied, asyncio.CancelledError):
        await opening
    assert processes_with("sockets_inside.py") == before[1]
    assert open_files() <= before[0]


async def test_a_port_for_which_there_are_no_files_left_is_refused_as_infrastructure(
    name: Name, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Container(replace(SPEC, ports=(8000,)), name())
    await box.start()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socketpair", _no_files)
            with pytest.raises(ResourceError, match="Too many open files"):
                await box.port(8000)
        assert await box.port(8000)
    finally:
        await box.release()


def _no_files() -> None:
    raise OSError(errno.EMFILE, "Too many open files")
