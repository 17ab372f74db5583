"""Simulators in separate processes: a crash affects only the simulator."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from agentfly.core.errors import ResourceDied, ResourceResetError, UsageError
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.environments import fork_server
from agentfly.resources.environments.environment import Environment
from agentfly.resources.environments.pickling import dumps, loads
from agentfly.resources.environments.remote_error import RemoteError
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.environments.worker_process import reap
from agentfly.resources.resource import Status

Starts = Literal["fork", "spawn"]
both_starts = pytest.mark.parametrize("starts", ["fork", "spawn"])

SEEN: list[str] = []
"""State of the module, as some simulators keep it."""


class Locked(Exception):
    """An exception that cannot travel."""

    def __init__(self) -> None:
        super().__init__("the door is locked")
        self.lock = threading.Lock()


class Machine:
    """A simulator that misbehaves when it is told to."""

    def echo(self, value: Any) -> Any:
        return value

    def exit(self, status: int) -> None:
        print("last words on stdout")
        print("last words on stderr", file=sys.stderr)
        os._exit(status)

    def kill(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def hang(self) -> None:
        while True:
            pass

    def fill(self, count: int) -> int:
        return len(bytearray(count))

    def shout(self, count: int) -> int:
        sys.stderr.write("x" * count)
        return count

    def read_stdin(self) -> str:
        return sys.stdin.read()

    def locked(self) -> None:
        raise Locked

    def give_lock(self) -> dict[str, Any]:
        return {"inside": threading.Lock()}

    def see(self, what: str) -> list[str]:
        SEEN.append(what)
        return SEEN

    def children(self) -> list[int]:
        """Children of three kinds: an ordinary one, one in its own session, one whose parent has ended."""
        sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
        ordinary = subprocess.Popen(sleep)
        apart = subprocess.Popen(sleep, start_new_session=True)
        script = "(sleep 300 </dev/null >/dev/null 2>&1 & echo $!)"
        orphan = subprocess.run(["setsid", "sh", "-c", script], stdout=subprocess.PIPE, timeout=5, check=False)
        return [os.getpid(), ordinary.pid, apart.pid, int(orphan.stdout)]


class QuietMachine(Machine):
    def children(self) -> list[int]:
        sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
        return [os.getpid(), subprocess.Popen(sleep, start_new_session=True).pid]


def machine_after(seconds: float) -> Machine:
    time.sleep(seconds)
    return Machine()


async def started(**fields: Any) -> Environment:
    environment = Environment(EnvironmentSpec(**{"factory": Machine, "runs": "process", **fields}), "machine-1")
    await environment.start()
    return environment


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (
            psutil.STATUS_ZOMBIE,
            psutil.STATUS_DEAD,
        )  # the latter while it is reaped
    except psutil.NoSuchProcess:
        return True


def living_below(process: psutil.Process) -> set[int]:
    return {child.pid for child in process.children(recursive=True) if not gone(child.pid)}


def eventually(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.slow
async def test_a_crash_is_told_with_its_cause_and_the_end_of_the_output() -> None:
    machine = await started()
    with pytest.raises(ResourceDied, match=r"(?s)during exit\(\): it exited with status 3.*on stdout.*on stderr"):
        await machine.exit(3)
    assert await machine.status() is Status.BROKEN
    with pytest.raises(ResourceResetError, match="its process has ended"):
        await machine.reset()
    with pytest.raises(ResourceDied, match="its process has ended"):
        await machine.echo(1)
    await machine.release()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "told"),
    [(signal.SIGKILL, "ended by SIGKILL, perhaps because memory ran out"), (35, "ended by signal 35")],
)
async def test_a_death_by_a_signal_is_told(number: int, told: str) -> None:
    machine = await started()
    with pytest.raises(ResourceDied, match=told):
        await machine.kill(int(number))
    await machine.release()


async def test_a_process_that_dies_between_calls_is_noticed_without_a_call() -> None:
    machine = await started()
    (pid, *_) = await machine.children()
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(eventually, lambda: gone(machine.traces["pid"]))
    for _ in range(100):
        if await machine.status() is Status.BROKEN:
            break
        await asyncio.sleep(0.01)
    assert await machine.status() is Status.BROKEN
    await machine.release()


@pytest.mark.slow
async def test_a_call_that_hangs_in_a_busy_loop_is_killed_with_all_it_started() -> None:
    machine = await started(call_timeout_s=2.0)
    pids = await machine.children()
    with pytest.raises(ResourceDied, match=r"hang\(\) did not end"):
        await machine.hang()
    assert all(gone(pid) for pid in pids)
    await machine.release()


async def test_release_leaves_no_process_whatever_the_simulator_started() -> None:
    machine = await started()
    pids = [machine.traces["pid"], *await machine.children()]
    assert len(pids) == 5
    assert not any(gone(pid) for pid in pids)
    await machine.release()
    assert all(gone(pid) for pid in pids)
    await machine.release()


@pytest.fixture
def no_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zygote ends with the last simulator."""
    monkeypatch.setattr(fork_server, "IDLE_TIMEOUT_S", 0.0)


@pytest.fixture(scope="module", autouse=True)
def others() -> Iterator[None]:
    """Programs that other tests have running all the while, such as container engines, are no business of these."""
    _others.update(psutil.Process().children())
    yield
    _others.clear()


_others: set[psutil.Process] = set()


async def no_child_is_left() -> bool:
    for _ in range(500):
        if not set(psutil.Process().children()) - _others:
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.mark.slow
@both_starts
@pytest.mark.usefixtures("no_linger")
async def test_rounds_leave_no_process_and_no_open_file(starts: Starts) -> None:
    machine = await started(starts=starts)
    await machine.release()
    assert await no_child_is_left()
    me = psutil.Process()
    before = me.num_fds()
    for _ in range(20 if starts == "fork" else 5):
        machine = await started(factory=QuietMachine, starts=starts)
        (pid, child) = await machine.children()
        await machine.release()
        assert gone(pid)
        assert gone(child)
        await machine.release()
    assert await no_child_is_left()
    assert me.num_fds() <= before


async def rounds_of_the_loop(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.slow
@both_starts
async def test_a_start_that_is_cancelled_at_any_moment_leaves_neither_a_process_nor_an_open_file(
    starts: Starts,
) -> None:
    me = psutil.Process()
    spec = EnvironmentSpec(factory=machine_after, args=(60,), runs="process", starts=starts)
    warming = Environment(EnvironmentSpec(factory=machine_after, args=(0,), runs="process", starts=starts), "machine-1")
    await warming.start()  # so that the others are forked at once
    open_files = []
    for rounds in range(12):
        before = living_below(me)
        machine = Environment(spec, "machine-2")
        starting = asyncio.create_task(machine.start())
        await rounds_of_the_loop(rounds)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await machine.release()
        await rounds_of_the_loop(3)  # in which asyncio closes what it was told to
        open_files.append(me.num_fds())
        assert living_below(me) == before
    assert set(open_files) == {open_files[0]}
    await warming.release()


@pytest.mark.slow
@both_starts
@pytest.mark.usefixtures("no_linger")
async def test_a_process_that_cannot_be_started_leaves_no_open_file(
    monkeypatch: pytest.MonkeyPatch, starts: Starts
) -> None:
    await (await started()).release()
    assert await no_child_is_left()
    await rounds_of_the_loop(3)
    before = psutil.Process().num_fds()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    for _ in range(3):
        machine = Environment(EnvironmentSpec(factory=Machine, runs="process", starts=starts), "machine-3")
        with pytest.raises(FileNotFoundError):
            await machine.start()
        await machine.release()
    await rounds_of_the_loop(3)
    assert psutil.Process().num_fds() == before


class Finder:
    """Notes which modules are looked for, and finds none."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        self.asked.append(name)


def test_modules_are_looked_for_once_and_not_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = Finder()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    request = ("call", "step", (Fraction(1, 3), Machine()), {})  # type: ignore[var-annotated]
    names = ("request", "method", "args", "kwargs")
    dumps(request, names)
    finder.asked.clear()
    for _ in range(5):
        assert loads(dumps(request, names))[2][0] == Fraction(1, 3)
    assert finder.asked == []


@pytest.mark.slow
async def test_memory_is_bounded_and_running_out_of_it_is_told_as_that() -> None:
    machine = await started(memory="300MiB")
    assert await machine.fill(2**20) == 2**20
    with pytest.raises(ResourceDied, match="ran out of its limit of 300MiB during fill"):
        await machine.fill(2**30)
    assert await machine.status() is Status.BROKEN
    await machine.release()


@pytest.mark.slow
async def test_output_without_end_neither_blocks_nor_is_kept() -> None:
    machine = await started()
    assert await machine.shout(5_000_000) == 5_000_000
    with pytest.raises(ResourceDied) as caught:
        await machine.exit(1)
    assert len(str(caught.value)) < 5000
    await machine.release()


async def test_reading_standard_input_gives_its_end_at_once() -> None:
    machine = await started()
    assert await machine.read_stdin() == ""
    await machine.release()


@pytest.mark.slow
async def test_large_values_pass_both_ways() -> None:
    machine = await started()
    large = os.urandom(5_000_000)
    assert await machine.echo(large) == large
    await machine.release()


async def test_an_exception_that_cannot_travel_is_told_in_words_with_its_traceback() -> None:
    machine = await started()
    with pytest.raises(RemoteError, match="Locked: the door is locked") as caught:
        await machine.locked()
    assert "in locked\n" in "".join(caught.value.__notes__)
    assert await machine.echo(1) == 1
    await machine.release()


async def test_a_result_or_an_argument_that_cannot_travel_is_named_by_its_path() -> None:
    machine = await started()
    with pytest.raises(UsageError, match=r"\['inside'\] is a _thread.lock"):
        await machine.give_lock()
    with pytest.raises(UsageError, match=r"args\[0\]\['mine'\] is a _thread.lock"):
        await machine.echo({"mine": threading.Lock()})
    assert await machine.echo("still here") == "still here"
    await machine.release()


async def test_state_of_modules_is_each_simulators_own() -> None:
    machines = await asyncio.gather(*(started() for _ in range(2)))
    for round_ in range(1, 3):
        assert [await machine.see(str(place)) for place, machine in enumerate(machines)] == [
            ["0"] * round_,
            ["1"] * round_,
        ]
    await machines[0].reset()
    assert await machines[0].see("fresh") == ["fresh"], "no reset of its own: a new process"
    assert SEEN == []
    await asyncio.gather(*(machine.release() for machine in machines))


def states(pids: list[int]) -> set[str]:
    return {psutil.Process(pid).status() for pid in pids}


@pytest.mark.slow
async def test_a_frozen_simulator_stands_still_with_all_that_it_started_and_goes_on_when_thawed(tmp_path: Path) -> None:
    spec = EnvironmentSpec(factory=Machine, runs="process", idle="freeze", capacity=1)
    async with ResourceEngine(ledger=tmp_path / "state") as engine:
        lease = await engine.acquire(spec, "rollout")
        pids = await lease.resource.children()
        assert await asyncio.to_thread(eventually, lambda: states(pids) == {psutil.STATUS_STOPPED})
        assert await engine.check(lease) is Status.HEALTHY
        for _ in range(2):
            assert await lease.resource.echo(1) == 1
        assert await asyncio.to_thread(eventually, lambda: states(pids) == {psutil.STATUS_STOPPED})
    assert all(gone(pid) for pid in pids)


async def test_a_frozen_simulator_is_closed_and_gone_when_it_is_released(tmp_path: Path) -> None:
    keeping = Environment(EnvironmentSpec(factory=Keeping, args=(str(tmp_path / "end"),), runs="process"), "machine-9")
    await keeping.start()
    await keeping.freeze()
    assert await keeping.status() is Status.HEALTHY
    await keeping.release()
    assert (tmp_path / "end").read_text() == "closed"


class Keeping:
    def __init__(self, path: str) -> None:
        self.path = path

    def close(self) -> None:
        Path(self.path).write_text("closed")


OWNER = """
    import asyncio, json, os, subprocess, sys
    from agentfly.resources.environments.environment import Environment
    from agentfly.resources.environments.spec import EnvironmentSpec

    class Machine:  # of the main program: it travels whole
        def children(self):
            child = subprocess.Popen(["sleep", "300"], start_new_session=True)
            return [os.getpid(), child.pid]

        def hang(self):
            while True:
                pass

    async def main():
        environment = Environment(EnvironmentSpec(factory=Machine, runs="process"), "m")
        await environment.start()
        pids = await environment.children()
        print(json.dumps([pids, environment.traces]), flush=True)
        await environment.hang()

    asyncio.run(main())
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_the_owner_however_it_comes_takes_everything_along(sent: signal.Signals, tmp_path: Path) -> None:
    pids, traces, owner = _owner(tmp_path)
    owner.send_signal(sent)
    owner.wait(timeout=90)
    assert eventually(lambda: all(gone(pid) for pid in [*pids, traces["pid"]]))


def test_reap_ends_what_a_dead_owner_left_and_nothing_else(tmp_path: Path) -> None:
    pids, traces, owner = _owner(tmp_path)
    try:
        reap({**traces, "start_time": traces["start_time"] + 1})  # the id was given to another process
        assert not any(gone(pid) for pid in [*pids, traces["pid"]])
        reap(traces)
        assert all(gone(pid) for pid in [*pids, traces["pid"]])
        reap(traces)
        reap({})
    finally:
        owner.kill()
        owner.wait(timeout=90)


def _owner(tmp_path: Path) -> tuple[list[int], dict[str, int], subprocess.Popen[str]]:
    script = tmp_path / "owner.py"
    script.write_text(textwrap.dedent(OWNER))
    owner = subprocess.Popen(
        # a background job ignores SIGINT, and what it starts would too
        ["env", "--default-signal=INT", sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    pids, traces = json.loads(owner.stdout.readline())
    return pids, traces, owner
