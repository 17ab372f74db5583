"""Memory of containers without a control group: it is counted, or the limit is refused."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from agentfly.cli import doctor
from agentfly.resources.containers.backend import Backend, get_backend
from agentfly.resources.containers.bubblewrap.backend import Bubblewrap, make_launcher, probe
from agentfly.resources.containers.bubblewrap.launcher import (
    NOT_COUNTED,
    NOT_COUNTED_UNFILTERED,
    Launcher,
    Tier,
    unaccounted_memory,
)
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.landlock.backend import Landlock, LandlockLauncher
from agentfly.resources.containers.landlock.backend import make_launcher as make_landlock_launcher
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.process.cgroups import writable_cgroup_parent

PYTHON = "/usr/bin/python3"
pytestmark = pytest.mark.skipif(
    shutil.which("python3", path="/usr/bin") is None, reason="needs the system's python3: apt-get install python3"
)
WAYS = ["an ordinary user", "root without control groups", "landlock"]


@pytest.fixture(scope="module", params=WAYS)
def measured(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend that measures the memory of its boxes."""
    if request.param == "landlock":
        if not get_backend("landlock").probe().available:
            pytest.skip(" ".join(get_backend("landlock").probe().missing))
        made = make_landlock_launcher(cgroups=False)
        assert isinstance(made, LandlockLauncher)
        yield Landlock(made)
    else:
        tier = Tier.ROOT if "root" in request.param else Tier.USER
        if tier is Tier.ROOT and probe().tier is not Tier.ROOT:
            pytest.skip("started as root, boxes are started by root: sudo python -m pytest …")
        launcher = make_launcher(tier, cgroups=False)
        if not isinstance(launcher, Launcher):
            pytest.skip(" ".join(launcher.missing))
        yield Bubblewrap(launcher)
        launcher.close()


@pytest.fixture
async def box(measured: Backend, name: Callable[[], str]) -> AsyncIterator[Container]:
    weak = {"isolation": "weak"} if measured.probe().isolation_gaps else {}
    made = Container(ContainerSpec(memory="192MiB", **weak), name(), backend=measured)  # type: ignore[arg-type]
    try:
        await made.start()
        yield made
    finally:
        await made.release()


def python(source: str) -> str:
    return f"{PYTHON} -c {shlex.quote(source)}"


UNSEEN = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def answer(result):
    return os.strerror(ctypes.get_errno()) if result < 0 else "had"
print(answer(libc.syscall(ctypes.c_long(number("memfd_create")), b"file", 0)))
print(answer(libc.syscall(ctypes.c_long(447), 0)))
print(answer(libc.shmget(0, 2**20, 0o1600)), answer(libc.semget(0, 1000, 0o1600)), answer(libc.msgget(0, 0o1600)))
""".replace('number("memfd_create")', "{'x86_64': 319, 'aarch64': 279}[os.uname().machine]")


async def test_memory_that_no_look_at_a_box_would_show_cannot_be_had(box: Container, measured: Backend) -> None:
    if not measured.probe().seccomp_filter:
        pytest.skip("no filter of system calls here")
    assert "had" not in (await box.run(python(UNSEEN))).stdout


async def test_what_tells_a_database_that_it_runs_only_once_can_be_had(box: Container, measured: Backend) -> None:
    if measured.probe().isolation_gaps:
        pytest.skip("without namespaces, System V's shared memory is the host's")
    small = "import ctypes; print(ctypes.CDLL(None).shmget(0, 56, 0o1600) >= 0)"
    assert (await box.run(python(small))).stdout == "True\n"


HOGS = {
    "page tables": """
import mmap
size, kept = 2**34, []
for _ in range(40):
    kept.append(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, mmap.PROT_READ))
    for at in range(0, size, 2**21):
        kept[-1][at]
""",
    "inodes": """
import os
for number in range(400_000):
    os.close(os.open(f"{number}", os.O_CREAT | os.O_WRONLY))
""",
    "sockets": """
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
kept = [socket.socketpair() for _ in range(1500)]
""",
    "pipes": """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
kept = [os.pipe() for _ in range(5000)]
""",
    "mappings": """
import ctypes, os
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
for _ in range(11):
    if os.fork() == 0:
        break
for _ in range(60_000):  # 30 MB, as they are counted
    libc.mmap(None, ctypes.c_size_t(4096), _ % 2, 0x22, -1, ctypes.c_long(0))
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("hog", HOGS.values(), ids=HOGS.keys())
async def test_memory_that_the_kernel_takes_for_a_box_counts_as_its_own(
    box: Container, measured: Backend, hog: str
) -> None:
    if hog == HOGS["inodes"] and measured.probe().backend == "landlock":
        pytest.skip("the number of private files has no limit there, as `agentfly doctor` says")
    if "socketpair" in hog and measured.probe().backend == "landlock":
        pytest.skip("no socket can be made there without network")
    result = await box.run(python(f"{hog}\nimport time; time.sleep(10)\nprint('kept')"), timeout=60)
    if "os.fork" in hog:  # of twelve processes, those are left that fit, among them perhaps the command's own
        assert result.stdout.count("kept") <= 6
    else:
        assert (result.stdout, result.killed_by) == ("", "memory")
    assert (await box.run("echo alive", timeout=20)).stdout == "alive\n"


@pytest.mark.slow
async def test_few_pipes_sockets_and_mappings_are_not_charged_for_what_they_might_hold(
    box: Container, measured: Backend
) -> None:
    few = "import os, time; kept = [os.pipe() for _ in range(60)]; time.sleep(0.6); print('kept')"
    assert (await box.run(python(few))).stdout == "kept\n"


def test_what_the_limit_does_not_count_is_told(measured: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    able = measured.probe()
    assert able.memory == "watchdog"
    assert NOT_COUNTED in able.unaccounted_memory
    assert any("Delegate=yes" in cure for cure in able.missing)
    monkeypatch.setattr(doctor, "_backends", lambda: [able])
    (finding,) = doctor.backends()
    assert NOT_COUNTED in finding.found
    assert finding.verdict is doctor.CheckStatus.NOTE


def test_without_a_filter_more_is_not_counted_and_with_a_control_group_nothing() -> None:
    assert unaccounted_memory(accounted=False, filtered=False) == (NOT_COUNTED, NOT_COUNTED_UNFILTERED)
    assert unaccounted_memory(accounted=True, filtered=False) == ()
    if writable_cgroup_parent() is not None and probe().tier != "none":
        assert probe().unaccounted_memory == ()


def test_the_guide_says_what_is_not_counted() -> None:
    guide = " ".join((Path(__file__).parents[2] / "docs" / "guides" / "sandboxes.md").read_text().split())
    assert "in shared mappings that it unmaps in part" in guide
