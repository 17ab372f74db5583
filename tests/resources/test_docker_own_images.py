"""Images that snapshots create in a container engine: they are removed once unused. No engine is needed."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentfly.core.errors import ResourceError, ResourceStartError
from agentfly.resources.containers.docker import images
from agentfly.resources.containers.docker.backend import Docker
from agentfly.resources.containers.docker.container_config import mounted_below
from agentfly.resources.containers.docker.engine import EngineCapabilities
from agentfly.resources.containers.docker.images import CommittedImages, ImageInspection
from agentfly.resources.containers.spec import ContainerSpec


class Engine:
    """A stand-in for an engine's client, which takes a moment to remove an image, and refuses those in use."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.in_use: set[str] = set()
        self.images = SimpleNamespace(delete=self.delete)

    async def delete(self, name: str, *, force: bool) -> None:
        assert force
        self.asked[name] += 1
        await asyncio.sleep(0)
        if name in self.in_use:
            raise ResourceError(f"{name} is in use by a container.")


@pytest.fixture
def engine() -> Any:
    return Engine()


@pytest.fixture
def own() -> CommittedImages:
    own = CommittedImages()
    for name in ("one", "two", "three"):
        own.schedule_removal(name)
    return own


async def test_boxes_that_end_at_once_remove_each_image_once(own: CommittedImages, engine: Any) -> None:
    await asyncio.gather(*(own.remove_scheduled(engine) for _ in range(4)))
    assert engine.asked == {"one": 1, "two": 1, "three": 1}


async def test_an_image_in_use_is_tried_again_by_the_next_who_comes(own: CommittedImages, engine: Any) -> None:
    engine.in_use = {"two"}
    await asyncio.gather(own.remove_scheduled(engine), own.remove_scheduled(engine))
    engine.in_use = set()
    await own.remove_scheduled(engine)
    await own.remove_scheduled(engine)
    assert engine.asked["one"] == engine.asked["three"] == 1
    assert engine.asked["two"] in (2, 3)  # the second of the two may have come by once more


async def test_an_image_whose_removal_is_cancelled_is_not_forgotten(
    own: CommittedImages, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def hangs(client: Any, name: str) -> None:
        begun.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(images, "remove_image", hangs)
        removing = asyncio.create_task(own.remove_scheduled(engine))
        await begun.wait()
        removing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await removing
    await own.remove_scheduled(engine)
    assert engine.asked == {"one": 1, "two": 1, "three": 1}


def test_all_that_can_be_seen_below_a_path_is_found_among_the_mounts(tmp_path: Path) -> None:
    places = [
        "/",
        "/data/hidden/deep",
        "/data",
        "/data/a",
        r"/data/b\040c",
        "/data/a/x",
        "/database",
        "/data/a",
        "/dat",
    ]
    lines = [f"{n} 1 0:{n} / {place} rw - tmpfs none rw\n" for n, place in enumerate(places)]
    (tmp_path / "mountinfo").write_text("".join(lines))
    assert mounted_below("/data", str(tmp_path / "mountinfo")) == ["/a", "/b c"]
    assert mounted_below("/", str(tmp_path / "mountinfo")) == ["/dat", "/data", "/data/a", "/data/b c", "/database"]
    assert mounted_below("/elsewhere", str(tmp_path / "mountinfo")) == []


class Prepared(Docker):
    """A backend whose engine is wherever `where` says, and that takes a moment to prepare an image."""

    where = "unix:///one"
    fails = False

    def probe(self) -> EngineCapabilities:
        return EngineCapabilities(backend="docker", available=True, images=("name", "snapshot"), address=self.where)

    async def _prepare(self, spec: ContainerSpec, found: EngineCapabilities) -> ImageInspection:
        await asyncio.sleep(0)
        if self.fails:
            raise ResourceStartError("as in the test")
        return ImageInspection(f"made at {found.address}", supports_privileged_server=True, files_in_workdir=False)


async def test_an_image_that_one_engine_has_is_prepared_again_in_another() -> None:
    backend, spec = Prepared(), ContainerSpec(image="debian:12", backend="docker")
    for where in ("unix:///one", "unix:///two", "unix:///one"):
        backend.where = where
        await backend.prepare(spec)
        assert backend.sandbox(spec, "box")._plan.image == f"made at {where}"
    backend.where = "unix:///three"
    with pytest.raises(ResourceStartError, match="another one a moment ago"):
        backend.sandbox(spec, "box")


async def test_a_snapshot_is_refused_in_an_engine_that_has_not_got_it() -> None:
    backend = Prepared()
    image = backend._register_fork(
        ImageInspection("snapshot", supports_privileged_server=True, files_in_workdir=False), backend.where
    )
    spec = ContainerSpec(image=image, backend="docker")
    await backend.prepare(spec)
    backend.where = "unix:///two"
    with pytest.raises(ResourceStartError, match="unix:///two"):
        await backend.prepare(spec)


def test_an_image_that_many_wait_for_can_be_prepared_in_one_event_loop_after_another() -> None:
    backend, spec = Prepared(), ContainerSpec(image="debian:12", backend="docker")

    async def ask() -> list[BaseException | None]:
        return await asyncio.gather(*(backend.prepare(spec) for _ in range(3)), return_exceptions=True)

    backend.fails = True
    assert {type(end) for end in asyncio.run(ask())} == {ResourceStartError}
    assert {type(end) for end in asyncio.run(ask())} == {ResourceStartError}
    backend.fails = False
    assert asyncio.run(ask()) == [None] * 3
