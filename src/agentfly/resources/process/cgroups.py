"""Control groups, versions 1 and 2: limits on memory, processes and CPU time of a sandbox or simulator."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from agentfly.resources.process.procfs import descendants, private_memory_bytes

_CPU_PERIOD_US = 100_000
_MAX_PIDS = 2**22  # the kernel's maximum
_REMOVE = f"{__name__}:remove_probe"
_CHARGE_BATCH_BYTES = 2**20  # upper bound: the kernel charges memory in batches
_OOMS = re.compile(rb"^oom (\d+)", re.MULTILINE)
_OOM_KILLS = re.compile(rb"^oom_kill (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Cgroup:
    """A control group: one directory in version 2, one per controller in version 1.

    Args:
        directories: by controller: ``memory``, ``pids`` and, if available, ``cpu`` and ``freezer``. In version 2 every
            group can be frozen.
        version: 1 or 2.
    """

    directories: dict[str, Path]
    version: int

    @property
    def paths(self) -> list[Path]:
        """The directories, each once."""
        return list(dict.fromkeys(self.directories.values()))

    def create(self, *, memory: int, pids: int, cpus: float) -> None:
        """Create the group and set its limits. 0 ``cpus`` means no limit."""
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
        """Freeze its processes. Return when all are frozen.

        Raises:
            OSError: they do not freeze, for instance because one waits for a disk that does not answer.
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
        """Continue its processes. Does nothing if they run or are gone."""
        thaw_cgroup(self.directories["freezer"])

    def attach(self, pid: int) -> None:
        """Move a process into the group. Its future children start in the group."""
        for path in self.paths:
            _write(f"{path}/cgroup.procs", pid)

    def oom_kills(self) -> int:
        """Return the number of processes of the group that the kernel killed at the memory limit."""
        counter = OOMKillCounter(self)
        try:
            return counter.kills()
        finally:
            counter.close()

    def has_killed_for_its_own_limit(self) -> bool:
        """Return whether the kernel killed a process for the group's own limit, not because the machine ran out."""
        at = self.directories["memory"]
        try:
            if self.version == 2:
                found = _OOMS.search((at / "memory.events").read_bytes())
                met = found is not None and int(found[1]) > 0
            else:
                most, limit = (int((at / f"memory.{name}_in_bytes").read_text()) for name in ("max_usage", "limit"))
                met = most + _CHARGE_BATCH_BYTES >= limit
        except OSError:  # the group is gone
            return False
        return met and self.oom_kills() > 0

    def remove(self, patience_s: float = 2.0) -> None:
        """Remove the group after its processes were killed. Kill any that are left.

        Raises:
            OSError: a process in it does not end.
        """
        remove_cgroups(self.paths, patience_s)


def thaw_cgroup(path: Path) -> None:
    """Continue the processes of a control group, given its directory, if it can freeze them."""
    _write_if_there(path / "cgroup.freeze", 0)
    _write_if_there(path / "freezer.state", "THAWED")


class OOMKillCounter:
    """Counts the kills of a group at its memory limit. It keeps the file open, for frequent queries."""

    def __init__(self, group: Cgroup) -> None:
        """Open the counter of a group. It is 0 for a group that does not exist."""
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
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def remove_cgroups(paths: list[Path], patience_s: float = 2.0) -> None:
    """Remove directories of control groups, and kill any processes in them. Missing directories are skipped.

    Raises:
        TimeoutError: processes in a group do not die.
        OSError: a directory cannot be removed.
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
    """Kill those processes that are still in a group. Another process that reuses an id is not killed."""
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
    """Return the ids of the processes in a control group, given its directory."""
    try:
        return [int(line) for line in (path / "cgroup.procs").read_text().split()]
    except OSError:
        return []


@dataclass(frozen=True)
class CgroupParent:
    """A control group in which this process may create control groups.

    Args:
        parents: the parent directory, by controller.
        version: 1 or 2.
    """

    parents: dict[str, Path]
    version: int

    def cgroup(self, name: str, *, cpus: float = 0) -> Cgroup:
        """Return the control group of that name, not yet created, with the controllers that its limits need."""
        needed = {"memory", "pids", "freezer"} | ({"cpu"} if cpus else set())
        found = {controller: parent / name for controller, parent in self.parents.items() if controller in needed}
        return Cgroup(found, self.version)


@cache
def writable_cgroup_parent() -> CgroupParent | None:
    """Return a parent for control groups that limit memory and processes; None if this process may create none."""
    return _find_version_2_parent() or _find_version_1_parent()


@dataclass(frozen=True)
class MemoryLimit:
    """A memory limit of a simulator and all its descendants together.

    The kernel enforces it where control groups can be created. Elsewhere the supervisor measures four times a second,
    and no single process may allocate more than the limit, so that none can outrun the measurement.

    Args:
        limit: bytes.
        directories: the directories of the control group, by controller; empty without control groups.
        version: the version of control groups, 1 or 2.
    """

    limit: int
    directories: dict[str, str]
    version: int

    poll_interval_s = 0.25

    @classmethod
    def for_instance(cls, limit: int, instance: str) -> MemoryLimit:
        """Return the limit of an instance, in the form that this machine can enforce."""
        parent = writable_cgroup_parent()
        if parent is None:
            return cls(limit, {}, 0)
        group = parent.cgroup(f"agentfly-{instance}")
        return cls(limit, {name: str(path) for name, path in group.directories.items()}, group.version)

    def create(self) -> None:
        """Create the control group; called by the supervisor before it forks."""
        if self.directories:
            self.remove()  # left by an earlier process of this instance, whose counters must not count
            self._group.create(memory=self.limit, pids=_MAX_PIDS, cpus=0)

    def join(self) -> None:
        """Put the calling process and its future descendants under the limit."""
        if self.directories:
            self._group.attach(os.getpid())
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (self.limit, self.limit))

    def oom_kills(self) -> int:
        """Return the number of processes that the kernel killed for the limit. Kills by the supervisor do not count."""
        return self._group.oom_kills() if self.directories else 0

    def exceeded(self) -> bool:
        """Return whether the descendants of the calling process have exceeded the limit."""
        if self.directories:
            return self.oom_kills() > 0
        return sum(map(private_memory_bytes, descendants(os.getpid()))) > self.limit

    def remove(self) -> None:
        """Kill remaining processes under the limit, and remove the control group. Does nothing if it is gone.

        Raises:
            OSError: a process in it does not end.
        """
        if self.directories:
            for pid in cgroup_pids(Path(self.directories["memory"])):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._group.remove()

    @property
    def _group(self) -> Cgroup:
        return Cgroup({name: Path(path) for name, path in self.directories.items()}, self.version)


def _find_version_2_parent() -> CgroupParent | None:
    root = next((mount for kind, _, mount in _mounts() if kind == "cgroup2"), None)
    own = _own_groups().get("")
    if root is None or own is None:
        return None
    directory = root / own.lstrip("/")
    while directory.is_relative_to(root):
        controllers = _delegated(directory)
        if {"memory", "pids"} <= controllers:
            available = controllers & {"memory", "pids", "cpu"}
            parent = CgroupParent(dict.fromkeys((*available, "freezer"), directory), 2)
            if _probe(parent):
                return parent
        if directory == root:
            break
        directory = directory.parent
    return None


def _delegated(directory: Path) -> set[str]:
    """Enable the needed controllers for children of this version 2 group. Return those that are enabled."""
    try:
        for name in ("memory", "pids", "cpu"):
            _write_if_there(directory / "cgroup.subtree_control", f"+{name}")
        return set((directory / "cgroup.subtree_control").read_text().split())
    except OSError:
        return set()


def _find_version_1_parent() -> CgroupParent | None:
    own = _own_groups()
    parents: dict[str, Path] = {}
    for kind, options, mount in _mounts():
        if kind != "cgroup":
            continue
        for name in {"memory", "pids", "cpu", "freezer"} & options:
            directory = mount / own.get(name, "/").lstrip("/")
            parents[name] = directory if directory.is_dir() else mount
    parent = CgroupParent(parents, 1)
    return parent if {"memory", "pids"} <= parents.keys() and _probe(parent) else None


def _probe(parent: CgroupParent) -> bool:
    """Return whether a group with limits can be created there, and a process moved into it."""
    from agentfly.resources.process.ledger import CleanupRecord  # lazy: supervisors need no probe

    cpus = 1.0 if "cpu" in parent.parents else 0
    group = parent.cgroup(f"agentfly-probe-{uuid.uuid4().hex[:8]}", cpus=cpus)
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
    """Remove the control group of a probe whose process died. Does nothing if it is gone.

    Raises:
        OSError: it cannot be removed.
    """
    remove_cgroups([Path(directory) for directory in traces["directories"]])


def _own_groups() -> dict[str, str]:
    """Return this process's group by controller. The key of version 2 is empty."""
    groups: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        groups |= dict.fromkeys(names.split(","), path)
    return groups


def _mounts() -> Iterator[tuple[str, set[str], Path]]:
    """Yield the file system type, super options and mount point of each mount."""
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
