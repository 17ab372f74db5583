"""Live runs on a machine: any process can see what they hold, in any state."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import resource
import socket
import stat
import subprocess
import sys
import textwrap
import time

import pytest
from typer.testing import CliRunner

from agentfly.cli.main import app
from agentfly.resources.engine import live_runs, status_socket
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.engine.live_runs import find_runs
from agentfly.resources.engine.status_socket import socket_path
from agentfly.resources.process.ledger import Ledger, LedgerEntry
from agentfly.resources.resource import Scope
from agentfly.testing.fake_resource import FakeSpec

PROGRAM = """
    import asyncio, sys, time
    from pathlib import Path
    from agentfly.resources.engine.engine import ResourceEngine
    from agentfly.testing.fake_resource import FakeSpec

    async def main():
        async with ResourceEngine(ledger=Path(sys.argv[1])) as engine:
            await engine.acquire(FakeSpec(name="theirs"), "rollout-7")
            print("up", flush=True)
            if sys.argv[2] == "blocked":
                time.sleep(600)
            await asyncio.sleep(600)

    asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def no_spare_directories(monkeypatch):
    """What others have on this machine is not looked at."""
    monkeypatch.setattr("agentfly.core.user_directories.fallback_state_directories", list)


@pytest.fixture
def another_process(tmp_path):
    """Start a process with an engine that has one instance; ``blocked`` if its loop does nothing any more."""
    processes = []

    def start(manner):
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), manner]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_two_engines_of_one_process_and_those_of_others_are_all_seen(tmp_path, another_process):
    other = await asyncio.to_thread(another_process, "free")
    spec = FakeSpec(name="box", capacity=1, idle="freeze")
    async with ResourceEngine(ledger=tmp_path) as one, ResourceEngine(ledger=tmp_path) as two:
        lease = await one.acquire(spec, "holder")
        waiting = asyncio.create_task(one.acquire(spec, "waiter", scope=Scope.CALL, priority=3))
        await two.acquire(FakeSpec(name="second"), "owner")
        while not spec.world.frozen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        runs = await find_runs(tmp_path)
        assert sorted(run.pid for run in runs) == sorted([os.getpid(), os.getpid(), other.pid])
        by_label = {pool.label: (run, pool) for run in runs for pool in run.snapshot.pools}
        assert set(by_label) == {"box", "second", "theirs"}
        run, pool = by_label["box"]
        (instance,), (wait,) = pool.instances, pool.queue
        assert (instance.name, instance.state, instance.owners) == (lease.instance, "leased", ("holder",))
        assert instance.frozen
        assert (wait.owner, wait.scope, wait.priority) == ("waiter", "call", 3)
        assert run.snapshot == one.snapshot().from_json(json.dumps(run.snapshot.to_json()))
        assert run.age_seconds > 0
        assert not run.no_answer_reason
        theirs, _ = by_label["theirs"]
        assert str(tmp_path) in theirs.command
        waiting.cancel()
    assert [run.pid for run in await find_runs(tmp_path)] == [other.pid]


async def test_any_number_may_look_at_once_and_who_reads_nothing_holds_up_nobody_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(status_socket, "MAX_STATUS_CLIENTS", 2)
    monkeypatch.setattr(status_socket, "CLIENT_TIMEOUT_S", 0.05)
    async with ResourceEngine(ledger=tmp_path) as engine:
        await engine.acquire(FakeSpec(name="box"), "owner")
        looks = await asyncio.gather(*(find_runs(tmp_path) for _ in range(10)))
        assert [run.no_answer_reason for (run,) in looks] == [""] * 10
        monkeypatch.setattr(
            engine._instances._status_socket, "_take_snapshot", lambda: {"pools": [], "much": "x" * 2**22}
        )
        (path,) = tmp_path.glob("*.sock")
        with contextlib.ExitStack() as sockets:
            for _ in range(3):
                sockets.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
            await asyncio.sleep(0.01)
            (run,) = await find_runs(tmp_path)
        assert run.snapshot is not None


async def test_an_answer_that_breaks_off_is_not_taken_for_that_of_another_version(tmp_path, monkeypatch):
    async with ResourceEngine(ledger=tmp_path) as engine:
        await engine.acquire(FakeSpec(name="box"), "owner")

        async def say_nothing(looker):
            looker.close()

        monkeypatch.setattr(engine._instances._status_socket, "_answer", say_nothing)
        (run,) = await find_runs(tmp_path)
        assert "is incomplete" in run.no_answer_reason


@pytest.mark.slow
async def test_an_engine_that_is_blocked_is_shown_with_what_its_ledger_says(tmp_path, another_process, monkeypatch):
    monkeypatch.setattr(live_runs, "QUERY_TIMEOUT_S", 0.2)
    other = await asyncio.to_thread(another_process, "blocked")
    (run,) = await find_runs(tmp_path)
    assert (run.pid, run.dead, run.snapshot) == (other.pid, False, None)
    assert "no answer within" in run.no_answer_reason
    assert [entry.kind for entry in run.started] == ["fake"]


async def test_what_a_dead_process_left_is_shown_as_that_and_its_window_goes_with_its_ledger(tmp_path, another_process):
    other = await asyncio.to_thread(another_process, "free")
    (path,) = tmp_path.glob("*.ledger")
    assert socket_path(path).exists()
    other.kill()
    other.wait()
    assert await find_runs(tmp_path) == []  # it had nothing that outlives its process
    with path.open("a") as file:
        file.write('\n{"entry": {"instance": "box-1", "kind": "box", "reap": "nowhere:none"}}')
    (run,) = await find_runs(tmp_path)
    assert run.dead
    assert [entry.instance for entry in run.started] == ["box-1"]
    shown = await asyncio.to_thread(CliRunner().invoke, app, ["resources", "ps", "--state-dir", str(tmp_path)])
    assert "nothing is running" in shown.stdout
    assert "1 instance left by" in shown.stdout
    async with ResourceEngine(ledger=tmp_path):
        assert not socket_path(path).exists()


@pytest.mark.parametrize("listens", ["no file", "nobody"])
def test_what_dead_processes_left_where_no_engine_listens_is_two_lines_however_many_they_are(
    tmp_path, monkeypatch, listens
):
    pytest.importorskip("aiodocker")
    monkeypatch.setenv("COLUMNS", "1000")
    addresses = [tmp_path / f"{number}.sock" for number in range(5)]
    for number, address in enumerate(addresses):
        if listens == "nobody":
            with socket.socket(socket.AF_UNIX) as closed:
                closed.bind(str(address))
        traces = {"address": f"unix://{address}"}
        kinds = ("images:reap_images", traces), ("backend:reap", {"docker": traces | {"instance": "box"}})
        book = Ledger(tmp_path)
        for kind, left in kinds:
            place = "agentfly.resources.containers" + (".docker" if "images" in kind else "")
            book.write(LedgerEntry(f"{kind}-{number}", "left", f"{place}.{kind}", left, time.time()))
        (path,) = set(tmp_path.glob("*.ledger")) - set(tmp_path.glob("dead-*.ledger"))
        path.rename(tmp_path / f"dead-{number}.ledger")
    for path in tmp_path.glob("*.ledger"):
        path.write_text(path.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {2**22 + 1}'))
    ps = [app, ["resources", "ps", "--state-dir", str(tmp_path)]]
    assert CliRunner().invoke(*ps).stdout.splitlines() == [  # type: ignore[arg-type]
        "nothing is running",
        "10 instances left by 5 processes, which are dead: agentfly resources reap removes them",
    ]
    said = CliRunner().invoke(app, ["resources", "reap", "--state-dir", str(tmp_path)]).stdout
    assert said.splitlines()[-1] == "removed 0 orphans, 10 could not be removed"
    first, told = CliRunner().invoke(*ps).stdout.splitlines()  # type: ignore[arg-type]
    assert first == "nothing is running"
    assert told.startswith("10 instances left behind where nothing answers: start what is missing at unix:///")
    assert told.endswith(".sock and 2 more, then run agentfly resources reap")


async def test_what_is_read_by_a_program_has_one_line_for_each_instance_however_long_its_name(tmp_path):
    spec = FakeSpec(name="a-name-of-a-box-of-some-length")
    owner = "a-rollout-of-some-length/" * 8
    async with ResourceEngine(ledger=tmp_path) as engine:
        lease = await engine.acquire(spec, owner)
        shown = await asyncio.to_thread(CliRunner().invoke, app, ["resources", "ps", "--state-dir", str(tmp_path)])
    assert [line for line in shown.stdout.splitlines() if lease.instance in line and owner in line]
    assert max(map(len, shown.stdout.splitlines())) < 1000  # nothing is filled up with blanks


async def test_a_window_is_the_users_alone_and_a_directory_of_any_length_will_do(tmp_path):
    deep = tmp_path.joinpath(*["a-directory-with-a-name-of-some-length"] * 5)
    assert len(str(deep)) > 108
    async with ResourceEngine(ledger=deep) as engine:
        await engine.acquire(FakeSpec(), "a")
        (run,) = await find_runs(deep)
        assert run.snapshot is not None
        (window,) = deep.glob("*.sock")
        assert stat.S_IMODE(window.stat().st_mode) == 0o600
    assert not list(deep.iterdir())


async def test_where_no_window_can_be_made_the_run_goes_on_and_its_ledger_is_shown(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    async with ResourceEngine(ledger=tmp_path) as engine:
        lease = await engine.acquire(FakeSpec(), "a")
        assert "cannot show this run" in caplog.text
        (run,) = await find_runs(tmp_path)
        assert "cannot be reached" in run.no_answer_reason
        assert [entry.instance for entry in run.started] == [lease.instance]


async def test_those_who_look_and_never_read_cost_the_run_nothing_but_their_turn(tmp_path):
    async with ResourceEngine(ledger=tmp_path) as engine:
        await engine.acquire(FakeSpec(name="x" * 20, capacity=100, warm=100), "a")
        (window,) = tmp_path.glob("*.sock")
        idle = []
        for _ in range(20):
            looker = socket.socket(socket.AF_UNIX)
            looker.connect(str(window))
            idle.append(looker)
            await asyncio.sleep(0)
        while not (runs := await find_runs(tmp_path))[0].snapshot:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert runs[0].snapshot.pools[0].capacity == 100
        for looker in idle:
            looker.close()


async def test_a_run_without_descriptors_closes_its_window_and_opens_it_with_its_next_start(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with ResourceEngine(ledger=tmp_path) as engine:
        await engine.acquire(FakeSpec(), "a")
        (window,) = tmp_path.glob("*.sock")
        with socket.socket(socket.AF_UNIX) as looker:
            looker.connect(str(window))
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                while window.exists():  # noqa: ASYNC110
                    await asyncio.sleep(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await engine.acquire(FakeSpec(name="another"), "a")
        (run,) = await find_runs(tmp_path)
        assert run.snapshot is not None


def test_nothing_runs_and_the_command_says_so(tmp_path):
    for words, expected in ([], "nothing is running\n"), (["--json"], '{\n  "runs": []\n}\n'):
        shown = CliRunner().invoke(app, ["resources", "ps", "--state-dir", str(tmp_path), *words])
        assert (shown.exit_code, shown.stdout) == (0, expected)


def test_a_file_that_is_no_ledger_is_passed_over(tmp_path):
    (tmp_path / "other.ledger").write_text("{}")
    assert asyncio.run(find_runs(tmp_path)) == []


@pytest.mark.slow
def test_the_command_shows_pools_instances_and_queues_as_text_and_json(tmp_path, another_process):
    other = another_process("free")
    shown = CliRunner().invoke(app, ["resources", "ps", "--state-dir", str(tmp_path)], env={"COLUMNS": "160"})
    assert shown.exit_code == 0
    for word in (f"process {other.pid}", "theirs", "rollout-7", "leased", "1/8"):
        assert word in shown.stdout
    parsed = json.loads(CliRunner().invoke(app, ["resources", "ps", "--state-dir", str(tmp_path), "--json"]).stdout)
    (run,) = [run for run in parsed["runs"] if run["pid"] == other.pid]
    assert run["pools"][0]["instances"][0]["owners"] == ["rollout-7"]


def test_a_run_with_many_waiters_and_pools_is_shown_in_bounds():
    from rich.console import Console

    from agentfly.resources.engine.live_runs import LiveRun
    from agentfly.resources.engine.status import EngineSnapshot, InstanceSnapshot, PoolSnapshot, QueuedRequestSnapshot
    from agentfly.viewing.resource_tables import resource_tables

    instance = InstanceSnapshot("box-1", "leased", ("r1",), 65.0, 4000.0, 3, True, 60.0, 15.0)
    queue = tuple(QueuedRequestSnapshot(f"r{n}", "rollout", 0, 1.0) for n in range(100))
    pools = tuple(PoolSnapshot("box", "BoxSpec()", 4, (instance,), queue, "OSError: down") for _ in range(3))
    run = LiveRun(7, "here", "python train.py", 10.0, False, (), EngineSnapshot(pools), "")
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(resource_tables([run]))
    text = console.export_text()
    assert text.count("and 80 more") == 3
    for word in ("3 box", "leased, frozen", "1:05 min", "1:06:40", "25%", "3 box: starts fail, with OSError: down"):
        assert word in text


def test_the_ledger_of_a_process_on_another_machine_is_shown_as_far_as_it_can_be(tmp_path):
    book = Ledger(tmp_path)
    book.write(LedgerEntry("far-1", "box", None, {}, time.time()))
    (path,) = tmp_path.glob("*.ledger")
    path.write_text(path.read_text().replace(socket.gethostname(), "another-machine"))
    (run,) = asyncio.run(find_runs(tmp_path))
    assert (run.machine, run.age_seconds, run.command, run.snapshot) == ("another-machine", None, "", None)
    assert run.no_answer_reason
    book.close()
