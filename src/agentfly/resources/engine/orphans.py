"""Orphans: instances that dead processes have left behind, and their removal."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentfly.core.errors import ResourceUnreachable, describe_error, error_message
from agentfly.core.files import is_same_file, try_lock
from agentfly.core.threads.pool import run_in_thread
from agentfly.core.user_directories import state_directories
from agentfly.resources.engine.status_socket import socket_path
from agentfly.resources.kind import ReapFunction, import_object
from agentfly.resources.process import ledger
from agentfly.resources.process.ledger import LedgerEntry

logger = logging.getLogger(__name__)

REAP_TIMEOUT_S = 60.0
"""Time limit for the removal of one orphan, in seconds."""

STALE_DRAFT_S = 3600.0
"""Age in seconds after which an unfinished ledger is removed."""


UNREACHABLE_DAYS = 7
"""Number of days with failed attempts after which an orphan is given up, if its host does not answer."""

MAX_LOGGED_TRACES = 10
"""Maximum number of orphans whose traces are logged when they are given up."""


async def reap_orphans(directory: Path | None = None, *, repeat: bool = False) -> list[LedgerEntry]:
    """Remove the orphans of dead processes, and nothing of a process that may still live.

    An orphan that could not be removed is logged and stays in its ledger for the next attempt. An orphan whose removal
    fails with `agentfly.core.errors.ResourceUnreachable` is reported once. After `UNREACHABLE_DAYS` it is dropped with
    a report.

    Args:
        directory: the state directory; by default the user's (see `agentfly.core.user_directories.state_directory`).
        repeat: whether to report unreachable orphans again.

    Returns:
        The removed orphans.
    """
    removed: list[LedgerEntry] = []
    failed: list[tuple[LedgerEntry, Exception]] = []
    for state in state_directories(directory):
        for path in _finished_ledgers(ledger.list_files(state)):
            try:
                with _locked(path) as claimed:
                    if claimed:
                        removed += await _reap_ledger(path, failed)
            except OSError as error:  # for instance of another user; the other ledgers are still processed
                logger.warning("The ledger %s was skipped: %s", path, error)
    _log_failures([one for one in failed if not isinstance(one[1], ResourceUnreachable)])
    _log_unreachable([one for one in failed if isinstance(one[1], ResourceUnreachable)], repeat)
    return removed


def _log_failures(failed: list[tuple[LedgerEntry, Exception]]) -> None:
    """Log orphans that could not be removed, in one line per kind."""
    for kind in dict.fromkeys(entry.kind for entry, _ in failed):
        entry, error = next(one for one in failed if one[0].kind == kind)
        others = sum(one.kind == kind for one, _ in failed) - 1
        logger.warning(
            "The orphan %s (%s)%s could not be removed and will be tried again (%s); its traces are %s.",
            entry.instance,
            kind,
            f" and {others} more of its kind" if others else "",
            describe_error(error),
            entry.traces,
        )


def _log_unreachable(failed: list[tuple[LedgerEntry, Exception]], repeat: bool) -> None:
    """Log unreachable orphans: one line for those that are kept, and one for those that are given up."""
    given_up = [one for one in failed if _is_given_up(*one)]
    kept = [one for one in failed if not _is_given_up(*one)]
    if reported := [one for one in kept if repeat or not one[0].failed_days]:
        logger.warning(
            "%s could not be removed, because their host does not answer, or another version of AgentFly started them. "
            "Start the host, or use that version, and run `agentfly resources reap`. They are given up after tries on "
            "%d days. %s",
            _counted(reported),
            UNREACHABLE_DAYS,
            describe_error(reported[0][1]),
        )
    if given_up:
        traces = list(dict.fromkeys(str(dict(entry.traces)) for entry, _ in given_up))
        logger.warning(
            "%s were given up after tries on %d days, because their host did not answer or their kind is unknown. "
            "Remove them manually if they still exist. Their traces: %s%s",
            _counted(given_up),
            UNREACHABLE_DAYS,
            "; ".join(traces[:MAX_LOGGED_TRACES]),
            f"; and {len(traces) - MAX_LOGGED_TRACES} more" if len(traces) > MAX_LOGGED_TRACES else "",
        )


def _counted(failed: list[tuple[LedgerEntry, Exception]]) -> str:
    """Return the number of these orphans by kind, with the name of one."""
    kinds = Counter(entry.kind for entry, _ in failed)
    numbers = ", ".join(f"{kind}: {number}" for kind, number in kinds.items())
    return f"Orphans of dead processes ({numbers}; one of them is {failed[0][0].instance})"


async def run_reap(function: ReapFunction, traces: dict[str, Any]) -> None:
    """Call a kind's ``reap_orphans``, whether it is sync or async, within `REAP_TIMEOUT_S`.

    Raises:
        TimeoutError: it took too long.
        Exception: any exception of the function.
    """
    async with asyncio.timeout(REAP_TIMEOUT_S):
        if inspect.iscoroutinefunction(function):
            await function(traces)
        else:
            await run_in_thread(function, traces)


async def _reap_ledger(path: Path, failed: list[tuple[LedgerEntry, Exception]]) -> list[LedgerEntry]:
    owner, entries = ledger.read_ledger(path)
    if owner is None:
        logger.error("%s is not a ledger that this version can read. It was not changed; remove it manually.", path)
        return []
    if not owner.is_dead():
        return []
    # In-process resources have ended with their process, so there is nothing to remove.
    orphans = [entry for entry in entries if entry.reap is not None]
    outcomes = list(zip(orphans, await asyncio.gather(*map(_reap_entry, orphans)), strict=True))
    failures = [(entry, error) for entry, error in outcomes if error is not None]
    ledger.rewrite_ledger(path, owner, [_marked(*one) for one in failures if not _is_given_up(*one)])
    socket_path(path).unlink(missing_ok=True)
    failed += failures
    return [entry for entry, error in outcomes if error is None]


def _marked(entry: LedgerEntry, error: Exception) -> LedgerEntry:
    """Return the entry of an orphan that stays in its ledger, with the days on which its removal failed."""
    if not isinstance(error, ResourceUnreachable):
        return replace(entry, failed_days=())
    return replace(entry, failed_days=tuple(sorted({*entry.failed_days, int(time.time() // 86400)})))


def _is_given_up(entry: LedgerEntry, error: Exception) -> bool:
    """Return whether an orphan is given up, because its removal failed on `UNREACHABLE_DAYS` earlier days."""
    earlier = {*entry.failed_days} - {int(time.time() // 86400)}
    return isinstance(error, ResourceUnreachable) and len(earlier) >= UNREACHABLE_DAYS


async def _reap_entry(entry: LedgerEntry) -> Exception | None:
    """Remove an orphan. Return the error if it could not be removed."""
    try:
        reap = import_object(entry.reap or "")
    except Exception as error:  # of another version, or of a project that this process cannot import
        return ResourceUnreachable(f"What removes a {entry.kind} cannot be imported here: {error_message(error)}")
    try:
        await run_reap(reap, dict(entry.traces))
    except Exception as error:
        return error
    return None


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Lock a ledger, so that two reapers do not remove the same orphan. Yield whether it is locked."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        yield try_lock(file) and is_same_file(file, path)
    finally:
        os.close(file)


def _finished_ledgers(files: list[Path]) -> list[Path]:
    """Return the ledgers among some files. Old drafts, left by a power failure, are removed."""
    ledgers = []
    for path in files:
        if path.suffix != ".ledger" and not path.suffix.endswith(("draft", "unfinished")):
            continue
        with suppress(FileNotFoundError):
            about = path.stat()
            unfinished = path.suffix != ".ledger" or about.st_size == 0
            if unfinished and time.time() - about.st_mtime > STALE_DRAFT_S:
                path.unlink()
            elif path.suffix == ".ledger":
                ledgers.append(path)
    return ledgers
