"""The bare programs that a sandbox is measured against: a shell on a pipe, a process, and ``bwrap`` itself."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.resources.containers.bubblewrap.program import filter_arguments, memory_file
from agentfly.resources.containers.bubblewrap.rootfs import SYSTEM_DIRECTORIES, common_arguments, sandbox_environment
from agentfly.resources.containers.seccomp import filter_program
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.process.cgroups import Cgroup, writable_cgroup_parent

_SHELL = ("/bin/bash", "--norc", "--noprofile")


class BareShell:
    """A bash on two pipes, without limits, time-outs and error handling, to compare with.

    Args:
        command: starts it, for instance inside a container; by default on the host.
    """

    def __init__(self, command: Sequence[str] = _SHELL) -> None:
        """Start it."""
        self._bash = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._answer: asyncio.Future[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        self._bash.kill()
        self._bash.communicate()

    def time_blocking(self, command: str) -> float:
        """Milliseconds of one line written and its reply read by a program that does nothing else meanwhile."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        line = f"{command}; echo $?\n".encode()
        before = time.perf_counter()
        self._bash.stdin.write(line)
        self._bash.stdout.read(16)
        return (time.perf_counter() - before) * 1e3

    async def time_in_event_loop(self, command: str) -> float:
        """The same, but an event loop waits for the reply, so that the program can do other work."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        loop, line = asyncio.get_running_loop(), f"{command}; echo $?\n".encode()
        loop.add_reader(self._bash.stdout.fileno(), self._read)  # once for many commands in a real one: not timed
        try:
            before = time.perf_counter()
            self._answer = loop.create_future()
            self._bash.stdin.write(line)
            await self._answer
            return (time.perf_counter() - before) * 1e3
        finally:
            loop.remove_reader(self._bash.stdout.fileno())

    def _read(self) -> None:
        assert self._bash.stdout is not None
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(os.read(self._bash.stdout.fileno(), 16))


def bare_process() -> float:
    """Milliseconds of a bash that runs ``true``, from its start to its end, without a sandbox."""
    before = time.perf_counter()
    subprocess.run([*_SHELL, "-c", "true"], check=True, capture_output=True)
    return (time.perf_counter() - before) * 1e3


def bare_bubblewrap(spec: ContainerSpec, number: int) -> tuple[float, float]:
    """Milliseconds from the launch of a bare ``bwrap`` to the first reply of a shell in it, and of its end.

    It gets the same namespaces, an overlay of the same directories, the same private file systems, environment, limits
    and filter of system calls as a sandbox.
    """
    home = writable_cgroup_parent()
    filters: tuple[int, ...] = ()
    group: Cgroup | None = home.cgroup(f"agentfly-bare-{os.getpid()}-{number}", cpus=spec.cpus) if home else None
    try:
        with tempfile.TemporaryDirectory() as directory:
            arguments = _bubblewrap_arguments(spec, Path(directory))
            began = time.perf_counter()
            program_of_filter = filter_program(platform.machine())
            filters = (memory_file(program_of_filter),) if program_of_filter else ()
            command = [probe().program, *filter_arguments(filters), *arguments, "--", *_SHELL]
            if group is not None:
                group.create(memory=spec.memory_limit, pids=spec.pids, cpus=spec.cpus)
            with subprocess.Popen(
                [*command, "-c", "read; echo; read"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=filters,
            ) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                if group is not None:
                    group.attach(process.pid)
                process.stdin.write(b"\n")
                process.stdout.read(1)
                ready = time.perf_counter()
                process.stdin.close()
    finally:
        for descriptor in filters:
            os.close(descriptor)
        if group is not None:
            group.remove()
    return (ready - began) * 1e3, (time.perf_counter() - ready) * 1e3


def _bubblewrap_arguments(spec: ContainerSpec, exchange: Path) -> list[str]:
    """The same view as a sandbox has, from bubblewrap alone."""
    arguments: list[str] = []
    for name in SYSTEM_DIRECTORIES:
        host = Path("/") / name
        if host.is_symlink():
            arguments += ["--symlink", str(host.readlink()), str(host)]
        elif host.is_dir():
            arguments += ["--overlay-src", str(host), "--tmp-overlay", str(host)]
    arguments += ["--overlay-src", "/etc", "--tmp-overlay", "/etc", "--dev", "/dev"]
    arguments += ["--size", str(spec.disk_limit), "--tmpfs", spec.workdir, "--dir", "/tmp", "--dir", spec.home]
    arguments += common_arguments(spec, exchange)
    arguments += [word for name, value in sandbox_environment(spec).items() for word in ("--setenv", name, value)]
    return [*arguments, "--remount-ro", "/dev"]
