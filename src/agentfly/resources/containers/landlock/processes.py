"""ProcessTree: the processes of a sandbox that has no process namespace: all that descend from its first."""

from __future__ import annotations

from agentfly.resources.containers.bubblewrap.processes import ProcessNamespace
from agentfly.resources.processes import descendants


class ProcessTree(ProcessNamespace):
    """The first process of a sandbox, which adopts what its descendants leave behind, and all below it."""

    def _has(self, pid: int) -> bool:
        return pid == self.first or pid in descendants(self.first)
