"""The choice of a backend: only those are asked and spoken of that can take the image."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentfly.errors import PrerequisiteError
from agentfly.resources.containers.backend import candidates, choose
from agentfly.resources.containers.spec import ContainerSpec


@pytest.fixture
def without_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine where no engine answers and enroot is not installed."""
    for variable in ("DOCKER_HOST", "CONTAINER_HOST"):
        monkeypatch.setenv(variable, f"unix://{tmp_path}/no.sock")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("image", "names"),
    [
        ("host", ["bubblewrap", "landlock"]),
        ("/srv/rootfs", ["bubblewrap", "enroot"]),
        ("debian:12", ["docker", "podman", "enroot"]),
    ],
)
def test_only_backends_that_take_the_image_are_candidates(image: str, names: list[str]) -> None:
    assert [one.name for one in candidates(ContainerSpec(image=image))] == names


@pytest.mark.usefixtures("without_engines")
async def test_an_image_by_name_without_an_engine_says_which_programs_take_one_and_how_to_get_them() -> None:
    with pytest.raises(PrerequisiteError) as refusal:
        await choose(ContainerSpec(image="debian:12"))
    first, *others = str(refusal.value).splitlines()
    assert "needs one of docker, podman and enroot" in first
    assert [line.split()[0] for line in others] == ["docker", "podman", "enroot"]
    assert "isolation" not in str(refusal.value)
    assert "bubblewrap" not in str(refusal.value)


@pytest.mark.usefixtures("without_engines")
async def test_a_name_that_is_a_directory_here_is_answered_with_its_whole_path(tmp_path: Path) -> None:
    (tmp_path / "images" / "rootfs").mkdir(parents=True)
    with pytest.raises(PrerequisiteError, match=f"If {tmp_path}/images/rootfs is meant, write this whole path"):
        await choose(ContainerSpec(image="images/rootfs"))
