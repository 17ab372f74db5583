"""Traces of a killed process without an engine: the next process removes them."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from agentfly.core import user_directories
from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.resources.engine.live_runs import find_runs
from agentfly.resources.engine.orphans import reap_orphans
from agentfly.resources.process import ledger
from agentfly.resources.process.cgroups import writable_cgroup_parent
from agentfly.resources.process.ledger import REMOVE_DIRECTORY, CleanupRecord
from tests.support.archives import tar


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the test's own."""
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def killed(program: str, number: signal.Signals, *words: str) -> None:
    """Run a program until it says that it is in the middle of it, and kill it there."""
    source = "import resource, time, sys\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    source += "def here(*_, **__): print('here', flush=True); time.sleep(600)\n" + program
    process = subprocess.Popen([sys.executable, "-c", source, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(number)
    assert process.wait(30) == -number
    process.stdout.close()


def traces(state: Path) -> list[dict[str, Any]]:
    return [dict(entry.traces) for path in state.glob("*.ledger") for entry in ledger.read_ledger(path)[1]]


MOMENTS = {
    "a sandbox is tried": """
        from agentfly.resources.containers.bubblewrap import backend, launcher
        launcher.run_briefly = here
        backend.probe()
    """,
    "a control group is tried": """
        import os
        from agentfly.resources.process import cgroups
        os.access = here
        cgroups.writable_cgroup_parent()
    """,
    "enroot is tried": """
        import shutil
        from agentfly.resources.containers.enroot import backend
        shutil.which = lambda *_: "/bin/true"
        backend._make_namespaces = here
        backend.probe_enroot("/bin/true")
    """,
    "an image is unpacked": """
        import asyncio
        from agentfly.resources.containers import image_store
        from agentfly.resources.containers.spec import ContainerSpec
        image_store.Unpacker.remove_escaping_links = here
        asyncio.run(image_store.prepare_rootfs(ContainerSpec(image=sys.argv[1])))
    """,
    "weights are passed on": """
        from pathlib import Path
        from agentfly.policies.vllm.weight_sync import WeightTransferDirectory
        exchange = WeightTransferDirectory(Path("/"), Path(sys.argv[1]).parent)
        (exchange._new() / "weights").touch()
        here()
    """,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_process_leaves_that_is_killed_at_any_moment_is_removed(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    if moment == "a control group is tried" and writable_cgroup_parent() is None:
        pytest.skip("no control groups can be made: start as root, or by systemd-run --user --scope -p Delegate=yes")
    if moment == "a sandbox is tried" and probe().tier == "none":
        pytest.skip(" ".join(probe().missing))
    monkeypatch.setenv("AGENTFLY_CACHE_DIR", str(tmp_path / "cache"))
    image = tmp_path / "image.tar"
    image.write_bytes(tar({"bin/bash": b"#!"}))
    killed(textwrap.dedent(MOMENTS[moment]), signal.SIGKILL, str(image))
    left = [Path(path) for one in traces(state) for path in paths(one)]
    assert left
    assert all(path.exists() for path in left)
    assert asyncio.run(reap_orphans())
    assert not any(path.exists() for path in left)
    assert not [*state.glob("*.ledger")]


def paths(entry: dict[str, Any]) -> list[str]:
    """The paths in an entry's traces, but for locks."""
    return [*entry.get("paths", []), *entry.get("directories", []), *filter(None, [entry.get("directory")])]


def test_what_is_tried_leaves_nothing_when_it_ends(state: Path) -> None:
    program = """
from agentfly.resources.containers.bubblewrap import backend
backend.probe()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert not [*state.glob("*.ledger")]


def test_what_a_living_process_has_written_down_is_left_alone_and_is_no_run(tmp_path: Path, state: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with CleanupRecord("place", REMOVE_DIRECTORY, {"directory": str(place)}):
        assert asyncio.run(reap_orphans()) == []
        assert place.is_dir()
        assert asyncio.run(find_runs()) == []
        assert traces(state) == [{"directory": str(place)}]
    assert not [*state.glob("*")]


def test_where_the_state_directory_cannot_be_written_a_spare_one_is_taken_without_a_word(
    state: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (state.parent / "file").touch()
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(state.parent / "file" / "state"))
    monkeypatch.setattr(user_directories, "fallback_state_directories", lambda: [state.parent / "spare"])
    with CleanupRecord("place", REMOVE_DIRECTORY, {"directory": "/nowhere"}):
        assert traces(state.parent / "spare") == [{"directory": "/nowhere"}]
    assert not [*(state.parent / "spare").iterdir()]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_where_nothing_can_be_written_down_a_look_at_the_machine_goes_on(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.parent.joinpath("file").touch()
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(state.parent / "file" / "state"))
    monkeypatch.setattr(user_directories, "fallback_state_directories", list)
    with CleanupRecord("place", REMOVE_DIRECTORY, {"directory": "/nowhere"}) as record:
        pass
    record.close()


@pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT])
def test_an_engine_that_is_killed_leaves_a_ledger_that_is_removed_with_its_boxes(
    state: Path, number: signal.Signals
) -> None:
    program = """
import asyncio
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.engine.engine import ResourceEngine
async def main():
    async with ResourceEngine() as engine:
        await engine.acquire(ContainerSpec(memory="64MiB", disk="16MiB"), "owner")
        here()
asyncio.run(main())
"""
    killed(program, number)
    scratch = [Path(one["bubblewrap"]["scratch"]) for one in traces(state) if "bubblewrap" in one]
    assert all(path.exists() for path in scratch)
    assert [entry.kind for entry in asyncio.run(reap_orphans())] == ["container"]
    assert not any(path.exists() for path in scratch)
    assert not [*state.glob("*")]
