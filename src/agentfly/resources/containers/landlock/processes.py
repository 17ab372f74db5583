"""ProcessTree: the processes of a sandbox that has no process namespace: all that descend from its first."""

from __future__ import annotations

from dataclasses import dataclass

from agentfly.resources.containers.bubblewrap.first_process import FirstProcess
from agentfly.resources.containers.bubblewrap.processes import ProcessNamespace
from agentfly.resources.processes import descendants


@dataclass(frozen=True)
class ProcessTree(ProcessNamespace):
    """The first process of a sandbox, which adopts what its descendants leave behind, and all below it.

    Args:
        inode: 0, for there is no namespace.
        started: the start time of the first process, by which it is told from a later one of the same id.
    """

    started: int

    @classmethod
    def of(cls, first: int) -> ProcessTree:
        """See `ProcessNamespace.of`."""
        return cls(first, 0, FirstProcess.of(first).started)

    def _has(self, pid: int) -> bool:
        if not FirstProcess(self.first, self.started).lives:
            return False
        return pid == self.first or pid in descendants(self.first)
