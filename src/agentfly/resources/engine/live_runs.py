"""Live runs on this machine, as their engines report them, and orphans that dead processes have left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentfly.core.threads.pool import run_in_thread
from agentfly.core.user_directories import state_directories
from agentfly.resources.engine.status import EngineSnapshot
from agentfly.resources.engine.status_socket import short_path, socket_path
from agentfly.resources.process import ledger
from agentfly.resources.process.ledger import CLEANUP_RECORD_PREFIX, LedgerEntry
from agentfly.resources.process.procfs import ProcessIdentity, age_seconds, command_line

QUERY_TIMEOUT_S = 2.0
"""Seconds that an engine has to answer; it does so at once unless something blocks its event loop."""


@dataclass(frozen=True)
class LiveRun:
    """An engine with instances, found by its ledger.

    Attributes:
        pid: its process.
        machine: the machine of its process.
        command: the command line, as far as it is visible here.
        age_seconds: the age of its process; None if not visible here.
        dead: whether its process is certainly gone, so that its instances are orphans.
        started: the instances that its ledger records as started and not removed.
        snapshot: its answer.
        no_answer_reason: why there is no answer; empty if there is one.
    """

    pid: int
    machine: str
    command: str
    age_seconds: float | None
    dead: bool
    started: tuple[LedgerEntry, ...]
    snapshot: EngineSnapshot | None
    no_answer_reason: str

    def to_json(self) -> dict[str, Any]:
        """The run as a JSON-able mapping; what it started is not repeated where there is a snapshot."""
        shown = asdict(self)
        del shown["snapshot"], shown["started"]
        if self.snapshot is not None:
            return shown | self.snapshot.to_json()
        return shown | {"started": [asdict(entry) for entry in self.started]}


async def find_runs(directory: Path | None = None) -> list[LiveRun]:
    """Every engine that has something started, live or dead; the oldest process first.

    Args:
        directory: the state directory; by default the user's.
    """
    paths = [path for place in state_directories(directory) for path in ledger.find_ledgers(place)]
    found = await asyncio.gather(*(_run(path) for path in paths))
    return sorted((run for run in found if run is not None), key=lambda run: -(run.age_seconds or 0))


async def _run(path: Path) -> LiveRun | None:
    try:
        owner, entries = ledger.read_ledger(path)
    except OSError:  # it has ended in this moment
        return None
    if owner is None:
        return None
    if owner.is_dead():
        left = [entry for entry in entries if entry.reap is not None]  # the others ended with their process
        return _described(owner, left, None, "its process is dead") if left else None
    if path.name.startswith(CLEANUP_RECORD_PREFIX):  # of something that no engine has, and that will be gone soon
        return None
    snapshot, silence = None, ""
    try:
        snapshot = await _admit(socket_path(path))
    except TimeoutError:
        silence = (
            f"it does not answer within {QUERY_TIMEOUT_S:g} s: something blocks its event loop, or many ask at once"
        )
    except OSError as error:
        silence = f"it cannot be asked: {error.strerror or error}"
    except json.JSONDecodeError:
        silence = "its answer broke off: it is ending, or many ask at once"
    except (ValueError, KeyError, TypeError):
        silence = "it is of another version of AgentFly"
    if not await run_in_thread(path.exists):  # it has ended meanwhile
        return None
    return _described(owner, entries, snapshot, silence)


async def _admit(window: Path) -> EngineSnapshot:
    """Return an engine's answer.

    Raises:
        TimeoutError: it does not answer.
        OSError: no engine listens.
        ValueError, KeyError, TypeError: the answer cannot be read.
    """
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        with short_path(window) as address, _as_timeout():
            asking.connect(address)
        answer = bytearray()
        async with asyncio.timeout(QUERY_TIMEOUT_S):
            while chunk := await loop.sock_recv(asking, 2**20):
                answer += chunk
    return EngineSnapshot.from_json(bytes(answer))


@contextlib.contextmanager
def _as_timeout() -> Iterator[None]:
    try:
        yield
    except BlockingIOError as error:  # so many wait for its answer already
        raise TimeoutError from error


def _described(
    owner: ProcessIdentity, entries: Sequence[LedgerEntry], snapshot: EngineSnapshot | None, silence: str
) -> LiveRun:
    dead, here = owner.is_dead(), ProcessIdentity.current()
    seen = not dead and (owner.machine, owner.namespace) == (here.machine, here.namespace)
    return LiveRun(
        pid=owner.pid,
        machine=owner.machine,
        command=command_line(owner.pid) if seen else "",
        age_seconds=age_seconds(owner.started) if seen else None,
        dead=dead,
        started=tuple(entries),
        snapshot=snapshot,
        no_answer_reason=silence,
    )
