"""Orphans: what dead processes have left behind, and its removal."""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from agentfly.errors import say
from agentfly.resources import ledger
from agentfly.resources.ledger import Entry, state_directories
from agentfly.resources.registry import Reap, load
from agentfly.resources.window import window_of
from agentfly.threads.pool import on_thread

logger = logging.getLogger(__name__)

REAP_TIMEOUT_S = 60.0
"""Seconds that the removal of one orphan may take."""

DRAFT_AGE_S = 3600.0
"""Seconds after which a ledger that was never finished will not be."""


async def reap(directory: Path | None = None) -> list[Entry]:
    """Remove the orphans of dead processes, and nothing of a process that may still live.

    Args:
        directory: the state directory; by default the user's (see `agentfly.resources.ledger.state_directory`).

    Returns:
        What was removed. What could not be removed is logged, and stays in its ledger for the next time.
    """
    removed: list[Entry] = []
    kept: list[tuple[Entry, Exception]] = []
    for place in state_directories(directory):
        for path in _without_drafts(ledger.files_in(place)):
            try:
                with _claimed(path) as claimed:
                    if claimed:
                        removed += await _reap_ledger(path, kept)
            except OSError as error:  # another user's, for instance, which is no reason to leave the others
                logger.warning("%s, which says what a process has started, was passed over: %s", path, error)
    _tell(kept)
    return removed


def _tell(kept: list[tuple[Entry, Exception]]) -> None:
    """Log what could not be removed: a line for each kind, however many there are of it."""
    for kind in dict.fromkeys(entry.kind for entry, _ in kept):
        entry, error = next(one for one in kept if one[0].kind == kind)
        others = sum(one.kind == kind for one, _ in kept) - 1
        logger.warning(
            "The orphan %s (%s)%s could not be removed and will be tried again (%s); its traces are %s.",
            entry.instance,
            kind,
            f" and {others} more of its kind" if others else "",
            say(error),
            entry.traces,
        )


async def remove(function: Reap, traces: dict[str, Any]) -> None:
    """Call a kind's ``reap``, whether it is sync or async, within `REAP_TIMEOUT_S`.

    Raises:
        Exception: what the function raises, or TimeoutError.
    """
    async with asyncio.timeout(REAP_TIMEOUT_S):
        if inspect.iscoroutinefunction(function):
            await function(traces)
        else:
            await on_thread(function, traces)


async def _reap_ledger(path: Path, kept: list[tuple[Entry, Exception]]) -> list[Entry]:
    owner, entries = ledger.read(path)
    if owner is None:
        logger.error("%s is not a ledger that this version can read. It was left alone; remove it by hand.", path)
        return []
    if not owner.is_dead():
        return []
    # In-process resources have ended with their process: there is nothing to remove.
    orphans = [entry for entry in entries if entry.reap is not None]
    failures = await asyncio.gather(*map(_reap_entry, orphans))
    remaining = [(entry, error) for entry, error in zip(orphans, failures, strict=True) if error is not None]
    ledger.write_remaining(path, owner, [entry for entry, _ in remaining])
    window_of(path).unlink(missing_ok=True)
    kept += remaining
    return [entry for entry, error in zip(orphans, failures, strict=True) if error is None]


async def _reap_entry(entry: Entry) -> Exception | None:
    """Remove an orphan; why it could not be removed."""
    try:
        await remove(load(entry.reap or ""), dict(entry.traces))
    except Exception as error:
        return error
    return None


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Have a ledger to oneself, so that two reapers do not remove the same orphan; False if another has it."""
    with ExitStack() as stack:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            claimed = os.fstat(file).st_ino == path.stat().st_ino  # else another has just replaced or removed it
        except (FileNotFoundError, BlockingIOError):
            claimed = False
        yield claimed


def _without_drafts(files: list[Path]) -> list[Path]:
    """The ledgers among some files. What was being made when the power went, and is old by now, is removed."""
    ledgers = []
    for path in files:
        if path.suffix != ".ledger" and not path.suffix.endswith("draft"):
            continue
        with suppress(FileNotFoundError):
            about = path.stat()
            unfinished = path.suffix != ".ledger" or about.st_size == 0
            if unfinished and time.time() - about.st_mtime > DRAFT_AGE_S:
                path.unlink()
            elif path.suffix == ".ledger":
                ledgers.append(path)
    return ledgers
