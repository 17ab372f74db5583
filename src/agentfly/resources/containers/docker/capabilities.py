"""What containers of an engine can do on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentfly.errors import PrerequisiteError
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.spec import ContainerSpec


@dataclass(frozen=True, kw_only=True)
class EngineCapabilities(Capabilities):
    """Capabilities of a container engine that was asked.

    Args:
        address: where its service listens.
        api_version: which version of the API it speaks, such as ``"v1.41"``.
        runtimes: the runtimes that it knows by name; empty if it does not say.
    """

    address: str = ""
    api_version: str = ""
    runtimes: tuple[str, ...] = ()

    def check(self, spec: ContainerSpec) -> None:
        """See `Capabilities.check`."""
        super().check(spec)
        if spec.disk and spec.user == "root":
            raise PrerequisiteError(
                f"ContainerSpec(disk={spec.disk!r}, user='root') asks for a limit on private files, which "
                f"{self.backend} has for the user 'agent' alone: root may write everywhere in the image. Leave disk at "
                "0, or user at 'agent'."
            )
        if spec.runtime and self.runtimes and spec.runtime not in self.runtimes:
            raise PrerequisiteError(
                f"ContainerSpec(runtime={spec.runtime!r}): {self.backend} knows {', '.join(self.runtimes)}. "
                f"Install that one and name it in the engine's configuration, or name one of these."
            )


def of_engine(backend: str, address: str, version: dict[str, Any], info: dict[str, Any]) -> EngineCapabilities:
    """What follows from what an engine says of itself.

    Args:
        backend: its name.
        address: where its service listens.
        version: its answer to ``/version``.
        info: its answer to ``/info``.
    """
    missing = []
    limits = {"MemoryLimit": "memory", "PidsLimit": "processes", "CpuCfsQuota": "processor time"}
    absent = [words for field, words in limits.items() if not info.get(field)]
    if absent:
        missing.append(
            f"{backend} cannot limit {', '.join(absent)} here, as without root on control groups of version 1: use "
            "version 2 with delegation, or run the engine as root."
        )
    driver, system = info.get("Driver", "?"), info.get("OperatingSystem", "?")
    seccomp = any("seccomp" in option for option in info.get("SecurityOptions") or ())
    return EngineCapabilities(
        backend=backend,
        works=True,
        how=f"{version.get('Version', '?')} at {address}, {driver} on {system}",
        images=("name", "snapshot"),
        memory="cgroup" if info.get("MemoryLimit") else "none",
        pids="cgroup" if info.get("PidsLimit") else "none",
        cpus=bool(info.get("CpuCfsQuota")),
        disk=True,
        network_off=True,
        filtered=seccomp,
        writable_system=False,
        users=True,
        ports=True,
        freezes="cgroup",
        forks=True,
        cores=int(info["NCPU"]),
        ram=int(info["MemTotal"]),
        named_runtimes=True,
        missing=tuple(missing),
        address=address,
        api_version=f"v{version['ApiVersion']}",
        runtimes=tuple(info.get("Runtimes") or ()),
    )
