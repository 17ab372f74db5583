"""Bubblewrap: the embedded backend, and the tier by which it starts sandboxes on this machine.

Its program comes with a wheel, and an ordinary user may start it. The tier is found by trying, once per process.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from agentfly.core.errors import PrerequisiteError
from agentfly.resources.containers import image_store
from agentfly.resources.containers.backend import Backend
from agentfly.resources.containers.bubblewrap.launcher import (
    BASH_MISSING,
    PROGRAM_MISSING,
    ROOT_MOUNTS_MISSING,
    BubblewrapCapabilities,
    Launcher,
    Tier,
)
from agentfly.resources.containers.bubblewrap.program import find_program
from agentfly.resources.containers.bubblewrap.reaping import reap_bubblewrap
from agentfly.resources.containers.bubblewrap.sandbox import BubblewrapSandbox
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.runtime_directory import traces
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.process.cgroups import writable_cgroup_parent


def make_launcher(tier: Tier | None = None, *, cgroups: bool = True) -> Launcher | BubblewrapCapabilities:
    """Try the tiers from the best down.

    Args:
        tier: try this one only.
        cgroups: whether to use control groups where there are any.

    Returns:
        A launcher; or, where no tier works, what is missing.
    """
    program = find_program()
    if program is None or not Path("/bin/bash").exists():
        lacking = PROGRAM_MISSING if program is None else BASH_MISSING
        return BubblewrapCapabilities(available=False, tier=Tier.NONE, missing=(lacking,))
    home = writable_cgroup_parent() if cgroups else None
    missing: list[str] = []
    tiers = [tier] if tier else [Tier.ROOT, Tier.USER] if os.geteuid() == 0 else [Tier.USER]
    for candidate in tiers:
        try:
            launcher = Launcher(candidate, program, home)
        except PrerequisiteError as error:
            missing.append(str(error))
        except OSError as error:
            missing.append(ROOT_MOUNTS_MISSING.format(reason=error))
        else:
            found = launcher.capabilities
            launcher.capabilities = replace(found, missing=(*missing, *found.missing))
            return launcher
    return BubblewrapCapabilities(
        available=False, tier=Tier.NONE, program=str(program.path), missing=tuple(dict.fromkeys(missing))
    )


_making = threading.Lock()


@cache
def _launcher_of_process(pid: int) -> Launcher | BubblewrapCapabilities:
    return make_launcher()


def _launcher_or_failure() -> Launcher | BubblewrapCapabilities:
    with _making:
        return _launcher_of_process(os.getpid())  # a forked child makes its own: its parent's threads are not in it


def get_launcher() -> Launcher:
    """The launcher of this process. The first call tries what the machine allows, which takes a moment.

    Raises:
        PrerequisiteError: sandboxes cannot be started here; the message says what to do.
    """
    found = _launcher_or_failure()
    if isinstance(found, Launcher):
        return found
    raise PrerequisiteError("Sandboxes cannot be started on this machine. " + " ".join(found.missing))


def probe() -> BubblewrapCapabilities:
    """What sandboxes can do on this machine, found by trying, once for each process."""
    found = _launcher_or_failure()
    able = found.capabilities if isinstance(found, Launcher) else found
    assert isinstance(able, BubblewrapCapabilities)
    return able


class Bubblewrap(Backend):
    """Sandboxes of bubblewrap.

    Args:
        launcher: what starts them; by default the launcher of this process.
    """

    name = "bubblewrap"

    def __init__(self, launcher: Launcher | None = None) -> None:
        self._launcher = launcher

    def probe(self) -> Capabilities:
        """See `Backend.probe`."""
        return self._launcher.capabilities if self._launcher is not None else probe()

    async def prepare(self, spec: ContainerSpec) -> None:
        """Unpack the image, if it is an archive."""
        if spec.image_kind == "path":
            await image_store.prepare_rootfs(spec)

    def sandbox(self, spec: ContainerSpec, instance: str) -> BubblewrapSandbox:
        """See `Backend.sandbox`."""
        return BubblewrapSandbox(self._launcher or get_launcher(), spec, instance)

    def traces(self, spec: ContainerSpec, instance: str) -> dict[str, Any]:
        """See `Backend.traces`."""
        return traces(instance)

    def reap(self, traces: dict[str, Any]) -> None:
        """See `Backend.reap`."""
        reap_bubblewrap(traces)
