"""Control groups, versions 1 and 2: limits on memory, processes and CPU time of a sandbox."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_CPU_PERIOD_US = 100_000
_REMOVE = f"{__name__}:remove_probe"
_CHARGED_AT_ONCE = 2**20  # bytes, generously
_OOMS = re.compile(rb"^oom (\d+)", re.MULTILINE)
_OOM_KILLS = re.compile(rb"^oom_kill (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Cgroup:
    """The control group of one sandbox: one directory in version 2, one for each controller in version 1.

    Args:
        directories: by controller: ``memory``, ``pids`` and, where they are, ``cpu`` and ``freezer`` (in version 2,
            any group can be frozen).
        version: 1 or 2.
    """

    directories: dict[str, Path]
    version: int

    @property
    def paths(self) -> list[Path]:
        """The directories, each once."""
        return list(dict.fromkeys(self.directories.values()))

    def create(self, *, memory: int, pids: int, cpus: float) -> None:
        """Make the group and set its limits. `cpus` of 0 sets none."""
        for path in self.paths:
            path.mkdir(exist_ok=True)
        memory_at, pids_at = self.directories["memory"], self.directories["pids"]
        _write(f"{pids_at}/pids.max", pids)
        if self.version == 2:
            _write(f"{memory_at}/memory.max", memory)
            _write_if_there(f"{memory_at}/memory.swap.max", 0)
        else:
            _write(f"{memory_at}/memory.limit_in_bytes", memory)
            _write_if_there(f"{memory_at}/memory.memsw.limit_in_bytes", memory)
        if cpus:
            quota, cpu_at = int(cpus * _CPU_PERIOD_US), self.directories["cpu"]
            if self.version == 2:
                _write(f"{cpu_at}/cpu.max", f"{quota} {_CPU_PERIOD_US}")
            else:
                _write(f"{cpu_at}/cpu.cfs_period_us", _CPU_PERIOD_US)
                _write(f"{cpu_at}/cpu.cfs_quota_us", quota)

    @property
    def can_freeze(self) -> bool:
        """Whether its processes can be frozen."""
        return "freezer" in self.directories

    def freeze(self, patience_s: float = 10.0) -> None:
        """Stop its processes where they are; return when all are.

        Raises:
            OSError: they do not stop, as where one waits for a disk that does not answer.
        """
        path = self.directories["freezer"]
        name, word, state, done = (
            ("cgroup.freeze", "1", "cgroup.events", "frozen 1")
            if self.version == 2
            else ("freezer.state", "FROZEN", "freezer.state", "FROZEN")
        )
        _write(path / name, word)
        deadline = time.monotonic() + patience_s
        while done not in (path / state).read_text():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the processes of {path} were not frozen within {patience_s:g} s")
            time.sleep(0.0005)

    def thaw(self) -> None:
        """Let its processes go on; fine if they do, or are gone."""
        thaw_cgroup(self.directories["freezer"])

    def attach(self, pid: int) -> None:
        """Move a process into the group; what it starts from then on is born there."""
        for path in self.paths:
            _write(f"{path}/cgroup.procs", pid)

    def oom_kills(self) -> int:
        """Return how many processes of the group the kernel killed for exceeding the memory limit."""
        counter = OOMKillCounter(self)
        try:
            return counter.kills()
        finally:
            counter.close()

    def has_killed_for_its_own_limit(self) -> bool:
        """Whether the kernel has killed a process of the group for the group's limit, and not for the machine's."""
        at = self.directories["memory"]
        try:
            if self.version == 2:
                found = _OOMS.search((at / "memory.events").read_bytes())
                met = found is not None and int(found[1]) > 0
            else:
                most, limit = (int((at / f"memory.{name}_in_bytes").read_text()) for name in ("max_usage", "limit"))
                met = most + _CHARGED_AT_ONCE >= limit
        except OSError:  # the group is gone
            return False
        return met and self.oom_kills() > 0

    def remove(self, patience_s: float = 2.0) -> None:
        """Remove the group after its processes were killed; kill the last ones.

        Raises:
            OSError: there are still processes in it.
        """
        remove_cgroups(self.paths, patience_s)


def thaw_cgroup(path: Path) -> None:
    """Let the processes of a control group's directory go on, if it is one that can freeze them."""
    _write_if_there(path / "cgroup.freeze", 0)
    _write_if_there(path / "freezer.state", "THAWED")


class OOMKillCounter:
    """The same count for who asks often, from a file that stays open."""

    def __init__(self, group: Cgroup) -> None:
        """Look at a group; in one that is not there, nothing was ever killed."""
        name = "memory.events" if group.version == 2 else "memory.oom_control"
        try:
            self._descriptor = os.open(f"{group.directories['memory']}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1
        self._text = b""
        self._kills = 0

    def kills(self) -> int:
        """Return the number of kills; see `Cgroup.oom_kills`."""
        try:
            text = os.pread(self._descriptor, 4096, 0)
        except OSError:  # the group is gone
            return 0
        if text != self._text:
            found = _OOM_KILLS.search(text)
            self._text, self._kills = text, int(found[1]) if found else 0
        return self._kills

    def close(self) -> None:
        """Look no more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def remove_cgroups(paths: list[Path], patience_s: float = 2.0) -> None:
    """Remove directories of control groups, and kill who is still in them; those that are gone already are fine.

    Raises:
        TimeoutError: there are processes in one that do not die.
        OSError: it cannot be removed.
    """
    deadline = time.monotonic() + patience_s
    for path in paths:
        while True:
            try:
                path.rmdir()
            except FileNotFoundError:
                break
            except OSError:
                left = cgroup_pids(path)
                if time.monotonic() > deadline:
                    if left:
                        raise TimeoutError(
                            f"the processes {left} in {path} do not end though they were killed"
                        ) from None
                    raise
                _kill_members(path, left)
                time.sleep(0.002)
            else:
                break


def _kill_members(path: Path, pids: list[int]) -> None:
    """Kill processes that were in a group. A process id that another process has reused is left alone."""
    opened: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            opened[pid] = os.pidfd_open(pid)
    still = set(cgroup_pids(path))
    for pid, descriptor in opened.items():
        with contextlib.suppress(OSError):
            if pid in still:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


def cgroup_pids(path: Path) -> list[int]:
    """The processes in a control group's directory."""
    try:
        return [int(line) for line in (path / "cgroup.procs").read_text().split()]
    except OSError:
        return []


@dataclass(frozen=True)
class CgroupParent:
    """The place where this process may create control groups.

    Args:
        parents: the parent directory, by controller.
        version: 1 or 2.
    """

    parents: dict[str, Path]
    version: int

    def cgroup(self, name: str, *, cpus: float = 0) -> Cgroup:
        """The (not yet made) control group of that name, with the controllers that its limits need."""
        needed = {"memory", "pids", "freezer"} | ({"cpu"} if cpus else set())
        found = {controller: parent / name for controller, parent in self.parents.items() if controller in needed}
        return Cgroup(found, self.version)


@cache
def writable_cgroup_parent() -> CgroupParent | None:
    """Return where this process may create control groups that limit memory and processes; None if nowhere."""
    return _version_2_home() or _version_1_home()


def _version_2_home() -> CgroupParent | None:
    root = next((mount for kind, _, mount in _mounts() if kind == "cgroup2"), None)
    own = _own_groups().get("")
    if root is None or own is None:
        return None
    directory = root / own.lstrip("/")
    while directory.is_relative_to(root):
        controllers = _delegated(directory)
        if {"memory", "pids"} <= controllers:
            there = controllers & {"memory", "pids", "cpu"}
            home = CgroupParent(dict.fromkeys((*there, "freezer"), directory), 2)
            if _probe(home):
                return home
        if directory == root:
            break
        directory = directory.parent
    return None


def _delegated(directory: Path) -> set[str]:
    """The controllers that a child of this version 2 group would have, after asking for those that it could have."""
    try:
        for name in ("memory", "pids", "cpu"):
            _write_if_there(directory / "cgroup.subtree_control", f"+{name}")
        return set((directory / "cgroup.subtree_control").read_text().split())
    except OSError:
        return set()


def _version_1_home() -> CgroupParent | None:
    own = _own_groups()
    parents: dict[str, Path] = {}
    for kind, options, mount in _mounts():
        if kind != "cgroup":
            continue
        for name in {"memory", "pids", "cpu", "freezer"} & options:
            directory = mount / own.get(name, "/").lstrip("/")
            parents[name] = directory if directory.is_dir() else mount
    home = CgroupParent(parents, 1)
    return home if {"memory", "pids"} <= parents.keys() and _probe(home) else None


def _probe(home: CgroupParent) -> bool:
    """Whether a group with limits can be made there, and a process moved into it."""
    from agentfly.resources.process.ledger import CleanupRecord  # here: small programs that try nothing import this too

    cpus = 1.0 if "cpu" in home.parents else 0
    group = home.cgroup(f"agentfly-probe-{uuid.uuid4().hex[:8]}", cpus=cpus)
    with CleanupRecord("cgroup-probe", _REMOVE, {"directories": [str(path) for path in group.paths]}):
        try:
            group.create(memory=2**28, pids=64, cpus=cpus)
            return all(os.access(path / "cgroup.procs", os.W_OK) for path in group.paths)
        except OSError:
            return False
        finally:
            for path in group.paths:
                if path.is_dir():
                    path.rmdir()


def remove_probe(traces: dict[str, Any]) -> None:
    """Remove the control group by which a process that died tried what can be limited. Fine if it is gone.

    Raises:
        OSError: it is still there.
    """
    remove_cgroups([Path(directory) for directory in traces["directories"]])


def _own_groups() -> dict[str, str]:
    """This process's group by controller; version 2 under the empty name."""
    groups: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        groups |= dict.fromkeys(names.split(","), path)
    return groups


def _mounts() -> Iterator[tuple[str, set[str], Path]]:
    """File system type, super options and mount point of each mount."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        yield kind, set(options.split(",")), Path(before.split(" ")[4])


def _write(path: Path | str, value: int | str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def _write_if_there(path: Path | str, value: int | str) -> None:
    try:
        _write(path, value)
    except OSError:
        return
