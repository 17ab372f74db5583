"""What is particular to the backend for enroot: what the program is told, and what it must not bring in.

These run on the stand-in, whose calls can be looked at; the contract of containers runs on the real program too.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfly.core.errors import PrerequisiteError, ResourceStartError
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.enroot.backend import Enroot
from agentfly.resources.containers.enroot.program import run_program
from agentfly.resources.containers.spec import ContainerSpec

pytestmark = pytest.mark.slow

Squash = Callable[[dict[str, str]], Path]
_PROGRAMS = ("bash", "cat", "id", "ls", "env", "mkdir", "sleep", "grep")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system with a handful of the host's programs."""
    if shutil.which("mksquashfs") is None:
        pytest.skip("squashfs-tools are missing: apt-get install squashfs-tools")
    root = tmp_path_factory.mktemp("image") / "root"
    for name in ("usr/bin", "etc", "tmp", "usr/lib"):
        (root / name).mkdir(parents=True)
    for link in ("bin", "lib", "lib64"):
        (root / link).symlink_to(f"usr/{link}")
    for name in _PROGRAMS:
        program = Path(shutil.which(name) or "")
        shutil.copy(program, root / "usr/bin" / name)
        needed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for library in (Path(word) for word in needed.split() if word.startswith("/")):
            target = root / f"usr/{library.relative_to('/').as_posix().removeprefix('usr/')}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    shutil.copy(root / "usr/bin/bash", root / "usr/bin/sh")
    return root


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the ordinary user who sandboxes are can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="agentfly-enroot-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture
def stand_in(place: Path, install_stand_in: Callable[[Path], Path]) -> Path:
    """The stand-in, in a directory of the test's own."""
    return install_stand_in(place)


@pytest.fixture
def enroot(stand_in: Path, place: Path) -> Enroot:
    made = Enroot(str(stand_in), store=place / "store")
    if not made.probe().available:
        pytest.skip(" ".join(made.probe().missing))
    return made


@pytest.fixture
def weak(enroot: Enroot) -> dict[str, Any]:
    """What a spec says where no control group can be made: the memory of all processes together has no limit then."""
    return {"isolation": "weak"} if enroot.probe().isolation_gaps else {}


@pytest.fixture
async def start(
    enroot: Enroot, root: Path, weak: dict[str, Any]
) -> AsyncIterator[Callable[..., Coroutine[Any, Any, Container]]]:
    """Starts boxes, which are released at the end."""
    boxes: list[Container] = []

    async def start_one(**fields: Any) -> Container:
        spec = ContainerSpec(
            **{"image": str(root), "memory": "256MiB", "pids": 64, "backend": "enroot", **weak, **fields}
        )
        boxes.append(Container(spec, f"enroot-{os.getpid()}-{len(boxes)}", backend=enroot))
        await boxes[-1].start()
        return boxes[-1]

    try:
        yield start_one
    finally:
        await asyncio.gather(*(box.release() for box in boxes))


Start = Callable[..., Coroutine[Any, Any, Container]]


def _entries(directory: Path) -> list[str]:
    return [path.name for path in directory.parent.glob(f"{directory.name}/*")]


def _is_gone(traces: dict[str, Any]) -> bool:
    return not Path(traces["place"]).exists()


def _calls(stand_in: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stand_in.with_name("calls").read_text().splitlines()]


async def test_enroot_itself_sees_nothing_of_the_host_s_environment_and_configuration(
    start: Start, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "do-not-tell")
    monkeypatch.setenv("ENROOT_MOUNT_HOME", "yes")
    monkeypatch.setenv("ENROOT_CONFIG_PATH", "/etc")
    box = await start(env=(("GIVEN", "for what runs inside alone"),))
    assert (await box.run("echo $GIVEN")).stdout == "for what runs inside alone\n"
    calls = _calls(stand_in)
    assert [call["words"][0] for call in calls] == ["version", "create", "start"]
    for call in calls:
        given = call["environment"]
        assert {name for name in given if not name.startswith("ENROOT_")} <= {"PATH", "LANG", "HOME", "LC_CTYPE"}
        assert given["ENROOT_MOUNT_HOME"] == "no"
        assert Path(given["ENROOT_CONFIG_PATH"]).parent == Path(given["HOME"])
        assert "for what runs inside alone" not in str(call)


async def test_an_image_by_name_is_fetched_once_and_its_registry_set_apart(
    start: Start, stand_in: Path, root: Path
) -> None:
    registry = stand_in.with_name("registry")
    registry.mkdir()
    packed = registry / "example.org:5000#team_tool:1"
    words = ["mksquashfs", root, packed, "-all-root", "-quiet", "-no-progress"]
    await asyncio.to_thread(subprocess.run, words, check=True, capture_output=True)  # type: ignore[arg-type]
    await asyncio.gather(*(start(image="example.org:5000/team/tool:1") for _ in range(3)))
    calls = [call["words"] for call in _calls(stand_in)]
    assert [call[0] for call in calls] == ["version", "import", "create", "start", "start", "start"]
    assert calls[1][-1] == "docker://example.org:5000#team/tool:1"


async def test_an_image_that_cannot_be_fetched_says_so_in_enroot_s_words(start: Start) -> None:
    with pytest.raises(ResourceStartError, match="Could not process image: docker://nobody/nothing"):
        await start(image="nobody/nothing")


async def test_an_image_s_own_fstab_and_links_reach_nothing_of_the_host(start: Start, root: Path, place: Path) -> None:
    evil = place / "evil"
    shutil.copytree(root, evil, symlinks=True)
    (place / "secret").write_text("host")
    (evil / "etc/fstab").write_text(f"{place} /mnt none x-create=dir,bind\n")
    (evil / "etc/environment").write_text('FROM_IMAGE="1 2"\nREFERS=${HOST_SECRET}\n')
    victim = place / "victim"
    victim.mkdir(mode=0o777)
    victim.chmod(0o777)
    (evil / "home").symlink_to(victim)
    (evil / victim.relative_to("/")).mkdir(parents=True)
    box = await start(image=str(evil), workdir="/home/agent/work")
    seen = await box.run("ls /mnt; echo $FROM_IMAGE; echo x$REFERS; cat /etc/fstab")
    assert seen.stdout == "1 2\nx\n"
    assert _entries(victim) == []


@pytest.mark.parametrize("kind", ["a directory", "a squashfs file", "a name"])
@pytest.mark.parametrize(
    ("limit", "setting"), [({"max_image_files": 10}, "max_image_files"), ({"max_image_size": "1MiB"}, "max_image_size")]
)
async def test_an_image_of_more_than_may_be_is_refused_before_it_is_unpacked(
    start: Start, root: Path, stand_in: Path, place: Path, kind: str, limit: dict[str, Any], setting: str
) -> None:
    image = str(root)
    if kind != "a directory":
        registry = stand_in.with_name("registry")
        registry.mkdir()
        words = ["mksquashfs", root, registry / "large", "-all-root", "-quiet", "-no-progress"]
        await asyncio.to_thread(subprocess.run, words, check=True, capture_output=True)  # type: ignore[arg-type]
        image = "large" if kind == "a name" else str(registry / "large")
    with pytest.raises(ResourceStartError, match=rf"ContainerSpec\({setting}=…\) allows more"):
        await start(image=image, **limit)
    assert _calls(stand_in)[-1]["words"][0] != "create"
    assert _entries(place / "store" / "data") == []
    await start(image=image)


async def test_mounts_are_views_that_cannot_be_written(start: Start, place: Path) -> None:
    shared = place / "a b$c"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    (shared / "data").write_text("host\n")
    box = await start(mounts=((str(shared), "/mnt/the data"),))
    seen = await box.run("cat '/mnt/the data/data'; echo x > '/mnt/the data/new'")
    assert seen.stdout == "host\n"
    assert "Read-only" in seen.stderr
    with pytest.raises(PrerequisiteError, match="enroot cannot mount at"):
        await start(mounts=((str(shared), "/mnt/$data"),))


@pytest.mark.parametrize("user", ["agent", "root"])
async def test_what_runs_inside_has_no_capability_and_is_filtered(start: Start, user: str) -> None:
    box = await start(user=user)
    for new_process in (False, True):
        seen = await box.run("grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status", new_process=new_process)
        found = dict(line.split(":\t") for line in seen.stdout.splitlines())
        assert {name: int(value, 16) for name, value in found.items() if name.startswith("Cap")} == dict.fromkeys(
            ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), 0
        )
        assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
        assert "denied" in (await box.run("echo 1 > /proc/sys/vm/drop_caches", new_process=new_process)).stderr


async def test_without_control_groups_it_serves_those_alone_that_say_so(
    stand_in: Path, root: Path, place: Path
) -> None:
    weak = Enroot(str(stand_in), cgroups=False, store=place / "store")
    if not weak.probe().available:
        pytest.skip(" ".join(weak.probe().missing))
    spec = ContainerSpec(image=str(root), backend="enroot", memory="256MiB", pids=20)
    with pytest.raises(PrerequisiteError, match="memory of its processes together has no limit"):
        weak.probe().check(spec)
    box = Container(
        ContainerSpec(image=str(root), backend="enroot", memory="256MiB", pids=20, isolation="weak"),
        f"enroot-weak-{os.getpid()}",
        backend=weak,
    )
    try:
        await box.start()
        many = await box.run("for i in {1..60}; do sleep 20 & done; wait", timeout=3)
        assert "Resource temporarily unavailable" in many.stderr or "retry" in many.stderr
        hog = await box.run("printf -v x '%*s' 400000000 ''; echo ${#x}", timeout=20, new_process=True)
        assert "400000000" not in hog.stdout
        assert (await box.run("echo alive", timeout=30)).stdout == "alive\n"
    finally:
        await box.release()


async def test_a_start_that_fails_gives_enroot_s_words_and_leaves_nothing(
    start: Start, enroot: Enroot, stand_in: Path, root: Path, weak: dict[str, Any]
) -> None:
    await start()
    await asyncio.to_thread(stand_in.write_text, "#!/bin/sh\necho 'the disk is full' >&2\nexit 3\n")
    spec = ContainerSpec(image=str(root), memory="256MiB", pids=64, backend="enroot", **weak)
    box = Container(spec, f"enroot-fails-{os.getpid()}", backend=enroot)
    with pytest.raises(ResourceStartError, match="the disk is full"):
        await box.start()
    await box.release()
    assert _is_gone(enroot.traces(spec, box.instance))


def test_a_machine_without_enroot_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    found = Enroot().probe()
    assert not found.available
    assert "github.com/NVIDIA/enroot/releases" in found.missing[0]


_KILLED = """
import asyncio, json, sys
from pathlib import Path
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.enroot.backend import Enroot
from agentfly.resources.containers.spec import ContainerSpec

async def main():
    program, store, image, instance = sys.argv[1:]
    enroot = Enroot(program, store=Path(store))
    isolation = "weak" if enroot.probe().isolation_gaps else "full"
    spec = ContainerSpec(image=image, memory="256MiB", pids=64, backend="enroot", isolation=isolation)
    box = Container(spec, instance, backend=enroot)
    await box.start()
    await box.run("sleep 9911 & sleep 9911 & echo", timeout=20)
    print(json.dumps(box.traces["enroot"]), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_after_a_kill_its_processes_end_and_reap_removes_its_traces_and_no_other_s(
    start: Start,
    enroot: Enroot,
    stand_in: Path,
    root: Path,
    place: Path,
    processes_with: Callable[[str], list[int]],
    eventually: Callable[[Callable[[], bool]], Coroutine[Any, Any, None]],
) -> None:
    other = await start()
    words = [str(stand_in), str(place / "store"), str(root), f"enroot-killed-{os.getpid()}"]
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _KILLED,
        *words,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert owner.stdout is not None
    traces = json.loads(await asyncio.wait_for(owner.stdout.readline(), 60))
    assert len(processes_with("sleep\09911")) == 2
    owner.send_signal(signal.SIGKILL)
    await owner.wait()
    await eventually(lambda: processes_with("sleep\09911") == [])
    await asyncio.to_thread(enroot.reap, traces)
    await asyncio.to_thread(enroot.reap, traces)
    assert _is_gone(traces)
    assert (await other.run("echo alive")).stdout == "alive\n"


async def test_reap_ends_a_box_that_still_runs_and_is_frozen(
    start: Start, enroot: Enroot, processes_with: Callable[[str], list[int]]
) -> None:
    box, other = await start(), await start()
    await box.run("sleep 9912 &")
    if enroot.probe().freeze != "none":
        await box.freeze()
    await asyncio.to_thread(enroot.reap, box.traces["enroot"])
    assert processes_with("sleep\09912") == []
    assert (await other.run("echo alive")).stdout == "alive\n"


@pytest.mark.parametrize("end", ["its output is refused", "its caller leaves"])
async def test_a_program_of_enroot_that_is_given_up_is_not_waited_for_while_others_hold_its_output(
    end: str, processes_with: Callable[[str], list[int]]
) -> None:
    begun = asyncio.Event()

    def take(printed: bytes) -> None:
        begun.set()
        if end == "its output is refused":
            raise ResourceStartError("too much")

    words = ["bash", "-c", "setsid sleep 9913 & exec yes"]
    try:
        async with asyncio.timeout(20):
            running = asyncio.create_task(run_program(words, {"PATH": os.environ["PATH"]}, as_user=False, take=take))
            await begun.wait()
            if end == "its caller leaves":
                running.cancel()
            with pytest.raises((ResourceStartError, asyncio.CancelledError)):
                await running
    finally:
        for process in processes_with("sleep\09913"):
            os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("fault", ["the image", "the place for images"])
async def test_what_the_host_refuses_of_an_image_is_told_with_the_cure(
    stand_in: Path, root: Path, place: Path, fault: str
) -> None:
    (place / "file").touch()
    image = "/" + "x" * 300 if fault == "the image" else str(root)
    enroot = Enroot(str(stand_in), store=place / ("store" if fault == "the image" else "file/store"))
    with pytest.raises(ResourceStartError, match=r"could not be prepared in .*readable to the user"):
        await enroot.prepare(ContainerSpec(image=image, backend="enroot"))
