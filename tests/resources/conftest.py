"""Fixtures of container tests: the backends, containers that are released, and views of the host."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from agentfly.core.errors import PrerequisiteError
from agentfly.resources.containers.backend import Backend, get_backend
from agentfly.resources.containers.bubblewrap.backend import Bubblewrap, make_launcher
from agentfly.resources.containers.bubblewrap.launcher import Launcher, Tier
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.docker.backend import Docker, Podman
from agentfly.resources.containers.enroot.backend import Enroot
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.engine.engine import ResourceEngine
from tests.support.private_container_engines import PRIVATE_ENGINES, import_image
from tests.support.virtual_time import run_in_virtual_time

_numbers = itertools.count()


def _bubblewrap() -> Backend:
    return get_backend("bubblewrap")


def _bubblewrap_of_a_user() -> Backend:
    made = make_launcher(Tier.USER, cgroups=False)
    if not isinstance(made, Launcher):
        pytest.skip(" ".join(made.missing))
    return Bubblewrap(made)


_engines = contextlib.ExitStack()  # closed by the fixture `engines`
_IMAGE = Path(__file__).parents[2] / ".test-images" / "rootfs.tar"
_SQUASHED = _IMAGE.with_name("rootfs.sqsh")  # for enroot, which unpacks it: with no more than the tests need
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_LEFT_OUT = (
    "dev",
    "usr/share",
    "usr/sbin",
    "usr/lib/git-core",
    "usr/lib/python3",
    f"{_LIBRARIES}/perl",
    f"{_LIBRARIES}/gconv",
)


@pytest.fixture
def debian() -> Path:
    """A tar of a Debian root file system."""
    if not _IMAGE.exists():
        pytest.skip("needs a root file system: sudo python scripts/make_test_image.py")
    return _IMAGE


def _engine(made: type[Docker]) -> Callable[[], Backend]:
    def make() -> Backend:
        if not _IMAGE.exists():
            pytest.skip("there is no image for it: sudo python scripts/make_test_image.py")
        try:
            address = _engines.enter_context(PRIVATE_ENGINES[made.name]())
            import_image(address, _IMAGE, "agentfly-test")
        except PrerequisiteError as error:
            pytest.skip(str(error))
        return made(address)

    return make


def _enroot() -> Backend:
    able = get_backend("enroot").probe()
    if not able.available:
        pytest.skip(" ".join(able.missing))
    _squash_image()
    return Enroot(store=_temporary() / "store")


def _enroot_by_a_stand_in() -> Backend:
    _squash_image()
    place = _temporary()
    return Enroot(str(_install_stand_in(place)), store=place / "store")


def _temporary() -> Path:
    return Path(_engines.enter_context(tempfile.TemporaryDirectory(prefix="agentfly-enroot-")))


def _install_stand_in(place: Path) -> Path:
    """Put the stand-in for enroot into a directory; its path."""
    if not Path("/usr/bin/python3").exists():
        pytest.skip("the stand-in for enroot runs on /usr/bin/python3: apt-get install python3")
    program = place / "enroot"
    place.chmod(0o755)  # it runs as an ordinary user
    shutil.copy(Path(__file__).with_name("enroot_stand_in.py"), program)
    program.chmod(0o755)
    (place / "calls").touch()
    (place / "calls").chmod(0o666)
    return program


def _squash_image() -> None:
    if not _IMAGE.exists() or shutil.which("sqfstar") is None:
        pytest.skip("there is no image for it: sudo python scripts/make_test_image.py, and install squashfs-tools")
    if _SQUASHED.exists() and _SQUASHED.stat().st_mtime > _IMAGE.stat().st_mtime:
        return
    draft = _SQUASHED.with_suffix(f".{os.getpid()}")
    words = ["sqfstar", "-quiet", "-no-progress", "-noI", "-noD", "-noF", "-noX", str(draft), *_LEFT_OUT]
    with _IMAGE.open("rb") as archive:
        subprocess.run(words, stdin=archive, check=True, capture_output=True)
    draft.rename(_SQUASHED)


_BACKENDS: dict[str, tuple[Callable[[], Backend], str]] = {
    "bubblewrap": (_bubblewrap, "host"),
    "landlock": (lambda: get_backend("landlock"), "host"),
    "bubblewrap of an ordinary user": (_bubblewrap_of_a_user, "host"),
    "docker": (_engine(Docker), "agentfly-test:latest"),
    "podman": (_engine(Podman), "agentfly-test:latest"),
    "enroot": (_enroot, str(_SQUASHED)),
    "enroot, by a stand-in": (_enroot_by_a_stand_in, str(_SQUASHED)),
}
"""What the contract is checked on, with an image for each. A backend joins by a line here."""


@dataclass(frozen=True)
class Ground:
    """A backend that works on this machine, and how to ask it for boxes."""

    backend: Backend
    image: str

    @property
    def able(self) -> Capabilities:
        """What it can do."""
        return self.backend.probe()

    def spec(self, **fields: Any) -> ContainerSpec:
        """A spec with its image, small unless told otherwise."""
        weak = {"isolation": "weak"} if self.able.isolation_gaps else {}
        return ContainerSpec(**{**weak, "image": self.image, "memory": "256MiB", "pids": 64, **fields})


@pytest.fixture(scope="session")
def engines() -> Iterator[None]:
    """Ends the private engines with the tests."""
    with _engines:
        yield


@functools.cache
def _made(name: str) -> Ground:
    make, image = _BACKENDS[name]
    return Ground(make(), image)


_QUICK = "bubblewrap"  # what the fast tests check the contract on; the slow ones check it on the others


@pytest.fixture(
    scope="session",
    params=[name if name == _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in _BACKENDS],
)
def ground(request: pytest.FixtureRequest, engines: None) -> Ground:
    """Each backend that works here."""
    made = _made(request.param)
    if not made.able.available:
        pytest.skip(" ".join(made.able.missing))
    return made


@pytest.fixture(scope="session", params=[pytest.param(name, marks=pytest.mark.slow) for name in ("docker", "podman")])
def engine_ground(request: pytest.FixtureRequest, engines: None) -> Ground:
    """Each container engine that works here."""
    return _made(request.param)


class Start(Protocol):
    """Starts a box, which is released at the end of the test."""

    def __call__(self, ground: Ground, /, **fields: Any) -> Coroutine[Any, Any, Container]: ...


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts boxes."""
    boxes: list[Container] = []

    async def start_one(ground: Ground, /, **fields: Any) -> Container:
        spec = fields.pop("spec", None) or ground.spec(**fields)
        box = Container(spec, f"test-{os.getpid()}-{next(_numbers)}", backend=ground.backend)
        boxes.append(box)
        await box.start()
        return box

    try:
        yield start_one
    finally:
        await asyncio.gather(*(box.release() for box in boxes))


@pytest.fixture
def with_a_mount_below(tmp_path: Path) -> Iterator[Path]:
    """A directory that everybody may write to, with a file system mounted at ``below`` in it."""
    below = tmp_path / "below"
    below.mkdir()
    tmp_path.chmod(0o777)
    words = ["mount", "-t", "tmpfs", "-o", "mode=777", "none", str(below)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("only root mounts something")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(below)], check=True)


@pytest.fixture
async def contract_box(ground: Ground, start: Start) -> Container:
    """A box on each backend."""
    return await start(ground)


@pytest.fixture
def install_stand_in() -> Callable[[Path], Path]:
    """Puts the stand-in for enroot into a directory, and says where."""
    return _install_stand_in


def _processes_with(marker: str) -> list[int]:
    alone = re.compile(rb"(?<![0-9A-Za-z])" + re.escape(marker.encode()) + rb"(?![0-9A-Za-z])")  # not inside an id
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if alone.search(command):
                found.append(int(entry.name))
    return found


@pytest.fixture
def processes_with() -> Callable[[str], list[int]]:
    """The host's processes that have a marker in their command line."""
    return _processes_with


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Coroutine[Any, Any, None]]:
    """Waits for a condition on other processes, for ten seconds."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110  (what is waited for happens in other processes)
                await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def name() -> Callable[[], str]:
    """Makes names of instances that nobody else has."""
    return lambda: f"test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture(scope="module", params=["best", "user"])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """Bubblewrap's best tier on this machine, and the one of an ordinary user without control groups."""
    made = make_launcher() if request.param == "best" else make_launcher(Tier.USER, cgroups=False)
    if not isinstance(made, Launcher):
        pytest.skip(" ".join(made.missing))
    yield made
    made.close()


@pytest.fixture
async def box(request: pytest.FixtureRequest, name: Callable[[], str]) -> AsyncIterator[Container]:
    """A box of the module's `SPEC` on the best backend."""
    made = Container(request.module.SPEC, name())
    try:
        await made.start()
        yield made
    finally:
        await made.release()


@pytest.fixture
async def launched_box(launcher: Launcher, name: Callable[[], str]) -> AsyncIterator[Container]:
    """A box of bubblewrap with the settings of a plain spec, on each tier that works here."""
    made = Container(ContainerSpec(), name(), backend=Bubblewrap(launcher))
    try:
        await made.start()
        yield made
    finally:
        await made.release()


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    """Run a scene with an engine, in time that passes at once."""

    def run(scene: Callable[[ResourceEngine], Coroutine[Any, Any, None]], **settings: Any) -> None:
        async def main() -> None:
            async with ResourceEngine(ledger=tmp_path, **settings) as engine:
                await scene(engine)

        run_in_virtual_time(main())

    return run
