"""The tier of this machine: which way of starting sandboxes works here, found by trying, once for each process."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

from agentfly.errors import PrerequisiteError
from agentfly.resources.cgroups import cgroup_home
from agentfly.resources.containers.bubblewrap import capabilities
from agentfly.resources.containers.bubblewrap.capabilities import BubblewrapCapabilities, Tier
from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.bubblewrap.program import find_program


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
        lacking = capabilities.PROGRAM_MISSING if program is None else capabilities.BASH_MISSING
        return BubblewrapCapabilities(works=False, tier=Tier.NONE, missing=(lacking,))
    home = cgroup_home() if cgroups else None
    missing: list[str] = []
    tiers = [tier] if tier else [Tier.ROOT, Tier.USER] if os.geteuid() == 0 else [Tier.USER]
    for candidate in tiers:
        try:
            launcher = Launcher(candidate, program, home)
        except PrerequisiteError as error:
            missing.append(str(error))
        except OSError as error:
            missing.append(capabilities.ROOT_MOUNTS_MISSING.format(reason=error))
        else:
            found = launcher.capabilities
            launcher.capabilities = replace(found, missing=(*missing, *found.missing))
            return launcher
    return BubblewrapCapabilities(
        works=False, tier=Tier.NONE, program=str(program.path), missing=tuple(dict.fromkeys(missing))
    )


_making = threading.Lock()


@cache
def _made_in(pid: int) -> Launcher | BubblewrapCapabilities:
    return make_launcher()


def _own() -> Launcher | BubblewrapCapabilities:
    with _making:
        return _made_in(os.getpid())  # a forked child makes its own: its parent's threads are not in it


def launcher() -> Launcher:
    """The launcher of this process. The first call tries what the machine allows, which takes a moment.

    Raises:
        PrerequisiteError: sandboxes cannot be started here; the message says what to do.
    """
    found = _own()
    if isinstance(found, Launcher):
        return found
    raise PrerequisiteError("Sandboxes cannot be started on this machine. " + " ".join(found.missing))


def probe() -> BubblewrapCapabilities:
    """What sandboxes can do on this machine, found by trying, once for each process."""
    found = _own()
    able = found.capabilities if isinstance(found, Launcher) else found
    assert isinstance(able, BubblewrapCapabilities)
    return able
