"""Ledger: a file that records what this process starts, before the start.

Each engine has its own file in the state directory. The first line identifies the process. Each further line records an
instance that is about to start, with its traces, or an instance that was removed. Lines are written immediately, so
that they survive the process. `sync` flushes them to disk, so that they survive a power failure. Only the last line can
be truncated by the end of the process. Its operation then never began.

A `CleanupRecord` is an entry with its own ledger, for temporary things that belong to no engine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from agentfly.core import user_directories
from agentfly.core.errors import PrerequisiteError, UsageError
from agentfly.core.files import atomic_write
from agentfly.core.tree_removal import remove_tree
from agentfly.resources.process.procfs import ProcessIdentity

logger = logging.getLogger(__name__)

CLEANUP_RECORD_PREFIX = "record-"
"""Prefix of the names of ledgers that belong to no engine."""

COMPACT_AFTER_LINES = 10_000
"""Number of lines about removed instances after which a ledger is rewritten without them."""


@dataclass(frozen=True)
class LedgerEntry:
    """An instance that a process has started, or was about to start.

    Attributes:
        instance: its name.
        kind: the name of its kind.
        reap: the address of the function that removes it by its traces; None when nothing outlives the process.
        traces: the argument of that function.
        started: when it was recorded, in seconds since the epoch.
        failed_days: the days, as numbers since the epoch, on which its removal failed because its host did not answer
            or its kind is unknown. Days are counted, not hours, so that a jump of the clock does not give it up.
    """

    instance: str
    kind: str
    reap: str | None
    traces: Mapping[str, Any] = field(default_factory=dict)
    started: float = 0.0
    failed_days: tuple[int, ...] = ()


_ENTRY_FIELDS = frozenset(field.name for field in fields(LedgerEntry))


def list_files(directory: Path) -> list[Path]:
    """Return the files of a state directory, sorted by name.

    For a directory that this user may not read, return nothing and warn: nothing is recorded there now, but something
    may have been.
    """
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        logger.warning(
            "%s cannot be looked through for what processes have started (%s). Make it readable, or set "
            "AGENTFLY_STATE_DIR to a directory that is.",
            directory,
            error.strerror,
        )
        return []


def find_ledgers(directory: Path) -> list[Path]:
    """Return the ledgers in a state directory."""
    return [path for path in list_files(directory) if path.suffix == ".ledger"]


class Ledger:
    """The file of one engine. The first entry creates it. `close` removes it if it has no entries left.

    Where the state directory cannot be written, from the start or later on, the ledger moves to a spare one, with a
    warning: nothing is ever started that is not written down.

    Attributes:
        path: the file; None before there is one.
    """

    def __init__(self, directory: Path, prefix: str = "") -> None:
        self._directory = directory
        self._prefix = prefix
        self.path: Path | None = None
        self._file = -1
        self._entries: dict[str, LedgerEntry] = {}
        self._lines = 0

    def write(self, entry: LedgerEntry) -> None:
        """An instance is about to start; or it has started, and its traces are known in full.

        Raises:
            PrerequisiteError: the ledger cannot be written, so that nothing may be started.
            UsageError: the traces are not JSON-able.
        """
        line = _line(entry)
        before = self._entries.get(entry.instance)
        self._entries[entry.instance] = entry
        try:
            self._append_or_move(line)
        except OSError as error:
            if before is None:
                del self._entries[entry.instance]
            raise PrerequisiteError(
                f"What is started must be written down first, and {self._directory} cannot be written: {error}. Make "
                "room there, or set AGENTFLY_STATE_DIR to a directory that can be written."
            ) from error

    def remove(self, instance: str) -> None:
        """An instance has been removed."""
        if self._entries.pop(instance, None) is None:
            return
        try:
            self._append_or_move(json.dumps({"gone": instance}))
        except OSError as error:  # a later process will find nothing to remove, which does no harm
            logger.warning("The ledger still lists %s, which is gone: %s", instance, error)

    def sync(self) -> None:
        """Flush the file to disk. This may be called on another thread."""
        if (file := self._file) >= 0:
            with contextlib.suppress(OSError):  # it was closed in the meantime
                os.fdatasync(file)

    def close(self) -> None:
        """Close the file. A later process removes the instances that are still in it, once this process is dead."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self.path is not None and not self._entries:
            self.path.unlink(missing_ok=True)
            self.path = None

    def _append_or_move(self, line: str) -> None:
        """Append a line about an entry, in a fallback directory if this one is not writable.

        Raises:
            OSError: it can be nowhere.
        """
        try:
            if self.path is None or self._lines > COMPACT_AFTER_LINES + 4 * len(self._entries):
                self._rewrite()
            else:
                self._append(line)
        except OSError as error:
            self._move_to_fallback(error)

    def _move_to_fallback(self, reason: OSError) -> None:
        """Continue in the first fallback directory that is writable.

        Raises:
            OSError: none is writable; this is ``reason``.
        """
        here = (self._directory, self.path)
        for directory in user_directories.fallback_state_directories():
            self._directory, self.path = directory, None
            with contextlib.suppress(OSError):
                directory.mkdir(exist_ok=True, mode=0o700)
                if user_directories.is_own_directory(directory):
                    self._rewrite()
                    break
        else:
            self._directory, self.path = here
            raise reason
        logger.log(
            logging.DEBUG if self._prefix == CLEANUP_RECORD_PREFIX else logging.WARNING,  # an engine logs this itself
            "%s cannot be written (%s). What is started is written down in %s instead, where `agentfly resources reap` "
            "looks too.",
            here[0],
            reason,
            directory,
        )
        if here[1] is not None:
            with contextlib.suppress(
                OSError
            ):  # if it stays, a reaper finds instances that are gone, which does no harm
                here[1].unlink()

    def _rewrite(self) -> None:
        """Rewrite the ledger atomically."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        header = json.dumps({"ledger": 1, "process": asdict(ProcessIdentity.current())})
        lines = [header, *(_line(entry) for entry in self._entries.values())]
        path = self.path or self._directory / f"{self._prefix}{os.getpid()}-{uuid.uuid4().hex[:12]}.ledger"
        draft = path.with_suffix(".draft")
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(file, "\n".join(lines))
            draft.replace(path)
        except OSError:
            os.close(file)
            draft.unlink(missing_ok=True)
            raise
        if self._file >= 0:
            os.close(self._file)
        self.path, self._file, self._lines = path, file, len(lines)

    def _append(self, line: str) -> None:
        _write_all(self._file, f"\n{line}")  # the line break comes first, so that a truncated line damages no other
        self._lines += 1


def read_ledger(path: Path) -> tuple[ProcessIdentity | None, list[LedgerEntry]]:
    """Return a ledger's process, None if it is no ledger, and its entries that are not known to be gone."""
    owner: ProcessIdentity | None = None
    entries: dict[str, LedgerEntry] = {}
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue  # truncated by the end of its process, or by a full disk
        try:
            if "ledger" in line:
                owner = ProcessIdentity(**line["process"])
            elif "gone" in line:
                entries.pop(line["gone"], None)
            else:
                saved = {name: value for name, value in line["entry"].items() if name in _ENTRY_FIELDS}
                entry = LedgerEntry(**{**saved, "failed_days": tuple(saved.get("failed_days", ()))})
                entries[entry.instance] = entry
        except (KeyError, TypeError, AttributeError):
            return None, []
    return owner, list(entries.values())


def rewrite_ledger(path: Path, owner: ProcessIdentity, entries: list[LedgerEntry]) -> None:
    """Replace a dead process's ledger by what could not be removed of it, or remove it if there is nothing."""
    if not entries:
        path.unlink(missing_ok=True)
        return
    lines = [json.dumps({"ledger": 1, "process": asdict(owner)}), *(_line(entry) for entry in entries)]
    with atomic_write(path, mode=0o600) as file:
        file.write("\n".join(lines).encode())


def _line(entry: LedgerEntry) -> str:
    try:
        return json.dumps({"entry": asdict(entry)})
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"The traces of {entry.instance} go to a file and must be JSON-able, but {entry.traces!r} is not: {error}. "
            "Give texts and numbers for paths and process ids."
        ) from error


def _write_all(file: int, text: str) -> None:
    data = text.encode()
    while data:
        data = data[os.write(file, data) :]


REMOVE_DIRECTORY = "agentfly.resources.process.ledger:remove_directory"
"""The address of the function that removes a directory, by ``{"directory": path}``."""


class CleanupRecord:
    """An entry with its own ledger, for things outside an engine that would outlive this process.

    Examples are probes of the machine, half-unpacked images, and files for other processes. Create the record before
    the thing, and close it when the thing is gone. If the process dies in between, the next engine or ``agentfly
    resources reap`` removes the rest.

    If no ledger can be written, the record does nothing, so that a probe of the machine (``agentfly doctor``) never
    fails for that reason. An engine cannot start anything there either.
    """

    def __init__(self, kind: str, reap: str, traces: Mapping[str, Any]) -> None:
        """Write it down.

        Args:
            kind: a name for listings.
            reap: the address of the function that removes it by its traces, as for `LedgerEntry`.
            traces: the argument of that function; JSON-able.
        """
        self._instance = f"{kind}-{uuid.uuid4().hex[:8]}"
        self._ledger: Ledger | None = Ledger(_directory(), CLEANUP_RECORD_PREFIX)
        try:
            self._ledger.write(LedgerEntry(self._instance, kind, reap, traces, time.time()))
        except PrerequisiteError as error:
            logger.debug("%s is not written down: %s", self._instance, error)
            self._ledger = None

    def close(self) -> None:
        """Forget it: it is gone. Safe to call again."""
        if self._ledger is not None:
            self._ledger.remove(self._instance)
            self._ledger.close()
            self._ledger = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_directory(traces: dict[str, Any]) -> None:
    """Remove a directory with its content. Do nothing if it does not exist.

    Raises:
        OSError: something of it cannot be removed.
    """
    remove_tree(traces["directory"])


def _directory() -> Path:
    with contextlib.suppress(PrerequisiteError):
        return user_directories.state_directory()
    spare = user_directories.fallback_state_directories()[0]
    with contextlib.suppress(OSError):
        spare.mkdir(mode=0o700, exist_ok=True)
    return spare
