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
"""Time limit for an answer, in seconds. An engine answers at once unless its event loop is blocked."""


@dataclass(frozen=True)
class LiveRun:
    """An engine with instances, found by its ledger.

    Attributes:
        pid: its process.
        machine: the machine of its process.
        command: its command line; empty if not visible here.
        age_seconds: the age of its process; None if not visible here.
        dead: whether its process is certainly gone, so that its instances are orphans.
        started: the instances that were started and not removed, according to its ledger.
        snapshot: the state that it reports; None if there is no answer.
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
        """Return the run as a JSON-able mapping. ``started`` is left out if there is a snapshot."""
        shown = asdict(self)
        del shown["snapshot"], shown["started"]
        if self.snapshot is not None:
            return shown | self.snapshot.to_json()
        return shown | {"started": [asdict(entry) for entry in self.started]}


async def find_runs(directory: Path | None = None) -> list[LiveRun]:
    """Return every engine with instances, live or dead, the oldest process first.

    Args:
        directory: the state directory; by default the user's.
    """
    paths = [path for state in state_directories(directory) for path in ledger.find_ledgers(state)]
    found = await asyncio.gather(*(_run(path) for path in paths))
    return sorted((run for run in found if run is not None), key=lambda run: -(run.age_seconds or 0))


async def _run(path: Path) -> LiveRun | None:
    try:
        owner, entries = ledger.read_ledger(path)
    except OSError:  # it has just ended
        return None
    if owner is None:
        return None
    if owner.is_dead():
        left = [entry for entry in entries if entry.reap is not None]  # the others ended with the process
        return _live_run(owner, left, None, "its process is dead") if left else None
    if path.name.startswith(CLEANUP_RECORD_PREFIX):  # short-lived, and not an engine
        return None
    snapshot, reason = None, ""
    try:
        snapshot = await _query(socket_path(path))
    except TimeoutError:
        reason = (
            f"no answer within {QUERY_TIMEOUT_S:g} s: its event loop is blocked, or too many clients connect at once"
        )
    except OSError as error:
        reason = f"its socket cannot be reached: {error.strerror or error}"
    except json.JSONDecodeError:
        reason = "its answer is incomplete: it is ending, or too many clients connect at once"
    except (ValueError, KeyError, TypeError):
        reason = "it runs another version of AgentFly"
    if not await run_in_thread(path.exists):  # it has ended in the meantime
        return None
    return _live_run(owner, entries, snapshot, reason)


async def _query(path: Path) -> EngineSnapshot:
    """Return the snapshot that an engine serves.

    Raises:
        TimeoutError: it does not answer.
        OSError: no engine listens.
        ValueError, KeyError, TypeError: the answer cannot be read.
    """
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        with short_path(path) as address, _as_timeout():
            client.connect(address)
        answer = bytearray()
        async with asyncio.timeout(QUERY_TIMEOUT_S):
            while chunk := await loop.sock_recv(client, 2**20):
                answer += chunk
    return EngineSnapshot.from_json(bytes(answer))


@contextlib.contextmanager
def _as_timeout() -> Iterator[None]:
    try:
        yield
    except BlockingIOError as error:  # its queue of waiting clients is full
        raise TimeoutError from error


def _live_run(
    owner: ProcessIdentity, entries: Sequence[LedgerEntry], snapshot: EngineSnapshot | None, reason: str
) -> LiveRun:
    dead, here = owner.is_dead(), ProcessIdentity.current()
    visible = not dead and (owner.machine, owner.namespace) == (here.machine, here.namespace)
    return LiveRun(
        pid=owner.pid,
        machine=owner.machine,
        command=command_line(owner.pid) if visible else "",
        age_seconds=age_seconds(owner.started) if visible else None,
        dead=dead,
        started=tuple(entries),
        snapshot=snapshot,
        no_answer_reason=reason,
    )
