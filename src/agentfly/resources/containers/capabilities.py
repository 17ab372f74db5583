"""Capabilities: what a backend can do on this machine, and how to get what is missing."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentfly.core.errors import PrerequisiteError
from agentfly.resources.containers.spec import ContainerSpec, ImageKind


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of one backend's containers on this machine. The defaults mean "not supported".

    Args:
        backend: its name.
        available: whether it can start containers at all.
        description: how it starts them, for people.
        images: the kinds of image that it supports (`ContainerSpec.image_kind`).
        memory: what enforces the memory limit: the kernel, for all processes together (``cgroup``), or a limit for each
            process and a watchdog for their sum (``watchdog``).
        pids: what bounds the number of processes.
        cpus: whether processor time can be limited.
        disk: whether the size of its private files can be limited.
        network_off: whether a container can have no network.
        seccomp_filter: whether a seccomp filter refuses system calls that no program in a sandbox needs.
        unaccounted_memory: kinds of memory that the limit does not count, for people. A hostile program can exceed the
            limit with them.
        writable_system: whether system directories such as ``/usr`` can be written (privately) inside.
        multiple_users: whether a command may run as another user than the spec's.
        ports: whether the host can reach its TCP ports.
        freeze: what stops its processes while it is idle: the kernel (``cgroup``), or a signal to each of them, which
            processes inside can undo (``signal``).
        fork: whether its files can become the image of another container.
        cores: number of processor cores on the machine where its containers run.
        total_memory: bytes of memory of that machine.
        named_runtimes: whether runtimes can be chosen by name.
        isolation_gaps: the missing parts of the isolation on this machine, for people. Only specs with
            ``isolation="weak"`` are then accepted.
        missing: each missing prerequisite and how to get it.
    """

    backend: str
    available: bool
    description: str = ""
    images: tuple[ImageKind, ...] = ()
    memory: Literal["cgroup", "watchdog", "none"] = "none"
    pids: Literal["cgroup", "rlimit", "none"] = "none"
    cpus: bool = False
    disk: bool = False
    network_off: bool = False
    seccomp_filter: bool = False
    unaccounted_memory: tuple[str, ...] = ()
    writable_system: bool = False
    multiple_users: bool = False
    ports: bool = False
    freeze: Literal["cgroup", "signal", "none"] = "none"
    fork: bool = False
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    total_memory: int = field(default_factory=lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    named_runtimes: bool = False
    isolation_gaps: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def check(self, spec: ContainerSpec) -> None:
        """Refuse a spec that asks for what cannot be done or enforced here.

        Raises:
            PrerequisiteError: it does. The message says what to do.
        """
        if not self.available:
            raise PrerequisiteError(f"{self.backend} cannot start containers on this machine. {' '.join(self.missing)}")
        if self.isolation_gaps and spec.isolation == "full":
            raise PrerequisiteError(
                f"{self.backend} cannot isolate a container fully on this machine: {'; '.join(self.isolation_gaps)}. "
                "If that will do for what runs inside, say so by ContainerSpec(isolation='weak'). Or: "
                + " ".join(self.missing)
            )
        if spec.image_kind not in self.images:
            raise PrerequisiteError(
                f"ContainerSpec(image={spec.image!r}): {self.backend} takes {self._accepted_images()} as an image here."
            )
        if spec.backend == "auto" and spec.image_kind == "snapshot":
            raise PrerequisiteError(
                f"ContainerSpec(image={spec.image!r}, backend='auto'): a snapshot is of one backend, and belongs to a "
                "spec that fork() returned. Take that one, or a dataclasses.replace() of it."
            )
        self._check_machine(spec)
        for name, asked, can, what in (
            ("cpus", spec.cpus, self.cpus, "a limit on processor time"),
            ("disk", spec.disk, self.disk, "a limit on private files"),
            ("network", not spec.network, self.network_off, "a container without network"),
            ("ports", spec.ports, self.ports, "ports inside that the host can reach"),
            ("runtime", spec.runtime, self.named_runtimes, "a runtime by name"),
            ("idle", spec.idle == "freeze", self.freeze != "none", "a container whose processes can be stopped"),
        ):
            if asked and not can:
                raise self.unsupported_error(f"ContainerSpec({name}={getattr(spec, name)!r})", what)

    def _check_machine(self, spec: ContainerSpec) -> None:
        """Refuse a spec that asks for more than the machine has, which could hold it to no limit."""
        if spec.cpus > self.cores:
            raise PrerequisiteError(
                f"ContainerSpec(cpus={spec.cpus!r}): the machine of {self.backend} has {self.cores} processor cores. "
                "Ask for no more, or leave it at 0 for no limit."
            )
        if spec.memory_limit > self.total_memory:
            raise PrerequisiteError(
                f"ContainerSpec(memory={spec.memory!r}): the machine of {self.backend} has "
                f"{self.total_memory / 2**30:.1f} GiB of memory. Ask for no more."
            )

    def check_user(self, user: str | None, spec: ContainerSpec) -> None:
        """Refuse a command for a user that it cannot run as.

        Raises:
            PrerequisiteError: the user is not the spec's, and a container here has that one only.
        """
        if user not in (None, spec.user) and not self.multiple_users:
            raise PrerequisiteError(
                f"run(user={user!r}): all processes of a container of {self.backend} are of the one user that its "
                f"spec names, here {spec.user!r}. Write ContainerSpec(user={user!r}), or leave out user."
            )

    def unsupported_error(self, asked: str, what: str) -> PrerequisiteError:
        """The error for what was asked and cannot be done here."""
        cure = f" Or: {' '.join(self.missing)}" if self.missing else ""
        return PrerequisiteError(f"{asked} asks for {what}, which {self.backend} cannot do here. Leave it out.{cure}")

    def _accepted_images(self) -> str:
        words = {
            "host": "'host'",
            "path": "the absolute path of a root file system",
            "name": "a name such as 'debian:12'",
            "snapshot": "what fork() returned",
        }
        return " or ".join(words[kind] for kind in self.images) or "nothing"


FILTER_MISSING = (
    "No system call filter: it needs 64-bit x86_64 or aarch64, and a kernel with seccomp. Programs inside may make all "
    "system calls that their user may."
)


def cgroups_missing(effect: str) -> str:
    """Return what it means that this process may create no control groups, and how to get them.

    Args:
        effect: the effect on limits, as a clause.
    """
    return (
        f"No control groups: this process may not create any, so {effect}. For hostile code, start under "
        "'systemd-run --user --scope -p Delegate=yes …', or as root; in a container, mount /sys/fs/cgroup writable."
    )


def user_namespace_hint(complaint: str, settings: Path = Path("/proc/sys")) -> str:
    """Return how to enable user namespaces for bubblewrap, judged by the kernel settings that forbid them.

    Args:
        complaint: the error output of bubblewrap.
        settings: the directory of the kernel settings.
    """
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
                f"Ordinary users may not create user namespaces here ({name.replace('/', '.')} is {forbids}). "
                f"As root, run: {cure}"
            )
    return (
        f"bubblewrap could not create its namespaces: {complaint.strip() or 'it gave no reason'}. If this is inside a "
        "container, start that with '--security-opt seccomp=unconfined --security-opt apparmor=unconfined "
        "--security-opt systempaths=unconfined', or with '--privileged'."
    )
