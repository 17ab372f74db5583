"""ProcessTree: the processes of a sandbox that has no process namespace: all that descend from its first."""

from __future__ import annotations

import os
import signal

from agentfly.resources.containers.bubblewrap.processes import ProcessNamespace
from agentfly.resources.processes import descendants


class ProcessTree(ProcessNamespace):
    """The first process of a sandbox, which adopts what its descendants leave behind, and all below it."""

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """See `ProcessNamespace.signal`."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return False
        try:
            if pid != self.first and pid not in descendants(self.first):
                return False
            signal.pidfd_send_signal(descriptor, number)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True
