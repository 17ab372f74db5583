"""Simulators forked from a warmed parent: one import for all, and no state passes between them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentfly.core.errors import ResourceDied
from agentfly.core.user_directories import state_directory
from agentfly.resources.environments import fork_server
from agentfly.resources.environments.environment import Environment
from agentfly.resources.environments.private_directory import PrivateDirectory
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.process.ledger import read_ledger

SIMULATOR = """
    import os, random, socket, subprocess, sys, threading, time

    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{os.getpid()}\\n")

    class Simulator:
        def pid(self):
            return os.getpid()

        def parents(self):
            keeper = os.getppid()
            with open(f"/proc/{keeper}/stat") as file:
                return keeper, int(file.read().rpartition(")")[2].split()[1])

        def open_files(self):
            files = {}
            for number in os.listdir("/proc/self/fd"):
                try:
                    files[int(number)] = os.readlink(f"/proc/self/fd/{number}").partition(":")[0]
                except OSError:
                    pass
            return files

        def files_of_a_child(self):
            os.system(f"ls -l /proc/self/fd > {os.environ['NOTES']}.files")
            with open(f"{os.environ['NOTES']}.files") as file:
                return file.read()

        def draw(self):
            numpy = sys.modules.get("numpy")
            return random.random(), None if numpy is None else float(numpy.random.random())

        def handler(self, number):
            import signal
            return str(signal.getsignal(number)), signal.pthread_sigmask(signal.SIG_BLOCK, ())

        def where(self):
            return os.getcwd(), os.environ.get("SAID"), sys.path[0]

        def sleepers(self):
            return [subprocess.Popen(["sleep", "300"], start_new_session=True).pid]
"""

Make = Callable[..., Environment]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: Path) -> Make:
    """Makes environments of a module that writes down who imports it, and may do more when it is imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def of(also: str = "", **fields: Any) -> Environment:
        name = f"simulator_{abs(hash((str(tmp_path), also)))}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(SIMULATOR) + textwrap.dedent(also))
        fields["env"] = {"NOTES": str(notes), **fields.get("env", {})}
        spec = EnvironmentSpec(factory=f"{name}:Simulator", runs="process", **fields)
        return Environment(spec, f"forked-{random.randrange(10**9)}")

    return of


def importers(notes: Path) -> list[int]:
    """Ids of the processes that have imported the module."""
    return [int(line) for line in notes.read_text().split()]


async def alive(environments: list[Environment]) -> list[Environment]:
    await asyncio.gather(*(environment.start() for environment in environments))
    return environments


async def released(environments: list[Environment]) -> None:
    await asyncio.gather(*(environment.release() for environment in environments))


def appears(path: Path) -> bool:
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.exists()


async def ends(pid: int) -> bool:
    for _ in range(1000):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_what_a_factory_needs_is_imported_once_for_all_its_simulators(make: Make, notes: Path) -> None:
    simulators = await alive([make() for _ in range(4)])
    pids = {await simulator.pid() for simulator in simulators}
    assert len(pids) == 4
    await simulators[0].release()
    await simulators[0].start()
    (imported_in,) = importers(notes)
    assert imported_in not in pids
    assert {(await simulator.parents())[1] for simulator in simulators} == {imported_in}
    await released(simulators)


async def test_the_directory_of_the_imports_is_on_record_before_it_exists(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[bool] = []
    create = PrivateDirectory.make

    def created(self: PrivateDirectory) -> None:
        files = state_directory().glob("record-*.ledger")
        entries = [entry for file in files for entry in read_ledger(file)[1]]
        if "-imports-" in self.path.name:
            recorded.append(any(entry.traces == {"directory": str(self.path)} for entry in entries))
        create(self)

    monkeypatch.setattr(PrivateDirectory, "make", created)
    simulators = await alive([make()])
    assert recorded == [True]
    await released(simulators)


async def test_a_spawned_simulator_imports_for_itself(make: Make, notes: Path) -> None:
    simulators = await alive([make(starts="spawn") for _ in range(2)])
    assert sorted(importers(notes)) == sorted([await each.pid() for each in simulators])
    await released(simulators)


async def test_a_dead_zygote_takes_no_simulator_along_and_is_replaced(make: Make, notes: Path) -> None:
    first, second, third = make(), make(), make()
    await alive([first, second])
    (_, zygote) = await first.parents()
    os.kill(zygote, signal.SIGKILL)
    assert await ends(zygote)
    await third.start()
    assert await first.pid() != await third.pid()
    assert (await third.parents())[1] not in (zygote, os.getpid())
    assert len(importers(notes)) == 2
    pids = [await each.pid() for each in (first, second, third)]
    await released([first, second, third])
    assert all([await ends(pid) for pid in pids])


async def test_a_zygote_that_is_killed_while_it_is_asked_costs_no_start(make: Make) -> None:
    first, others = make(), [make() for _ in range(6)]
    await first.start()
    (_, zygote) = await first.parents()
    os.kill(zygote, signal.SIGSTOP)
    starting = asyncio.gather(*(other.start() for other in others))
    await asyncio.sleep(0.1)
    os.kill(zygote, signal.SIGKILL)
    await starting
    assert len({await each.pid() for each in (first, *others)}) == 7
    await released([first, *others])


@pytest.mark.slow
async def test_a_zygote_that_does_not_answer_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "FORK_TIMEOUT_S", 0.3)
    first, second = make(), make()
    await first.start()
    (_, zygote) = await first.parents()
    os.kill(zygote, signal.SIGSTOP)
    await second.start()
    assert await ends(zygote)
    assert await first.pid() != await second.pid()
    await released([first, second])


SLOW_TO_FORK = """
    os.register_at_fork(before=lambda: time.sleep(0.1))
"""


@pytest.mark.slow
async def test_a_zygote_has_its_time_for_each_fork_and_not_for_all_that_are_asked_for(
    make: Make, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "FORK_TIMEOUT_S", 1.0)
    simulators = await alive([make(SLOW_TO_FORK) for _ in range(20)])
    assert len(importers(notes)) == 1
    assert len({await each.pid() for each in simulators}) == 20
    await released(simulators)


async def test_any_number_of_simulators_may_be_asked_for_at_once(
    make: Make, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "MAX_PENDING_FORKS", 2)
    simulators = await alive([make() for _ in range(6)])
    assert len(importers(notes)) == 1
    await released(simulators)


async def test_a_simulator_has_no_open_file_of_another(make: Make) -> None:
    simulators = await alive([make() for _ in range(5)])
    first, *others = [await simulator.open_files() for simulator in simulators]
    assert sorted(first.values()) == ["/dev/null", "pipe", "pipe", "socket"]
    assert all(sorted(other.values()) == sorted(first.values()) for other in others)
    assert "socket" not in await simulators[-1].files_of_a_child()
    await released(simulators)


@pytest.mark.parametrize("also", ["", "import numpy"])
async def test_forks_draw_different_random_numbers(make: Make, also: str) -> None:
    simulators = await alive([make(also) for _ in range(3)])
    drawn = [await simulator.draw() for simulator in simulators]
    assert len({ours for ours, _ in drawn}) == 3
    assert len({theirs for _, theirs in drawn}) == (3 if also else 1)
    await released(simulators)


async def test_threads_that_stop_for_a_fork_do_not_prevent_it(
    make: Make, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    simulators = await alive([make("import numpy; numpy.ones((300, 300)) @ numpy.ones((300, 300))") for _ in range(2)])
    assert len(importers(notes)) == 1
    await released(simulators)


@pytest.mark.parametrize(
    ("also", "said"),
    [
        ("threading.Thread(target=time.sleep, args=(300,), daemon=True, name='heart').start()", r"1 threads \(heart\)"),
        ("log = open(os.environ['NOTES'] + '.log', 'w')", "opened .*notes.log"),
        ("sockets = socket.socketpair()", "opened socket"),
        ("child = subprocess.Popen(['sleep', '300'])", "started 1 processes"),
    ],
)
async def test_what_forks_would_share_or_break_has_each_import_for_itself_and_is_said_once(
    make: Make, notes: Path, also: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        simulators = await alive([make(also) for _ in range(2)])
    zygote, *themselves = importers(notes)
    assert sorted(themselves) == sorted([await each.pid() for each in simulators])
    assert await ends(zygote)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert 'starts="spawn"' in record.getMessage()
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(record.getMessage())
    await released(simulators)


async def test_a_simulator_has_the_signal_handling_of_a_fresh_process(make: Make) -> None:
    forked, spawned = await alive([make(), make(starts="spawn")])
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
        assert await forked.handler(number) == await spawned.handler(number)
    await released([forked, spawned])


async def test_a_simulator_looks_for_modules_where_this_process_does_when_it_is_made(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make()
    await first.start()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "beside", *sys.path])
    second = make()
    await second.start()
    assert (await second.where())[2] == str(tmp_path)
    assert (await first.where())[2] != str(tmp_path / "beside")
    await released([first, second])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("also", "error", "said"),
    [
        ("raise OSError('the game files are missing')", OSError, "the game files are missing"),
        ("import no_such_module_at_all", Exception, "no_such_module_at_all"),
        ("print('giving up', file=sys.stderr); os._exit(3)", ResourceDied, "(?s)exited with status 3.*giving up"),
    ],
)
async def test_an_import_that_fails_is_told_as_in_a_fresh_process(
    make: Make, also: str, error: type[Exception], said: str
) -> None:
    for starts in ("fork", "spawn"):
        simulator = make(also, starts=starts)
        with pytest.raises(error, match=said):
            await simulator.start()
        await simulator.release()


async def test_an_import_that_hangs_is_begun_anew_by_the_next_start(make: Make, notes: Path) -> None:
    hangs_once = """
        if not os.path.exists(os.environ["NOTES"] + ".hung"):
            open(os.environ["NOTES"] + ".hung", "w").close()
            time.sleep(300)
    """
    first, second = make(hangs_once), make(hangs_once)
    starting = asyncio.create_task(first.start())
    assert await asyncio.to_thread(appears, Path(f"{notes}.hung"))
    starting.cancel()
    await asyncio.wait({starting})
    await first.release()
    await second.start()
    assert len({await second.pid(), *importers(notes)}) == 3
    assert await ends(importers(notes)[0])
    await second.release()


async def test_what_a_simulator_started_ends_even_if_its_supervisor_is_killed(make: Make) -> None:
    simulator = make()
    await simulator.start()
    pids = [await simulator.pid(), *await simulator.sleepers()]
    os.kill(simulator.traces["pid"], signal.SIGKILL)
    assert all([await ends(pid) for pid in pids])
    await simulator.release()


async def test_an_import_that_speaks_for_the_zygote_costs_its_simulators_nothing_but_time(make: Make) -> None:
    speaks = """
        for entry in range(3, 100):
            try:
                with socket.socket(fileno=os.dup(entry)) as control:
                    if control.type == socket.SOCK_SEQPACKET:
                        control.sendall(b"no answer")
            except OSError:
                continue
    """
    simulator = make(speaks)
    await simulator.start()
    assert await simulator.pid() > 0
    await simulator.release()


async def test_a_cancelled_start_leaves_the_zygote_to_the_others(make: Make, notes: Path) -> None:
    first, second = make(), make()
    starting = asyncio.create_task(first.start())
    other = asyncio.create_task(second.start())
    await asyncio.sleep(0.02)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await first.release()
    await other
    assert await second.pid()
    assert len(importers(notes)) == 1
    await second.release()


OWNER = """
    import asyncio, json, subprocess
    from agentfly.resources.environments.environment import Environment
    from agentfly.resources.environments.spec import EnvironmentSpec

    class Machine:
        def sleeper(self):
            return subprocess.Popen(["sleep", "300"], start_new_session=True).pid

    async def main():
        machines = [Environment(EnvironmentSpec(factory=Machine, runs="process"), f"m{i}") for i in range(3)]
        await asyncio.gather(*(machine.start() for machine in machines))
        print(json.dumps([await machine.sleeper() for machine in machines]), flush=True)
        await asyncio.sleep(300)

    asyncio.run(main())
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
async def test_the_zygote_and_all_forks_end_with_the_owner(sent: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(textwrap.dedent(OWNER))
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert owner.stdout is not None
    sleepers = json.loads(await asyncio.to_thread(owner.stdout.readline))
    below = {process.pid for process in psutil.Process(owner.pid).children(recursive=True)}
    assert set(sleepers) < below
    assert len(below) == 1 + 3 * 3, "a zygote, and for each a keeper, a simulator and what it started"
    owner.send_signal(sent)
    await asyncio.to_thread(owner.wait, 60)
    assert all([await ends(pid) for pid in below])
    owner.stdout.close()
