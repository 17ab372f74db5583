"""Bytes that a sandbox writes into the pipes of its shell: any bytes have bounded cost and a typed end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agentfly.core.errors import ResourceDied, SandboxFlooded
from agentfly.resources.containers.bubblewrap import shell_processes as reading
from agentfly.resources.containers.bubblewrap.backend import Bubblewrap, probe
from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.bubblewrap.shell_processes import ReportReader
from agentfly.resources.containers.command import Command, CommandOutcome, CommandResult, TimeLimit
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.sandbox_processes import PidNamespace
from agentfly.resources.containers.shell import FloodLimiter
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.containers.stream_shell.channels import Stream
from agentfly.resources.containers.stream_shell.protocol import MAX_REPORT_BYTES, ReportSplitter, ShellScripts
from agentfly.resources.containers.stream_shell.shell import StreamShell
from agentfly.resources.process.procfs import children
from agentfly.resources.resource import Status
from tests.support.scale import scaled
from tests.support.virtual_time import run_in_virtual_time

MARK = ShellScripts("0123456789abcdef").mark

# --- the pipe of bubblewrap's shell -----------------------------------------------------------------------------------

numbers = st.integers(0, 10**30) | st.integers(0, 300) | st.just(0)
lines = st.builds(
    lambda word, numbers: b"%c " % word + b" ".join(b"%d" % n for n in numbers) + b"\n",
    st.sampled_from(b"bdefhx"),
    st.lists(numbers, max_size=4),
)
writings = st.lists(lines | st.binary(max_size=40) | lines.map(lambda line: line[:-1]), max_size=60).map(b"".join)
cuts = st.lists(st.integers(1, 300), min_size=1, max_size=8)


def pieces(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    for size in itertools.cycle(sizes):
        if not data:
            return
        yield data[:size]
        data = data[size:]


class Heard:
    """What `ReportReader` makes of what is written on a pipe, turn by turn of the event loop."""

    def __init__(self, descriptor: int) -> None:
        self.reports: list[tuple[bytes, list[int]]] = []
        self.ends: list[str] = []
        self.turns: list[list[bytes]] = [[]]
        self.reader = ReportReader(
            descriptor,
            report=self._report,
            ended=lambda: self.ends.append("ended"),
            flooded=lambda: self.ends.append("flooded"),
        )
        self._loop = asyncio.get_running_loop()

    def _report(self, word: bytes, given: list[int]) -> None:
        if not self.turns[-1]:
            self._loop.call_soon(self.turns.append, [])
        self.turns[-1].append(word)
        self.reports.append((word, given))


async def heard(written: bytes, sizes: list[int]) -> Heard:
    """Write to a pipe in pieces of these sizes, close it, and read it to its end."""
    source, sink = os.pipe()
    try:
        os.set_blocking(source, False)
        os.set_blocking(sink, False)
        heard = Heard(source)
        for piece in pieces(written, sizes):
            while piece and "flooded" not in heard.ends:
                try:
                    piece = piece[os.write(sink, piece) :]  # noqa: PLW2901
                except BlockingIOError:
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
        os.close(sink)
        sink = -1
        async with asyncio.timeout(30):
            while not heard.ends:  # noqa: ASYNC110  (the turns of the event loop are what this is about)
                await asyncio.sleep(0)
        heard.reader.close()
        return heard
    finally:
        os.close(source)
        if sink >= 0:
            os.close(sink)


@settings(max_examples=scaled(25, 5_000))
@given(writings, cuts)
@example(b"f 1\n" * 30, [4])
@example(b"f 1\n" * 300, [300])
@example(b"h 1 0\n" * 100 + b"d 1 0\n", [7])
@example(b"e 0 1 99999999999999999999\n" * 20, [300])
@example(b"d " + b"1" * 5000 + b"\n", [300])
@example(b"\n" * 2000, [300])
def test_reports_are_read_in_turns_of_bounded_work_whatever_is_written_and_however_it_is_cut(
    written: bytes, sizes: list[int]
) -> None:
    with mock.patch.object(reading, "_PAUSE_S", 0):
        result = asyncio.run(heard(written, sizes))
    assert result.ends in (["ended"], ["flooded"])
    for turn in result.turns:
        assert sum(len(word) + 1 for word in turn) <= reading.MAX_BYTES_PER_TURN
        assert sum(word in b"efh" for word in turn) <= reading.MAX_LOOKUPS_PER_TURN
    if result.ends == ["ended"]:
        whole = [found for line in written.split(b"\n")[:-1] if (found := reading._REPORT.search(line[-256:]))]
        assert result.reports == [(found[1], [int(n) for n in found[2].split()]) for found in whole]


def test_what_is_written_without_end_is_read_to_a_bound_and_then_no_more() -> None:
    for line in (b"d 1 0\n", b"f 1\n", b"x" * 99 + b"\n", b"x" * 99):
        with mock.patch.object(reading, "_PAUSE_S", 0):
            result = asyncio.run(heard(line * (2**20 // len(line)), [4096]))
        assert result.ends == ["flooded"]
        assert len(result.reports) < 20_000


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 50), st.booleans()), max_size=50))
def test_an_allowance_never_lets_pass_more_than_what_time_and_requests_have_given(
    history: list[tuple[float, int, bool]],
) -> None:
    now = given = 0.0
    allowance = FloodLimiter(100, per_second=5, per_request=20, clock=lambda: now)
    taken = 0
    for seconds, amount, asked in history:
        now += seconds
        given += 5 * seconds
        if asked:
            allowance.add_request()
            given += 20
        if not allowance.spend(amount):
            break
        taken += amount
        assert taken <= 100 + given + 1e-6


@given(st.lists(st.tuples(st.sampled_from(["begin", "pause", "resume", "wait"]), st.integers(1, 9)), max_size=20))
@example([("pause", 1), ("resume", 1), ("wait", 9), ("begin", 3)])
@example([("pause", 1), ("begin", 3), ("wait", 9), ("resume", 1)])
def test_the_time_of_a_command_counts_from_its_begin_and_while_its_sandbox_goes_on(
    history: list[tuple[str, int]],
) -> None:
    async def live() -> None:
        expired: list[float] = []
        loop = asyncio.get_running_loop()
        limit = TimeLimit(lambda: expired.append(loop.time()), paused=False)
        left, going, begun = 0.0, True, False
        for step, seconds in history:
            match step:
                case "begin" if not begun:
                    begun, left = True, float(seconds) + 0.5
                    limit.begin(left)
                case "pause":
                    going = False
                    limit.pause()
                case "resume":
                    going = True
                    limit.resume()
                case "wait":
                    await asyncio.sleep(seconds)
                    left -= seconds * (begun and going)
            assert bool(expired) is (begun and left < 0)
        limit.end()
        await asyncio.sleep(100)
        assert bool(expired) is (begun and left < 0)

    run_in_virtual_time(live())


# --- the streams of the other shell -----------------------------------------------------------------------------------

words = st.sampled_from([b"b", b"d", b"e", b"f", b"h", b"o", b"r", b"x", b"", b"zz"])
fields = st.sampled_from([b"0", b"1", b"2", b"137", b"-1", b"1_0", b"\0", b"a\0b 1", b"9" * 5000, b"\xff", b""])
marked = st.builds(lambda word, given: MARK + b" ".join([word, *given]) + b"\n", words, st.lists(fields, max_size=8))
streams = st.lists(
    marked | st.binary(max_size=40) | st.integers(1, len(MARK)).map(lambda n: MARK[:n]) | marked.map(lambda m: m[:-1]),
    max_size=30,
).map(b"".join)


def split(data: bytes, sizes: list[int]) -> list[bytes | list[str]]:
    """What a splitter makes of data in pieces, with what was printed joined between reports."""
    splitter, joined = ReportSplitter(MARK), []  # type: ignore[var-annotated]
    for piece in pieces(data, sizes):
        for one in splitter.split(piece):
            if joined and isinstance(one, bytes) and isinstance(joined[-1], bytes):
                joined[-1] += one
            else:
                joined.append(one)
    return joined


@settings(max_examples=scaled(40, 20_000))
@given(streams, cuts)
@example(MARK * 3 + b"\n", [1])
@example(b"a" + MARK + b"d 1 0\nb", [300])
@example(MARK + b"x" * MAX_REPORT_BYTES + b"\n" + MARK + b"d 1\n", [300])
def test_a_stream_is_split_at_its_reports_in_the_same_way_however_it_is_cut(data: bytes, sizes: list[int]) -> None:
    found = split(data, sizes)
    assert found == split(data, [len(data) + 1])
    printed = b"".join(one for one in found if isinstance(one, bytes))
    rest = MARK + b"end\n"  # makes what was kept back come out, as print or as the beginning of a report
    assert printed == b"".join(one for one in split(data + rest, sizes) if isinstance(one, bytes))[: len(printed)]


def test_marks_without_end_are_split_in_time_that_grows_with_the_bytes_alone() -> None:
    data = MARK * (2**22 // len(MARK))  # hours, if each mark had all that follows looked through, or copied
    assert (
        len(b"".join(one for one in ReportSplitter(MARK).split(data) if isinstance(one, bytes)))
        > len(data) - MAX_REPORT_BYTES
    )


class Hostile(Stream):
    """A stream out of which given pieces come. What is asked on it is kept, a request each."""

    def __init__(self, data: list[tuple[int, bytes]]) -> None:
        self.asked: list[bytes] = []
        self._data = data

    async def read(self) -> tuple[int, bytes] | None:
        await asyncio.sleep(0)
        return self._data.pop(0) if self._data else None

    async def write(self, data: bytes) -> None:
        self.asked.append(data)

    async def end_input(self) -> None: ...

    async def close(self) -> None: ...


REQUEST = re.compile(rb"0123456789abcdef [a-z] \d+ \w+ -?\d+ \S+ (\d+)(?: -?\d+)*(?: -)? *\0(.*)", re.DOTALL)


async def answered(data: list[tuple[int, bytes]], *, own_process: bool) -> tuple[object, list[bytes], int, int]:
    """How a command ends whose sandbox says these things: its end, what was asked, tasks at most, streams opened."""
    opened = most = 0

    async def open_stream(_: Sequence[str]) -> Stream:
        nonlocal opened
        opened += 1
        return Hostile([(1, MARK + b"o 7\n"), (1, MARK + b"d 1 0 1 0 \n")])

    async def describe_end() -> str:
        return "it ended"

    stream = Hostile([(1, MARK + b"f 1 2\n" + MARK + b"h 3\n"), *data])
    shell = StreamShell(stream, ShellScripts("0123456789abcdef"), open_stream, workdir="/", describe_end=describe_end)
    command = Command(b"true", own_process, None, {}, None, 100)
    running = asyncio.create_task(shell.run(command, timeout=30))
    while not running.done():
        most = max(most, len(asyncio.all_tasks()))
        await asyncio.sleep(0)
    await shell.close()
    for _ in range(5):
        await asyncio.sleep(0)
    return running.exception() or running.result(), stream.asked, most, opened


@settings(max_examples=scaled(20, 10_000))
@given(st.lists(st.tuples(st.sampled_from([1, 2]), streams), max_size=8), st.booleans())
@example(
    [(1, MARK + b"b 1\n" + MARK + b"d 1 0 0 0 4 \0injected r 0 0 0 /dev/null 0 \0\n"), (2, MARK + b"d 1\n")], False
)
@example([(1, MARK + b"b 1\n" + (MARK + b"e 0 0\n") * 2000)], False)
@example([(1, (MARK + b"x 1\n") * 2000)], True)
@example([(1, (MARK + b"f 1 2\n") * 2000)], True)
@example([(1, (MARK + b"h -1\n") * 20)], False)
def test_whatever_a_stream_says_a_command_ends_typed_and_nothing_but_requests_goes_in(
    data: list[tuple[int, bytes]], own_process: bool
) -> None:
    end, asked, most, opened = asyncio.run(answered(data, own_process=own_process))
    assert isinstance(end, CommandOutcome | SandboxFlooded | ResourceDied)
    assert isinstance(end, SandboxFlooded) or not isinstance(end, CommandOutcome) or end.exit_code in range(256)
    assert most < 20
    assert opened < 10
    for request in asked:
        found = REQUEST.fullmatch(request)
        assert found is not None, request
        assert len(found[2]) == int(found[1])


# --- real sandboxes ---------------------------------------------------------------------------------------------------

needs_bubblewrap = pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))
FLOODS = {
    "reports": "yes 'd 999999 0' > /proc/$$/fd/201",
    "processes": "yes 'f 1' > /proc/$$/fd/201",
    "words": "yes > /proc/$$/fd/200",
    "spawn": "yes > /proc/$$/fd/202",
    "zeros": "cat /dev/zero > /proc/$$/fd/201",
}
QUICK = "processes"


async def flood_of(box: Container, flood: str) -> None:
    """Flood the shell of a box that has many processes, and use it until it is ended."""
    await box.run("for n in {1..40}; do (setsid sleep 600 &); done")
    async with asyncio.timeout(60):
        await box.run(f"(trap '' PIPE; {flood}) & sleep 0.1")
        while True:
            await box.run("true", new_process=True, timeout=5)
            await asyncio.sleep(0.02)


@needs_bubblewrap
@pytest.mark.parametrize(
    "flood", [pytest.param(flood, id=id_, marks=[pytest.mark.slow] * (id_ != QUICK)) for id_, flood in FLOODS.items()]
)
async def test_a_box_that_floods_its_shell_is_ended_and_told_so_and_a_reset_makes_it_new(
    launcher: Launcher, name: Callable[[], str], flood: str
) -> None:
    boxes = [Container(ContainerSpec(pids=64), name(), backend=Bubblewrap(launcher)) for _ in range(2)]
    try:
        await asyncio.gather(*(box.start() for box in boxes))
        bad, good = boxes
        with pytest.raises(SandboxFlooded, match="processes in it flooded"):
            await flood_of(bad, flood)
        for call in (bad.run("true"), bad.read_file("a"), bad.write_file("a", b"")):
            with pytest.raises(SandboxFlooded):
                await call
        assert await bad.status() is Status.HEALTHY  # it is its owner's doing, and not to be replaced under him
        await bad.freeze()
        await bad.thaw()
        assert (await good.run("echo mine")).stdout == "mine\n"
        await bad.reset()
        assert (await bad.run("echo new; ls")).stdout == "new\n"
    finally:
        await asyncio.gather(*(box.release() for box in boxes))


NO_STARTER = r"""
import os, time
def fill():
    "As many children of process 1 as there may be."
    for _ in range(300):
        try:
            if (parent := os.fork()) == 0:
                try:
                    if os.fork() == 0:
                        time.sleep(600)
                finally:
                    os._exit(0)
            os.waitpid(parent, 0)
        except OSError:
            pass
keepers = {int(pid) for pid in open("/proc/1/task/1/children").read().split()} - {os.getppid()}
for _ in range(2):
    if os.fork() == 0:
        while True:
            fill()
time.sleep(0.5)
for keeper in keepers:
    os.kill(keeper, 9)
time.sleep(0.3)
with open("/proc/1/fd/201", "wb", buffering=0) as reports:
    while True:
        reports.write(b"f 1\n" * 256)
"""


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs the system's python3")
async def test_processes_are_looked_for_among_many_away_from_the_event_loop(
    launcher: Launcher, name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[tuple[bool, int]] = []  # whether on the event loop, and among how many
    find = PidNamespace.host_pid

    def looked(self: PidNamespace, inside: int, parent: int) -> int | None:
        looks.append((threading.current_thread() is threading.main_thread(), len(children(parent))))
        return find(self, inside, parent)

    monkeypatch.setattr(PidNamespace, "host_pid", looked)
    box = Container(ContainerSpec(pids=200), name(), backend=Bubblewrap(launcher))
    try:
        await box.start()
        await box.write_file("fill.py", NO_STARTER)
        with pytest.raises(SandboxFlooded):
            await box.run("/usr/bin/python3 fill.py", timeout=30)
        assert max(among for _, among in looks) > 100
        assert max((among for on_loop, among in looks if on_loop), default=0) < 30
    finally:
        await box.release()


@needs_bubblewrap
@pytest.mark.slow
@settings(max_examples=scaled(15, 300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["201", "200", "spawn"]), writings), min_size=1, max_size=4))
@example([("201", b"e 0 0 1\n" * 3 + b"h 1 0\n" * 3)])
@example([("200", b"g0000001" * 3)])
@example([("spawn", b"\n1 0 0\n")])
def test_what_one_box_forges_never_reaches_another(
    launcher: Launcher, name: Callable[[], str], forged: list[tuple[str, bytes]]
) -> None:
    async def one() -> None:
        boxes = [Container(ContainerSpec(pids=64), name(), backend=Bubblewrap(launcher)) for _ in range(2)]
        try:
            await asyncio.gather(*(box.start() for box in boxes))
            bad, good = boxes
            first = bad._sandbox.process.pid_namespace.init_pid  # type: ignore[attr-defined]
            calls = [
                asyncio.create_task(bad.run("sleep 0.05; echo mine", timeout=1, new_process=n)) for n in (False, True)
            ]
            for where, written in forged:
                await asyncio.sleep(0.01)
                path = f"/proc/{first}/fd/{where}" if where.isdigit() else bad._sandbox.process.shell_directory / where  # type: ignore[attr-defined]
                with contextlib.suppress(OSError):
                    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                    try:
                        os.write(descriptor, written)
                    finally:
                        os.close(descriptor)
            assert (await good.run("echo mine")).stdout == "mine\n"
            async with asyncio.timeout(60):
                ends = await asyncio.gather(*calls, return_exceptions=True)
            for end in ends:
                assert isinstance(end, CommandResult | SandboxFlooded | ResourceDied)
                assert not isinstance(end, CommandResult) or end.exit_code in range(256)
            assert (await good.run("echo mine")).stdout == "mine\n"
        finally:
            async with asyncio.timeout(30):
                await asyncio.gather(*(box.release() for box in boxes))

    asyncio.run(one())
