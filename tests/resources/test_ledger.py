"""The ledger, and the removal of resources of dead processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
import types
from dataclasses import asdict, replace
from typing import Any

import pytest

from agentfly.core import user_directories
from agentfly.core.errors import PrerequisiteError, ResourceStartError, ResourceUnreachable, UsageError
from agentfly.core.user_directories import state_directory
from agentfly.resources.engine import orphans
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.engine.orphans import reap_orphans
from agentfly.resources.process import ledger
from agentfly.resources.process.ledger import Ledger, LedgerEntry
from agentfly.resources.process.procfs import ProcessIdentity, start_time
from agentfly.testing.fake_resource import FakeSpec

DEAD = replace(ProcessIdentity.current(), started=1)  # this process's id, but another process's start


def entry(instance="box-1", **fields):
    return LedgerEntry(instance, kind="box", reap="reap_for_tests:remove", traces={"pid": 7}, **fields)


def dead_ledger(directory, *entries, owner=DEAD, tail=""):
    lines = [json.dumps({"ledger": 1, "process": asdict(owner)})]
    lines += [json.dumps({"entry": asdict(each)}) for each in entries]
    path = directory / "dead.ledger"
    path.write_text("\n".join(lines) + tail)
    return path


@pytest.fixture
def removed(monkeypatch):
    """What the kind's reap was called with."""
    calls: list[Any] = []
    module = types.ModuleType("reap_for_tests")
    module.remove = calls.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reap_for_tests", module)
    return calls


def test_the_state_directory_is_the_chosen_one_or_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("AGENTFLY_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_directory() == tmp_path / "xdg" / "agentfly"
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "own"))
    assert state_directory() == tmp_path / "own"
    assert state_directory(tmp_path / "chosen") == tmp_path / "chosen"


def test_a_user_without_a_home_directory_is_told_what_to_set(monkeypatch):
    for name in ("AGENTFLY_STATE_DIR", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # nobody's
    with pytest.raises(PrerequisiteError, match="Set AGENTFLY_STATE_DIR"):
        ResourceEngine()


def test_an_entry_can_be_read_back_until_its_instance_is_gone(tmp_path):
    book = Ledger(tmp_path / "state")
    book.write(entry("one"))
    book.write(entry("two"))
    (path,) = (tmp_path / "state").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert ledger.read_ledger(path) == (ProcessIdentity.current(), [entry("one"), entry("two")])
    book.write(replace(entry("one"), traces={"pid": 8}))
    book.remove("two")
    assert ledger.read_ledger(path)[1] == [replace(entry("one"), traces={"pid": 8})]
    book.remove("one")
    book.close()
    assert not path.exists()


def test_a_ledger_does_not_grow_with_what_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "COMPACT_AFTER_LINES", 10)
    book = Ledger(tmp_path)
    book.write(entry("stays"))
    for number in range(100):
        book.write(entry(f"box-{number}"))
        book.remove(f"box-{number}")
    (path,) = tmp_path.iterdir()
    assert len(path.read_text().splitlines()) < 30
    assert ledger.read_ledger(path)[1] == [entry("stays")]
    book.write(entry("after"))
    assert len(ledger.read_ledger(path)[1]) == 2


@pytest.mark.parametrize("cut", range(1, 120, 7))
def test_a_last_line_that_was_cut_short_spoils_nothing_before_it(tmp_path, cut):
    path = dead_ledger(tmp_path, entry("one"), entry("two"))
    path.write_text(path.read_text()[:-cut])
    owner, entries = ledger.read_ledger(path)
    assert owner == DEAD
    assert entries == [entry("one")]


async def test_the_orphans_of_a_dead_process_are_removed_and_its_ledger_with_them(tmp_path, removed):
    path = dead_ledger(tmp_path, entry("one"), entry("two"), tail='\n{"gone": "two"}\n{"entry": {"inst')
    assert await reap_orphans(tmp_path) == [entry("one")]
    assert removed == [{"pid": 7}]
    assert not path.exists()
    assert await reap_orphans(tmp_path) == []


async def test_nothing_of_a_live_process_is_touched(tmp_path, removed):
    path = dead_ledger(tmp_path, entry(), owner=ProcessIdentity.current())
    assert await reap_orphans(tmp_path) == []
    assert not removed
    assert path.exists()


@pytest.mark.parametrize(("changed", "dead"), [("boot", True), ("machine", False), ("namespace", False)])
def test_a_process_counts_as_dead_only_if_that_is_certain(changed, dead):
    assert replace(ProcessIdentity.current(), started=1, **{changed: "another"}).is_dead() is dead  # type: ignore[arg-type]
    assert replace(ProcessIdentity.current(), boot="another", machine="another").is_dead() is False


def test_a_zombie_counts_as_dead():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(child.pid) is None
    child.wait()


async def test_what_cannot_be_removed_stays_for_the_next_time(tmp_path, removed, caplog):
    stubborn = replace(entry("stubborn"), reap="reap_for_tests:missing")
    path = dead_ledger(tmp_path, entry("one"), stubborn)
    assert await reap_orphans(tmp_path) == [entry("one")]
    assert "stubborn" in caplog.text
    assert ledger.read_ledger(path) == (DEAD, [replace(stubborn, failed_days=(int(time.time() // 86400),))])
    sys.modules["reap_for_tests"].missing = removed.append  # type: ignore[attr-defined]
    assert await reap_orphans(tmp_path) == [replace(stubborn, failed_days=(int(time.time() // 86400),))]
    assert not path.exists()


@pytest.fixture
def unreachable(removed):
    """Make what reaps orphans find that nothing answers where they are, until it is called with False."""

    def remove(traces):
        raise ResourceUnreachable(f"Nothing listens at {traces['address']}.")

    def away(yes=True):
        sys.modules["reap_for_tests"].remove = remove if yes else removed.append  # type: ignore[attr-defined]

    away()
    return away


def unreachable_entries(number):
    return [replace(entry(f"image-{n}"), traces={"address": f"unix:///gone/{n}.sock"}) for n in range(number)]


async def test_orphans_where_nothing_answers_are_told_once_in_one_line_and_removed_when_it_answers(
    tmp_path, unreachable, removed, caplog
):
    path = dead_ledger(tmp_path, *unreachable_entries(65))
    assert await reap_orphans(tmp_path) == []
    (told,) = caplog.messages
    assert "box: 65" in told
    assert "run `agentfly resources reap`" in told
    caplog.clear()
    assert await reap_orphans(tmp_path) == []
    assert not caplog.messages
    await reap_orphans(tmp_path, repeat=True)
    assert caplog.messages == [told]
    assert len(ledger.read_ledger(path)[1]) == 65
    unreachable(False)
    assert len(await reap_orphans(tmp_path)) == len(removed) == 65
    assert not path.exists()


async def test_orphans_where_nothing_has_answered_for_long_are_given_up_and_their_traces_told(
    tmp_path, unreachable, caplog
):
    today = int(time.time() // 86400)
    old, young = [
        replace(one, failed_days=days)
        for one, days in zip(unreachable_entries(2), (tuple(range(today - 7, today)), (today,)), strict=True)
    ]
    path = dead_ledger(tmp_path, old, young)
    assert await reap_orphans(tmp_path) == []
    (told,) = caplog.messages
    assert "given up" in told
    assert old.traces["address"] in told
    assert young.traces["address"] not in told
    assert ledger.read_ledger(path)[1] == [young]


async def test_an_orphan_that_can_be_reached_but_not_removed_is_never_given_up(tmp_path, removed, caplog):
    def remove(traces):
        raise OSError("it is busy")

    sys.modules["reap_for_tests"].remove = remove  # type: ignore[attr-defined]
    stubborn = replace(entry(), failed_days=(1,))
    path = dead_ledger(tmp_path, stubborn)
    for _ in range(2):
        caplog.clear()
        assert await reap_orphans(tmp_path) == []
        assert "will be tried again" in caplog.text
    assert ledger.read_ledger(path)[1] == [replace(stubborn, failed_days=())]


async def test_what_ended_with_its_process_needs_no_removal(tmp_path):
    path = dead_ledger(tmp_path, replace(entry(), reap=None))
    assert await reap_orphans(tmp_path) == []
    assert not path.exists()


async def test_a_file_that_is_no_ledger_is_left_alone(tmp_path, caplog):
    (tmp_path / "other.ledger").write_text("{}\n[]\nfoo")
    assert await reap_orphans(tmp_path) == []
    assert "not a ledger" in caplog.text
    assert (tmp_path / "other.ledger").exists()


async def test_a_ledger_that_cannot_be_read_is_passed_over_and_the_others_are_reaped(tmp_path, removed, caplog):
    (tmp_path / "another-users.ledger").mkdir()
    dead_ledger(tmp_path, entry())
    assert [each.instance for each in await reap_orphans(tmp_path)] == ["box-1"]
    assert "another-users.ledger" in caplog.text


async def test_two_reapers_remove_an_orphan_once(tmp_path, removed):
    dead_ledger(tmp_path, entry())
    assert sorted(map(len, await asyncio.gather(reap_orphans(tmp_path), reap_orphans(tmp_path)))) == [0, 1]
    assert len(removed) == 1


async def test_a_removal_that_hangs_is_given_up(tmp_path, monkeypatch):
    module = types.ModuleType("reap_for_tests")

    async def remove(traces):
        await asyncio.Event().wait()

    module.remove = remove  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reap_for_tests", module)
    monkeypatch.setattr(orphans, "REAP_TIMEOUT_S", 0.01)
    path = dead_ledger(tmp_path, entry())
    assert await reap_orphans(tmp_path) == []
    assert path.exists()


@pytest.fixture(autouse=True)
def spare(tmp_path_factory, monkeypatch):
    """The only spare directory there may be."""
    directory = tmp_path_factory.mktemp("spare") / "state"
    monkeypatch.setattr(user_directories, "fallback_state_directories", lambda: [directory])
    return directory


async def test_where_the_state_directory_cannot_be_written_it_is_written_down_in_a_spare_one(
    tmp_path, spare, removed, caplog
):
    (tmp_path / "file").write_text("in the way")
    async with ResourceEngine(ledger=tmp_path / "file") as engine:
        lease = await engine.acquire(FakeSpec(), "a")
        (path,) = spare.glob("*.ledger")
        assert [entry.instance for entry in ledger.read_ledger(path)[1]] == [lease.instance]
        assert "cannot be written" in caplog.text
        assert "`agentfly resources reap` looks too" in caplog.text
    assert not list(spare.iterdir())
    dead_ledger(spare, entry())
    assert await reap_orphans(tmp_path / "elsewhere") == [entry()]


@pytest.fixture
def tiny_disk(tmp_path):
    """A directory on a disk of 16 KiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "none", directory], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("a small file system can be mounted by root only")
    yield directory
    subprocess.run(["umount", directory], check=True)


@pytest.mark.parametrize("full_from_the_start", [True, False])
def test_when_the_disk_is_full_the_ledger_moves_whole_to_a_spare_directory(
    tiny_disk, spare, caplog, full_from_the_start
):
    if full_from_the_start:
        (tiny_disk / "filler").write_bytes(bytes(16384))
    book = Ledger(tiny_disk)
    entries = [entry(f"box-{number}", started=float(number)) for number in range(300)]
    for each in entries:
        book.write(each)
    book.remove("box-0")
    (path,) = spare.glob("*.ledger")
    assert ledger.read_ledger(path) == (ProcessIdentity.current(), entries[1:])
    assert caplog.text.count("cannot be written") == 1
    assert not list(tiny_disk.glob("*.ledger")), "what stays there would be out of date"
    for each in entries[1:]:
        book.remove(each.instance)
    book.close()
    assert not list(spare.iterdir())


def test_a_spare_directory_that_others_can_write_is_not_trusted(tmp_path, spare):
    (tmp_path / "file").write_text("in the way")
    spare.mkdir()
    spare.chmod(0o777)
    with pytest.raises(PrerequisiteError, match="AGENTFLY_STATE_DIR"):
        Ledger(tmp_path / "file").write(entry())
    dead_ledger(spare, entry())
    assert asyncio.run(reap_orphans(tmp_path / "elsewhere")) == []


FORKS = """
import asyncio, os, sys
from pathlib import Path
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.process import ledger
from agentfly.testing.fake_resource import FakeSpec

state = Path(sys.argv[1])

async def child():
    async with ResourceEngine(ledger=state) as engine:
        await engine.acquire(FakeSpec(), "child")
        owners = sorted(ledger.read_ledger(path)[0].pid for path in state.glob("*.ledger"))
        assert owners == sorted([os.getpid(), os.getppid()]), owners

async def parent():
    async with ResourceEngine(ledger=state) as engine:
        await engine.acquire(FakeSpec(), "parent")
        if (pid := os.fork()) == 0:
            asyncio.run(child())
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        (path,) = state.glob("*.ledger")
        assert len(ledger.read_ledger(path)[1]) == 1

asyncio.run(parent())
assert not list(state.iterdir())
"""


def test_a_child_that_was_forked_while_an_engine_ran_has_a_ledger_of_its_own_and_leaves_its_parents_alone(tmp_path):
    subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], check=True)


async def test_nothing_starts_that_cannot_be_written_down(tmp_path, monkeypatch):
    monkeypatch.setattr(user_directories, "fallback_state_directories", list)
    (tmp_path / "file").write_text("in the way")
    spec = FakeSpec()
    async with ResourceEngine(ledger=tmp_path / "file") as engine:
        with pytest.raises(ResourceStartError, match="AGENTFLY_STATE_DIR") as failure:
            await engine.acquire(spec, "a")
        assert isinstance(failure.value.__cause__, PrerequisiteError)
    assert spec.world.count("start") == 0


def test_traces_that_are_no_json_are_refused(tmp_path):
    with pytest.raises(UsageError, match="JSON-able"):
        Ledger(tmp_path).write(LedgerEntry("one", "box", None, {"process": object()}))


async def test_an_engine_that_starts_nothing_writes_nothing(tmp_path):
    async with ResourceEngine(ledger=tmp_path / "state"):
        pass
    assert not (tmp_path / "state").exists()


KIND = """
    import asyncio, os, subprocess, sys
    from dataclasses import dataclass
    from pathlib import Path
    from agentfly.resources.engine.engine import ResourceEngine
    from agentfly.resources.process.procfs import start_time
    from agentfly.resources.kind import ResourceKind
    from agentfly.resources.resource import Resource, Status
    from agentfly.resources.spec import ResourceSpec


    @dataclass(frozen=True, kw_only=True)
    class SleepSpec(ResourceSpec):
        kind = ResourceKind("sleep", "sleep_kind:Sleep", reap="sleep_kind:end")


    class Sleep(Resource):
        process = None

        async def start(self):
            self.process = subprocess.Popen(["sleep", "600"], start_new_session=True)

        async def reset(self):
            pass

        async def status(self):
            return Status.HEALTHY

        async def release(self):
            self.process.kill()
            self.process.wait()

        @property
        def traces(self):
            return {} if self.process is None else {"pid": self.process.pid, "started": start_time(self.process.pid)}


    def end(traces):
        if traces and start_time(traces["pid"]) == traces["started"]:
            os.kill(traces["pid"], 9)


    async def main(state):
        async with ResourceEngine(ledger=Path(state)) as engine:
            leases = [await engine.acquire(SleepSpec(), f"o{n}") for n in range(3)]
            print(*(lease.resource.process.pid for lease in leases), flush=True)
            await asyncio.sleep(600)
"""
PROGRAM = "import asyncio, sys, sleep_kind; asyncio.run(sleep_kind.main(sys.argv[1]))"


def wait_until_gone(pids):
    while any(start_time(pid) is not None for pid in pids):
        time.sleep(0.01)


@pytest.mark.slow
async def test_after_kill_9_the_next_engine_removes_the_orphans_of_the_dead_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "sleep_kind.py").write_text(textwrap.dedent(KIND))
    state = tmp_path / "state"

    def run():
        process = subprocess.Popen(
            # a background job ignores SIGINT, and what it starts would too
            ["env", "--default-signal=INT", sys.executable, "-c", PROGRAM, str(state)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        return process, [int(pid) for pid in process.stdout.readline().split()]

    killed, orphaned = run()
    living, kept = run()
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert all(start_time(pid) is not None for pid in orphaned)
        monkeypatch.syspath_prepend(tmp_path)
        async with ResourceEngine(ledger=state):
            wait_until_gone(orphaned)
        assert all(start_time(pid) is not None for pid in kept)
        assert len(list(state.glob("*.ledger"))) == 1
        living.send_signal(signal.SIGINT)
        living.wait(timeout=90)
        assert not any(start_time(pid) for pid in kept)
        assert not list(state.iterdir())
    finally:
        for pid in (*orphaned, *kept):
            if start_time(pid) is not None:
                os.kill(pid, signal.SIGKILL)
        for process in (killed, living):
            process.kill()
            process.wait()
            process.stdout.close()


async def test_a_jump_of_the_clock_gives_no_orphan_up(tmp_path, unreachable, caplog, monkeypatch):
    path = dead_ledger(tmp_path, *unreachable_entries(1))
    for seconds in (0.0, 1.8e9, 1.8e9 + 60):  # a machine without a clock, before and after it asked for the time
        monkeypatch.setattr(time, "time", lambda seconds=seconds: seconds)
        await reap_orphans(tmp_path, repeat=True)
    assert "given up" not in caplog.text.replace("are given up after", "")
    assert len(ledger.read_ledger(path)[1]) == 1


async def test_an_orphan_whose_kind_is_unknown_here_is_reported_once_and_given_up_in_the_end(tmp_path, caplog):
    unknown = replace(entry(), reap="agentfly.gone:reap")
    path = dead_ledger(tmp_path, unknown)
    for _ in range(2):
        await reap_orphans(tmp_path)
    (message,) = caplog.messages
    assert "another version of AgentFly" in message
    assert "No module named 'agentfly.gone'" in message
    today = int(time.time() // 86400)
    ledger.rewrite_ledger(
        path, ledger.read_ledger(path)[0], [replace(unknown, failed_days=tuple(range(today - 7, today)))]
    )
    await reap_orphans(tmp_path)
    assert not path.exists()


async def test_a_ledger_of_another_version_is_read_as_far_as_it_is_known(tmp_path):
    path = dead_ledger(tmp_path, entry("old"))
    path.write_text(path.read_text().replace('"failed_days": []', '"unreachable_since": 1.0'))
    assert ledger.read_ledger(path)[1] == [entry("old")]
