"""What a sandbox costs beside the bare program: cold start, a command in the session, reset and release."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

from agentfly import interruption
from agentfly.resources.cgroups import Cgroup, cgroup_home
from agentfly.resources.containers.bubblewrap.launcher import filter_arguments, memory_file
from agentfly.resources.containers.bubblewrap.layout import SYSTEM, common_arguments
from agentfly.resources.containers.bubblewrap.seccomp import filter_program
from agentfly.resources.containers.bubblewrap.tiers import probe
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec

_SPEC = ContainerSpec(memory="256MiB", pids=64, cpus=1)


def measure_sandboxes(rounds: int = 30, commands: int = 200) -> dict[str, Any]:
    """Start, use, reset and release sandboxes, each beside the bare program doing the same, in turns.

    Args:
        rounds: how many sandboxes of each kind.
        commands: how many commands in a session.

    Returns:
        Medians in milliseconds, and ratios to the bare program. ``cold_start`` is from the launch to the first reply of
        the shell; the bare one is ``bwrap`` with the same namespaces, an overlay of the same directories, the same
        private file systems, limits and filter of system calls. ``session_run`` is the command ``true``; the bare one
        is a line written to a bash on a pipe, and its reply read.

    Raises:
        PrerequisiteError: sandboxes cannot be started on this machine.
    """
    return interruption.run(_measure(rounds, commands))


async def _measure(rounds: int, commands: int) -> dict[str, Any]:
    found = probe()
    spec = _SPEC if found.cpus else ContainerSpec(memory="256MiB", pids=64)
    found.check(spec)
    times: dict[str, list[float]] = {}

    async def timed(name: str, call: Callable[[], Awaitable[Any]]) -> None:
        before = time.perf_counter()
        await call()
        times.setdefault(name, []).append((time.perf_counter() - before) * 1e3)

    for number in range(rounds):
        box = Container(spec, f"bench-{os.getpid()}-{number}")
        try:
            await timed("cold_start", box.start)
            await timed("reset", box.reset)
            await timed("release", box.release)
        finally:
            await box.release()  # a second time where all went well, which is nothing
        times.setdefault("bare_cold_start", []).append(_bare_start(spec, found.program, number))
    async with _Session(spec) as session:
        for _ in range(commands):
            await timed("session_run", lambda: session.box.run("true"))
            times.setdefault("bare_session_run", []).append(session.bare())
            await timed("process_run", lambda: session.box.run("true", new_process=True))
    result: dict[str, Any] = {"tier": str(found.tier), "limits": found.memory, "rounds": rounds}
    result |= {f"{name}_ms": round(median(values), 3) for name, values in times.items()}
    for name in ("cold_start", "session_run"):
        result[f"{name}_ratio"] = round(median(times[name]) / median(times[f"bare_{name}"]), 3)
    return result


class _Session:
    """A sandbox, and a bash on a pipe."""

    def __init__(self, spec: ContainerSpec) -> None:
        self.box = Container(spec, f"bench-{os.getpid()}-session")
        self._bash = subprocess.Popen(
            ["/bin/bash", "--norc", "--noprofile"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    async def __aenter__(self) -> _Session:
        try:
            await self.box.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._bash.kill()
        self._bash.communicate()
        await self.box.release()

    def bare(self) -> float:
        """Milliseconds of one line to the bash on a pipe and its reply."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        before = time.perf_counter()
        self._bash.stdin.write(b"true; echo $?\n")
        self._bash.stdout.read(16)
        return (time.perf_counter() - before) * 1e3


def _bare_start(spec: ContainerSpec, program: str, number: int) -> float:
    """Milliseconds from the launch of a bare ``bwrap`` to the first reply of a shell in it."""
    home = cgroup_home()
    filters: tuple[int, ...] = ()
    group: Cgroup | None = home.cgroup(f"agentfly-bare-{os.getpid()}-{number}", cpus=spec.cpus) if home else None
    try:
        with tempfile.TemporaryDirectory() as directory:
            arguments = _bare_arguments(spec, Path(directory))
            before = time.perf_counter()
            program_of_filter = filter_program(platform.machine())
            filters = (memory_file(program_of_filter),) if program_of_filter else ()
            command = [program, *filter_arguments(filters), *arguments, "--", "/bin/bash", "--norc", "--noprofile"]
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
                took = (time.perf_counter() - before) * 1e3
                process.stdin.close()
    finally:
        for descriptor in filters:
            os.close(descriptor)
        if group is not None:
            group.remove()
    return took


def _bare_arguments(spec: ContainerSpec, exchange: Path) -> list[str]:
    """The same view as a sandbox has, from bubblewrap alone."""
    arguments: list[str] = []
    for name in SYSTEM:
        host = Path("/") / name
        if host.is_symlink():
            arguments += ["--symlink", str(host.readlink()), str(host)]
        elif host.is_dir():
            arguments += ["--overlay-src", str(host), "--tmp-overlay", str(host)]
    arguments += ["--overlay-src", "/etc", "--tmp-overlay", "/etc", "--dev", "/dev"]
    arguments += ["--size", str(spec.disk_limit), "--tmpfs", spec.workdir, "--dir", "/tmp", "--dir", spec.home]
    return [*arguments, *common_arguments(spec, exchange), "--remount-ro", "/dev"]
