"""Landlock: the backend for machines where no namespaces can be made. Only specs that say so get it."""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path
from typing import Any

from agentfly.errors import PrerequisiteError
from agentfly.resources.cgroups import cgroup_home
from agentfly.resources.containers.backend import Backend
from agentfly.resources.containers.bubblewrap.capabilities import BASH_MISSING
from agentfly.resources.containers.bubblewrap.reaping import reap
from agentfly.resources.containers.bubblewrap.sandbox import BubblewrapSandbox
from agentfly.resources.containers.bubblewrap.scratch import traces
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.landlock.capabilities import LandlockCapabilities
from agentfly.resources.containers.landlock.launcher import LandlockLauncher
from agentfly.resources.containers.spec import ContainerSpec

_making = threading.Lock()


class Landlock(Backend):
    """Sandboxes that are confined by Landlock, with the shell of bubblewrap's.

    Args:
        launcher: what starts them; by default the one of this process.
    """

    name = "landlock"

    def __init__(self, launcher: LandlockLauncher | None = None) -> None:
        self._launcher = launcher

    def probe(self) -> Capabilities:
        """See `Backend.probe`."""
        found = self._own()
        return found.capabilities if isinstance(found, LandlockLauncher) else found

    async def prepare(self, spec: ContainerSpec) -> None:
        """Nothing: its image is the host."""

    def sandbox(self, spec: ContainerSpec, instance: str) -> BubblewrapSandbox:
        """See `Backend.sandbox`."""
        launcher = self._own()
        assert isinstance(launcher, LandlockLauncher)
        return BubblewrapSandbox(launcher, spec, instance)

    def traces(self, spec: ContainerSpec, instance: str) -> dict[str, Any]:
        """See `Backend.traces`."""
        return traces(instance)

    def reap(self, traces: dict[str, Any]) -> None:
        """See `Backend.reap`."""
        reap(traces)

    def _own(self) -> LandlockLauncher | Capabilities:
        if self._launcher is not None:
            return self._launcher
        with _making:
            return _made_in(os.getpid())  # a forked child makes its own


def make_launcher(*, cgroups: bool = True) -> LandlockLauncher | Capabilities:
    """A launcher; or, where that does not work, what is missing."""
    if not Path("/bin/bash").exists():
        return LandlockCapabilities(works=False, missing=(BASH_MISSING,))
    try:
        return LandlockLauncher(cgroup_home() if cgroups else None)
    except (PrerequisiteError, OSError) as error:
        return LandlockCapabilities(works=False, missing=(str(error),))


@cache
def _made_in(pid: int) -> LandlockLauncher | Capabilities:
    return make_launcher()
