"""MemoryLimit: one memory limit for all processes of a simulator together."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

from agentfly.resources.process.cgroups import Cgroup, cgroup_pids, writable_cgroup_parent
from agentfly.resources.process.procfs import descendants, private_memory_bytes

_MAX_PROCESSES = 2**22  # the kernel's maximum


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
        """The limit of an instance, in the form that this machine can enforce."""
        home = writable_cgroup_parent()
        if home is None:
            return cls(limit, {}, 0)
        group = home.cgroup(f"agentfly-{instance}")
        return cls(limit, {name: str(path) for name, path in group.directories.items()}, group.version)

    def create(self) -> None:
        """Create the control group; called by the supervisor before it forks."""
        if self.directories:
            self.remove()  # left by an earlier process of this instance, whose counters must not count
            self._group.create(memory=self.limit, pids=_MAX_PROCESSES, cpus=0)

    def join(self) -> None:
        """Put the calling process and its future descendants under the limit."""
        if self.directories:
            self._group.attach(os.getpid())
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (self.limit, self.limit))

    def oom_kills(self) -> int:
        """The number of processes that the kernel has killed for the limit; kills by the supervisor do not count."""
        return self._group.oom_kills() if self.directories else 0

    def exceeded(self) -> bool:
        """Whether the descendants of the calling process have exceeded the limit."""
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
