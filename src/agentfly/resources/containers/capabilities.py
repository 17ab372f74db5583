"""Capabilities: what a backend can do on this machine, and how to get what is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agentfly.errors import PrerequisiteError
from agentfly.resources.containers.spec import ContainerSpec


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the containers of one backend can do on this machine.

    Args:
        backend: its name.
        works: whether it can start containers at all.
        how: how it starts them, in words for people.
        memory: what holds a container to its memory: the kernel, for all its processes together (``cgroup``), or a
            limit for each process and a watchdog for the sum of them (``watchdog``).
        pids: what bounds the number of processes.
        cpus: whether processor time can be limited.
        disk: whether the size of its private files can be limited.
        filtered: whether the kernel refuses the system calls inside that no program there needs.
        writable_system: whether system directories such as ``/usr`` can be written (privately) inside.
        freezes: whether its processes can be stopped while nobody uses it.
        forks: whether its files can become the image of another container.
        missing: for each thing that is missing, what it is and how to get it.
    """

    backend: str
    works: bool
    how: str = ""
    memory: Literal["cgroup", "watchdog", "none"] = "none"
    pids: Literal["cgroup", "rlimit", "none"] = "none"
    cpus: bool = False
    disk: bool = False
    filtered: bool = False
    writable_system: bool = False
    freezes: bool = False
    forks: bool = False
    missing: tuple[str, ...] = field(default=())

    def check(self, spec: ContainerSpec) -> None:
        """Refuse a spec that asks for what cannot be enforced here.

        Raises:
            PrerequisiteError: it does. The message says what to do.
        """
        missing = " ".join(self.missing)
        if not self.works:
            raise PrerequisiteError(f"{self.backend} cannot start containers on this machine. {missing}")
        if spec.cpus and not self.cpus:
            raise PrerequisiteError(
                f"ContainerSpec(cpus={spec.cpus:g}) asks for a limit on processor time, which {self.backend} cannot "
                f"set here. Leave cpus at 0, or: {missing}"
            )
        if spec.disk and not self.disk:
            raise PrerequisiteError(
                f"ContainerSpec(disk={spec.disk!r}) asks for a limit on private files, which {self.backend} cannot set "
                f"here. Leave disk at 0, or: {missing}"
            )
