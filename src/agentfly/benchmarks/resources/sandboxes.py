"""Cost of a container against the bare program: starts, resets, removals, commands, files, and many at once.

`measure_backend` and `measure_many` take any spec, so every backend is measured in the same way. The caller passes the
equivalent operations of the backend's bare program.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from agentfly.benchmarks.resources.bare import BareShell, bare_bubblewrap, bare_process
from agentfly.core import signals
from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.engine.engine import ResourceEngine

BareStart = Callable[[ContainerSpec, int], tuple[float, float]]
"""Starts and ends the bare program of a backend, and returns the milliseconds of both. The argument is the round."""

BareSession = Callable[[], AbstractContextManager[BareShell]]
"""A bash of the backend's bare program, on pipes, for a block."""

Timed = Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[None]]

_USED_S = 0.1  # seconds of a container's use between two resets, in which backends may get ready for the next

# Adds up what the processes of a container take of memory, pages that several share counted in parts. It runs in the
# session, so that nothing is counted that is only there to count.
_MEMORY = """
taken=0
for file in /proc/[0-9]*/smaps_rollup; do
    while read -r name kib _; do [[ $name == Pss: ]] && ((taken += kib)); done <"$file"
done 2>/dev/null
echo $taken
"""


def measure_bubblewrap(*, rounds: int = 30, commands: int = 200, count: int = 64) -> dict[str, Any]:
    """Measure bubblewrap on the host's system directories, with the isolation that this machine supports.

    Args:
        rounds: number of containers.
        commands: number of commands in a session.
        count: number of containers alive at once.

    Returns:
        The result of `measure_backend`; under ``many`` the result of `measure_many`; ``tier`` and ``limits``.

    Raises:
        PrerequisiteError: sandboxes cannot be started on this machine.
    """
    found = probe()
    spec = ContainerSpec(memory="256MiB", pids=64, cpus=1 if found.cpus else 0, backend="bubblewrap")
    found.check(spec)
    measured = measure_backend(spec, bare_start=bare_bubblewrap, rounds=rounds, commands=commands)
    measured["many"] = measure_many(spec, count)
    return {"tier": str(found.tier), "limits": found.memory, **measured}


def measure_backend(
    spec: ContainerSpec,
    *,
    bare_start: BareStart | None = None,
    bare_shell: BareSession = BareShell,
    rounds: int = 30,
    commands: int = 200,
) -> dict[str, Any]:
    """Start, use, reset and release containers, alternately with the bare program that does the same.

    Args:
        spec: the container and its ``backend``.
        bare_start: starts the bare program of that backend.
        bare_shell: a bash on a pipe, to compare the sessions with; by default one on the host.
        rounds: number of containers.
        commands: number of commands in a session.

    Returns:
        Medians in milliseconds, and ratios of them to the bare ones. ``cold_start`` is from the launch to the first
        reply of the shell, ``reset`` is that of a container after a short use, ``warm_acquire`` the time for the engine
        to lease a ready one. ``session_run`` is the command
        ``true``, which bash has built in, a call of ``Container.run`` from begin to end; ``session_program`` is
        ``/bin/true``, a program, as most commands are. There are two bare ones of each: a line ``true; echo $?`` to a
        bash on a pipe and its reply, read by a program that does nothing else meanwhile (``bare_session_run``), and by
        an event loop (``looped_session_run``). ``process_run`` is ``true`` in a new process, compared with a bash that
        is started for it without a sandbox.

    Raises:
        PrerequisiteError: such containers cannot be started on this machine.
    """
    return signals.run_until_signal(_measure(spec, bare_start, bare_shell, rounds, commands))


def measure_many(spec: ContainerSpec, count: int = 64) -> dict[str, Any]:
    """Keep many containers alive at once, and start eight at a time, as an engine does.

    Returns:
        ``count``; ``start_s``, seconds until all were up; ``release_s``, until all were gone; ``idle_mib``, the memory
        of the processes inside an idle container (its proportional set size), as a median; ``machine_mib``, by how
        much the machine's available memory fell for each container, the kernel's part and that of the backend's own
        processes included. It is correct only on a quiet machine.

    Raises:
        PrerequisiteError: such containers cannot be started on this machine.
    """
    return signals.run_until_signal(_measure_many(spec, count))


async def _measure(
    spec: ContainerSpec, bare_start: BareStart | None, bare_shell: BareSession, rounds: int, commands: int
) -> dict[str, Any]:
    times: dict[str, list[float]] = {}

    async def timed(name: str, call: Callable[[], Awaitable[Any]]) -> None:
        before = time.perf_counter()
        await call()
        times.setdefault(name, []).append((time.perf_counter() - before) * 1e3)

    for number in range(rounds):
        await _live_once(Container(spec, f"bench-{os.getpid()}-{number}"), timed)
        if bare_start is not None:
            for name, took in zip(("bare_cold_start", "bare_release"), bare_start(spec, number), strict=True):
                times.setdefault(name, []).append(took)
    await _reset_often(Container(spec, f"bench-{os.getpid()}-reset"), rounds, timed)
    await _acquire_warm(spec, rounds, timed)
    box = Container(spec, f"bench-{os.getpid()}-session")
    try:
        await box.start()
        with bare_shell() as shell:
            await _run_commands(box, shell, commands, timed, times)
    finally:
        await box.release()
    result: dict[str, Any] = {"rounds": rounds}
    result |= {f"{name}_ms": round(median(values), 4) for name, values in times.items()}
    for name, bare in (
        ("cold_start", "bare_cold_start"),
        ("release", "bare_release"),
        ("session_run", "bare_session_run"),
        ("session_run", "looped_session_run"),
        ("session_program", "bare_session_program"),
        ("session_program", "looped_session_program"),
        ("process_run", "bare_process_run"),
    ):
        if bare in times:
            result[f"{name}_over_{bare}"] = round(median(times[name]) / median(times[bare]), 3)
    return result


async def _live_once(box: Container, timed: Timed) -> None:
    try:
        await timed("cold_start", box.start)
        await timed("release", box.release)
    finally:
        await box.release()  # a second time where all went well, which is nothing


async def _reset_often(box: Container, rounds: int, timed: Timed) -> None:
    try:
        await box.start()
        for _ in range(rounds):
            await timed("reset", box.reset)
            await asyncio.sleep(_USED_S)
    finally:
        await box.release()


async def _acquire_warm(spec: ContainerSpec, rounds: int, timed: Timed) -> None:
    """Acquire an idle container repeatedly. Each is reset in the background after its release."""
    one = replace(spec, capacity=1, warm=0)
    with tempfile.TemporaryDirectory() as directory:
        async with ResourceEngine(ledger=Path(directory)) as engine:
            await engine.release(await engine.acquire(one, "first"))
            for number in range(rounds):
                await _wait_until_idle(engine)
                await timed("warm_acquire", partial(engine.acquire, one, f"owner {number}"))
                await engine.release_owner(f"owner {number}")


async def _wait_until_idle(engine: ResourceEngine) -> None:
    """Wait until the only instance has been reset."""
    while True:
        states = [each.state for pool in engine.snapshot().pools for each in pool.instances]
        if states == ["idle"]:
            return
        await asyncio.sleep(0.002)


async def _run_commands(
    box: Container, shell: BareShell, commands: int, timed: Timed, times: dict[str, list[float]]
) -> None:
    """Alternate between the two sides, so that other load of the machine affects both."""
    for name, command in (("session_run", "true"), ("session_program", "/bin/true")):
        for _ in range(commands):
            times.setdefault(f"bare_{name}", []).append(shell.time_blocking(command))
            times.setdefault(f"looped_{name}", []).append(await shell.time_in_event_loop(command))
            await timed(name, partial(box.run, command))
    for _ in range(max(1, commands // 4)):
        times.setdefault("bare_process_run", []).append(bare_process())
        await timed("process_run", lambda: box.run("true", new_process=True))
        await timed("write_file", lambda: box.write_file("file", b"content"))
        await timed("read_file", lambda: box.read_file("file"))


async def _measure_many(spec: ContainerSpec, count: int) -> dict[str, Any]:
    boxes = [Container(spec, f"bench-{os.getpid()}-many-{number}") for number in range(count)]
    turns = asyncio.Semaphore(8)

    async def start(box: Container) -> None:
        async with turns:
            await box.start()

    available, began = _available_memory(), time.perf_counter()
    try:
        async with asyncio.TaskGroup() as starts:
            for box in boxes:
                starts.create_task(start(box))
        started = time.perf_counter() - began
        taken = available - _available_memory()
        idle = [int((await box.run(_MEMORY)).stdout) / 1024 for box in boxes]
    finally:
        before = time.perf_counter()
        await asyncio.gather(*(box.release() for box in boxes))
    return {
        "count": count,
        "start_s": round(started, 3),
        "release_s": round(time.perf_counter() - before, 3),
        "idle_mib": round(median(idle), 3),
        "machine_mib": round(taken / count / 2**20, 3),
    }


def _available_memory() -> int:
    """Return the available memory of this machine in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
