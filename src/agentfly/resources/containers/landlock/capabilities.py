"""What a sandbox that is confined by Landlock can do, and what it cannot hold."""

from __future__ import annotations

from dataclasses import dataclass

from agentfly.resources.cgroups import CgroupHome
from agentfly.resources.containers.bubblewrap.capabilities import CGROUPS_MISSING, not_counted
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.spec import ContainerSpec

NAMESPACES_MISSING = "Namespaces would isolate fully: see what bubblewrap lacks."
_SEES = "it sees the host's processes and the names of its files"
_SIGNALS = "it may end processes of the same user (Linux 6.12 forbids that)"
_OWNER = "it may change permissions and times of the files of the user who started it"
_SANDBOXES = "it may change permissions and times of the files of other sandboxes"
_ITSELF = "a command may end the sandbox, and leave its rollout unscored, by 'kill -9 -1' or 'kill -9 $$'"
_SOCKETS = "with network=True, it reaches every program that listens on the host"
_DISK = (
    "the number and the size of all its private files have no limit, though they may lie in memory; that of each has"
)


@dataclass(frozen=True, kw_only=True)
class LandlockCapabilities(Capabilities):
    """What Landlock, a filter of system calls and resource limits can do together.

    Nothing outside the sandbox's own directories can be written, and of the host no more be read than in any other
    sandbox. Those directories have names of the host's: the shell starts in its workdir, ``$HOME`` and ``$TMPDIR`` tell
    the others, and there is no /tmp.
    """

    backend: str = "landlock"

    @classmethod
    def found(cls, version: int, home: CgroupHome | None, *, own_user: bool) -> LandlockCapabilities:
        """By the version of Landlock, with control groups or without, and with a user for sandboxes alone or not."""
        signals = () if version >= 6 else (_SIGNALS,)
        weak = (_SEES, *signals, _SANDBOXES if own_user else _OWNER, _ITSELF, _SOCKETS, _DISK)
        return cls(
            works=True,
            how=f"by an ordinary user, confined by Landlock (version {version}), without namespaces",
            images=("host",),
            memory="cgroup" if home else "watchdog",
            pids="cgroup" if home else "rlimit",
            cpus=home is not None and "cpu" in home.parents,
            network_off=True,
            filtered=True,
            not_counted=not_counted(accounted=home is not None, filtered=True),
            freezes="cgroup" if home is not None and "freezer" in home.parents else "signal",
            not_isolated=weak,
            missing=(NAMESPACES_MISSING, *(() if home else (CGROUPS_MISSING,))),
        )

    def check(self, spec: ContainerSpec) -> None:
        """See `Capabilities.check`."""
        super().check(spec)
        if spec.user == "root":
            raise self.refusal("ContainerSpec(user='root')", "a user 0 inside")
        if spec.mounts:
            raise self.refusal(f"ContainerSpec(mounts={spec.mounts!r})", "host paths at other paths inside")
