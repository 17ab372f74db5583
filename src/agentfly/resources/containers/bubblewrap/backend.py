"""Bubblewrap: the embedded backend, the tier of this machine, and the removal of orphans.

The program comes in a wheel, and an ordinary user can run it. The tier is found by trial, once per process.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
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
from agentfly.resources.containers.bubblewrap.sandbox import BubblewrapSandbox
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.runtime_directory import (
    CONFINE_PROGRAM,
    GROUPS,
    SHELL_DIRECTORY,
    remove_sandbox_directory,
    restore_owner_access,
    sandbox_uid,
    traces,
)
from agentfly.resources.containers.sandbox_processes import InitProcess
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.process.cgroups import remove_cgroups, thaw_cgroup, writable_cgroup_parent
from agentfly.resources.process.procfs import uid_of


def make_launcher(tier: Tier | None = None, *, cgroups: bool = True) -> Launcher | BubblewrapCapabilities:
    """Try the tiers, from the best down.

    Args:
        tier: the only tier to try; None to try all.
        cgroups: whether to use control groups, if there are any.

    Returns:
        A launcher; or, if no tier works, capabilities that say what is missing.
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
        # a forked child needs a launcher of its own, because it has none of its parent's threads
        return _launcher_of_process(os.getpid())


def get_launcher() -> Launcher:
    """Return the launcher of this process. The first call tries the tiers, which takes a moment.

    Raises:
        PrerequisiteError: sandboxes cannot be started on this machine; the message says what to do.
    """
    found = _launcher_or_failure()
    if isinstance(found, Launcher):
        return found
    raise PrerequisiteError("Sandboxes cannot be started on this machine. " + " ".join(found.missing))


def probe() -> BubblewrapCapabilities:
    """Return what sandboxes can do on this machine, found by trial once per process."""
    found = _launcher_or_failure()
    capabilities = found.capabilities if isinstance(found, Launcher) else found
    assert isinstance(capabilities, BubblewrapCapabilities)
    return capabilities


class Bubblewrap(Backend):
    """The backend `bubblewrap`.

    Args:
        launcher: starts the sandboxes; by default the launcher of this process.
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


# --- removal of orphans -----------------------------------------------------------------------------------------------

_REAP_TIMEOUT_S = 10.0


def reap_bubblewrap(traces: dict[str, Any]) -> None:
    """Kill and remove exactly what the traces of a bubblewrap or Landlock container name, if it still exists.

    Raises:
        OSError: a process does not die, or something cannot be removed.
    """
    home = Path(traces["scratch"])
    for directory in (home.parent, home):
        restore_owner_access(directory)
    for scratch in home.glob("*"):
        restore_owner_access(scratch)
    groups = [group for scratch in home.glob("*") for group in _cgroup_paths(scratch)]
    for group in groups:
        thaw_cgroup(group)  # a frozen process does not die
    deadline = time.monotonic() + _REAP_TIMEOUT_S
    # the confining programs know all processes of their sandbox, and end them first
    _end_programs(home, CONFINE_PROGRAM, signal.SIGTERM, deadline - _REAP_TIMEOUT_S / 2)
    _end_programs(home, CONFINE_PROGRAM, signal.SIGKILL, deadline)
    for scratch in home.glob("*"):
        if (first := InitProcess.load(scratch)) is not None and uid_of(first.pid) == sandbox_uid():
            first.kill(max(0.0, deadline - time.monotonic()))
    if left := _end_programs(home, SHELL_DIRECTORY, signal.SIGKILL, deadline):
        raise TimeoutError(f"the processes {left} of {home} were killed but do not end")
    remove_cgroups(groups, max(0.0, deadline - time.monotonic()))
    remove_sandbox_directory(home)


def _end_programs(home: Path, name: str, number: signal.Signals, deadline: float) -> list[int]:
    """Signal the programs of a sandbox until they have exited. Return those that are left at the deadline."""
    while started := _processes_naming(home, name):
        if time.monotonic() > deadline:
            break
        for pid in started:
            for one in (number, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, one)
        time.sleep(0.01)
    return started


def _cgroup_paths(scratch: Path) -> list[Path]:
    """Return the control groups of one generation of a sandbox."""
    try:
        return [Path(line) for line in (scratch / GROUPS).read_text().splitlines()]
    except OSError:  # it was never started, or is removed
        return []


def _processes_naming(home: Path, name: str) -> list[int]:
    """Return the programs of a sandbox: their command lines name a path of that sandbox."""
    named = re.compile(rb"(?:^|\0)" + re.escape(os.fsencode(home)) + rb"/\d+/" + re.escape(name.encode()) + rb"[/\0]")
    user = sandbox_uid()  # command lines of other users may name the path too
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if named.search((entry / "cmdline").read_bytes()) and uid_of(int(entry.name)) == user:
                    found.append(int(entry.name))
    return found
