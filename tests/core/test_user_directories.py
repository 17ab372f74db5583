"""Users without a readable home directory get the cure, and can do everything that needs no home."""

from __future__ import annotations

import json
import logging
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly.cli import doctor
from agentfly.core.errors import PrerequisiteError, ResourceStartError
from agentfly.core.user_directories import cache_root, is_accessible
from agentfly.policies.catalog import cache_dir, list_models
from agentfly.resources.containers import image_store
from agentfly.resources.containers.docker.engine import docker_address, podman_address
from agentfly.resources.engine import orphans
from agentfly.resources.engine.live_runs import find_runs

ROOTS_HOME = Path(pwd.getpwuid(0).pw_dir)
TOO_LONG = "/" + "x" * 300  # which no call of the system takes, for root neither


@pytest.fixture(params=["closed", "too long"])
def closed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A home that this user cannot look into."""
    if request.param == "too long":
        yield Path(TOO_LONG)
        return
    if os.geteuid() == 0:
        pytest.skip("root looks into every directory: run as an ordinary user")
    home = tmp_path / "home"
    home.mkdir(mode=0)
    yield home / "user"
    home.chmod(0o700)


def test_sockets_of_engines_are_looked_for_past_a_home_that_is_closed(closed: Path) -> None:
    here = [path for path in ("/var/run/docker.sock",) if Path(path).is_socket()]
    assert docker_address({"HOME": str(closed)}) == (f"unix://{here[0]}" if here else None)
    there = [path for path in ("/run/podman/podman.sock",) if Path(path).is_socket()]
    assert podman_address({"XDG_RUNTIME_DIR": str(closed)}) == (f"unix://{there[0]}" if there else None)


async def test_a_state_directory_that_is_closed_holds_nothing_and_is_told(
    closed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert await orphans.reap_orphans(closed) == []
        assert await find_runs(closed) == []
    told = [record.getMessage() for record in caplog.records if str(closed) in record.getMessage()]
    assert len(told) == 2
    assert all("set AGENTFLY_STATE_DIR" in message for message in told)


def test_models_that_are_shipped_are_listed_though_the_cache_is_closed(
    closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFLY_CACHE_DIR", str(closed))
    assert {model.name: model.path is not None for model in list_models()}["tiny"]
    assert not is_accessible(cache_dir())
    finding = doctor.free_disk()
    assert finding.verdict is not doctor.CheckStatus.OK or os.geteuid() == 0
    assert "AGENTFLY_CACHE_DIR" in finding.remedy or os.geteuid() == 0


def test_an_image_that_cannot_be_looked_at_is_refused_by_name_with_the_cure(closed: Path) -> None:
    with pytest.raises(ResourceStartError, match=r"cannot be looked at.*Make it, and .* readable"):
        image_store.rootfs_path(str(closed / "root.tar"))


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("AGENTFLY_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(PrerequisiteError, match="Set AGENTFLY_CACHE_DIR"):
        cache_root()
    assert {model.name: model.path is not None for model in list_models()} == {
        "tiny": True,
        "tiny-depot": True,
        "smollm2-135m": False,
    }
    assert "AGENTFLY_CACHE_DIR" in doctor.free_disk().remedy


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="becomes a user without a home: run as root"
)
@pytest.mark.parametrize("home", [str(ROOTS_HOME / "nothing"), None])
def test_the_doctor_answers_a_user_whose_home_is_closed_or_who_has_none(home: str | None) -> None:
    if home is not None and ROOTS_HOME.stat().st_mode & 0o077:
        pytest.skip(f"everybody may look into {ROOTS_HOME} here")
    python = sys.executable if not Path(sys.executable).resolve().is_relative_to(ROOTS_HOME) else "/usr/bin/python3"
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        **({} if home is None else {"HOME": home}),
    }
    words = ["setpriv", "--reuid", "4998", "--regid", "4998", "--clear-groups", python, "-m", "agentfly.cli.main"]
    if subprocess.run([*words, "--version"], env=environment, capture_output=True, check=False, cwd="/").returncode:
        pytest.skip("an ordinary user can run no Python that has these packages here")
    ran = subprocess.run(
        [*words, "doctor", "--json"], env=environment, capture_output=True, text=True, check=False, cwd="/"
    )
    assert "Traceback" not in ran.stderr
    found = {finding["what"].strip(): finding for finding in json.loads(ran.stdout)}
    assert "No socket of docker" in found["docker"]["remedy"]
    assert found["disk"]["verdict"] == "note"
