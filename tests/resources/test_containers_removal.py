"""Removal of containers, whatever they did to their directories; their slot is free again."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentfly.resources.containers.backend import get_backend
from agentfly.resources.containers.bubblewrap.backend import reap_bubblewrap
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.landlock.backend import Landlock, LandlockLauncher, make_launcher
from agentfly.resources.containers.runtime_directory import restore_owner_access, runtime_directory, sandbox_uid
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.engine import orphans
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.process import ledger
from agentfly.resources.process.procfs import ProcessIdentity

needs_landlock = pytest.mark.skipif(
    not get_backend("landlock").probe().available, reason=" ".join(get_backend("landlock").probe().missing)
)
PYTHON = "/usr/bin/python3"
pytestmark = pytest.mark.skipif(
    shutil.which("python3", path="/usr/bin") is None, reason="needs the system's python3: apt-get install python3"
)
DEEP = """
import os
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
"""
CLOSED = f"""{DEEP}
for _ in range(1500):
    os.chdir("..")
    os.chmod("d", 0)
"""
LEFT = {
    "closed directories": "mkdir -p d/e; touch d/x d/e/y; chmod 000 d/e d",
    "a deep tree": f"{PYTHON} -c {shlex.quote(DEEP)}",
    "a deep tree of closed directories": f"{PYTHON} -c {shlex.quote(CLOSED)}",
    "what is not its own": "cd ..; chmod 000 workdir home tmp shell; chmod 000 ../..; chmod 000 ..; chmod 000 .",
    "who goes on making files": "(while :; do mkdir -p a/b; echo > a/b/$RANDOM; done) >/dev/null 2>&1 &",
}


@pytest.fixture(scope="module")
def landlock() -> Iterator[Landlock]:
    made = make_launcher()
    if not isinstance(made, LandlockLauncher):
        pytest.skip(" ".join(made.missing))
    yield Landlock(made)
    made.close()


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT.keys())
async def test_a_release_removes_whatever_is_left_and_its_place_is_free_again(
    landlock: Landlock, name: Callable[[], str], left: str
) -> None:
    box = Container(ContainerSpec(isolation="weak"), name(), backend=landlock)
    await box.start()
    try:
        assert not (await box.run(left, timeout=60)).timed_out
    finally:
        await box.release()
    assert not (runtime_directory() / box.instance).exists()
    again = Container(ContainerSpec(isolation="weak"), name(), backend=landlock)
    try:
        await again.start()
        assert (await again.run("echo alive")).stdout == "alive\n"
    finally:
        await again.release()


@needs_landlock
async def test_one_place_serves_owner_after_owner_though_each_closes_its_directories() -> None:
    spec = ContainerSpec(isolation="weak", backend="landlock", capacity=1, reuse="recreate")
    async with ResourceEngine() as engine:
        for number in range(3):
            lease = await engine.acquire(spec, f"owner-{number}", timeout=60)
            await lease.resource.run(LEFT["closed directories"])
            await engine.release(lease)


def test_an_orphan_is_found_in_directories_that_were_closed(name: Callable[[], str]) -> None:
    home = runtime_directory() / name()
    (home / "0" / "workdir").mkdir(parents=True)
    for directory in (home, home / "0", home / "0" / "workdir"):
        os.chown(directory, sandbox_uid(), sandbox_uid())
    for directory in (home / "0" / "workdir", home / "0", home):
        directory.chmod(0)
    reap_bubblewrap({"scratch": str(home)})
    assert not home.exists()


def test_only_directories_of_the_sandboxes_user_are_opened_and_no_link_is_followed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    link = tmp_path / "link"
    link.symlink_to(closed)
    restore_owner_access(link)
    restore_owner_access(tmp_path / "nothing")
    assert stat.S_IMODE(closed.stat().st_mode) == 0
    restore_owner_access(closed)
    own = os.geteuid() == sandbox_uid()
    assert stat.S_IMODE(closed.stat().st_mode) == (0o700 if own else 0)
    closed.chmod(0o700)


async def test_an_orphan_that_cannot_be_removed_is_told_in_a_line_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = ProcessIdentity.current()
    dead = ProcessIdentity(here.pid, here.started - 1, here.boot, here.namespace, here.machine)
    path = tmp_path / "1-a.ledger"
    entry = ledger.LedgerEntry(
        "box-1", "container", "tests.resources.test_containers_removal:refuse", {"scratch": "/x"}
    )
    ledger.rewrite_ledger(path, dead, [entry, replace(entry, instance="box-2"), replace(entry, instance="box-3")])
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert await orphans.reap_orphans(tmp_path) == []
        (record,) = [record for record in caplog.records if "box-" in record.getMessage()]
        assert "box-1 (container) and 2 more of its kind" in record.getMessage()
        assert "will be tried again (OSError: it is busy)" in record.getMessage()
        assert record.exc_info is None
    assert [left.instance for left in ledger.read_ledger(path)[1]] == ["box-1", "box-2", "box-3"]


def refuse(traces: dict[str, object]) -> None:
    raise OSError("it is busy")
