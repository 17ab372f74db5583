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

_ANY_NUMBER = 2**22  # of processes; the kernel knows no more


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on what a simulator and everything that it starts take together.

    Where control groups can be made, the kernel enforces it. Elsewhere the keeper measures four times a second, and no
    single process may allocate more than the limit, so that it cannot be outrun.

    Args:
        limit: bytes.
        directories: of the control group, by controller; empty where none can be made.
        version: of the control group, 1 or 2.
    """

    limit: int
    directories: dict[str, str]
    version: int

    poll_interval_s = 0.25

    @classmethod
    def for_instance(cls, limit: int, instance: str) -> MemoryLimit:
        """The bound of an instance, as this machine can enforce it."""
        home = writable_cgroup_parent()
        if home is None:
            return cls(limit, {}, 0)
        group = home.cgroup(f"agentfly-{instance}")
        return cls(limit, {name: str(path) for name, path in group.directories.items()}, group.version)

    def create(self) -> None:
        """Make what the bound needs; for the keeper, before it forks."""
        if self.directories:
            self.remove()  # of an instance before it was made anew; what was counted there does not count here
            self._group.create(memory=self.limit, pids=_ANY_NUMBER, cpus=0)

    def join(self) -> None:
        """Put the process that calls under the bound, with all that it starts from then on."""
        if self.directories:
            self._group.attach(os.getpid())
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (self.limit, self.limit))

    def oom_kills(self) -> int:
        """How many processes the kernel has killed for the bound; what the keeper kills is not counted."""
        return self._group.oom_kills() if self.directories else 0

    def exceeded(self) -> bool:
        """Whether the processes below the one that calls have run into the bound."""
        if self.directories:
            return self.oom_kills() > 0
        return sum(map(private_memory_bytes, descendants(os.getpid()))) > self.limit

    def remove(self) -> None:
        """Kill what is left under the bound, and remove what `set_up` made. Fine if it was done already.

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
