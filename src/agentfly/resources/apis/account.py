"""Account: where the traffic of an endpoint is kept, so that everybody on this host counts on the same.

It is a small file in the state directory, which every process reads and replaces for every call, and all that is in it
expires by itself, whoever dies. A disk that refuses, or a process that was stopped while it held the file, costs no
call: this process then counts for itself, and says so.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from agentfly.errors import PrerequisiteError
from agentfly.resources.apis.bell import ring
from agentfly.resources.apis.traffic import Traffic
from agentfly.resources.credentials import Credentials
from agentfly.resources.identity import ProcessIdentity
from agentfly.resources.ledger import spare_directories, state_directories, state_directory
from agentfly.resources.shared_file import Busy, hold, remove_unused

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOCK_PATIENCE_S = 2.0
"""Seconds for which the lock, which is held for a fraction of a millisecond, may be found held."""


FORGOTTEN_S = 24 * 3600.0
"""Seconds after which the file of an endpoint is removed that nobody has called; what was in it expired long before."""

ALONE = "The limits of a model API are kept by this process for itself, and not together with the others of the machine"


class Listener(Protocol):
    """Who wants to know when somebody of this process has changed the traffic, in whatever thread."""

    @property
    def gate(self) -> str:
        """The name by which the traffic knows it."""

    def changed(self) -> None:
        """The traffic was changed."""


class Account:
    """The traffic of one endpoint, model and key on this host. It may be used from any thread.

    Args:
        path: the file; None keeps the account within this process.
        boot: which boot of the machine the times in the file are of.
    """

    def __init__(self, path: Path | None, boot: str) -> None:
        self._path = path
        self._boot = boot
        self._traffic = Traffic()
        self._lock = threading.Lock()
        self._left: list[Callable[[Traffic], object]] = []
        self._busy_since: float | None = None
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()

    def change(self, function: Callable[[Traffic], T]) -> T:
        """What ``function`` makes of the traffic, which it may change.

        Raises:
            Busy: another process has the file just now. Nothing was done.
        """
        with self._lock:
            if (path := self._path) is None:
                return self._apply(function)
            with contextlib.ExitStack() as stack:
                try:
                    file = stack.enter_context(hold(path))
                    self._read(file.read())
                except Busy:
                    self._still_busy()
                    raise
                except OSError as error:
                    self._give_up(error)
                    return self._apply(function)
                self._busy_since = None
                result = self._apply(function)
                try:
                    file.write(json.dumps({"boot": self._boot, "traffic": self._traffic.to_json()}).encode())
                except OSError as error:
                    self._give_up(error)
                return result

    @property
    def last_read(self) -> Traffic:
        """The traffic as it was when it was read last."""
        return self._traffic

    def leave(self, function: Callable[[Traffic], object]) -> None:
        """Have the traffic changed at the next `change`, which anybody may make, or at the next `catch_up`."""
        with self._lock:
            self._left.append(function)

    def catch_up(self) -> bool:
        """Change what was left to be changed; False if the file is not free for it."""
        try:
            self.change(lambda traffic: None)
        except Busy:
            return False
        self.tell()
        return True

    def listen(self, listener: Listener) -> None:
        """Tell ``listener`` whenever somebody of this process has changed the traffic, for as long as it is there."""
        with self._lock:
            self._listeners.add(listener)

    def tell(self) -> None:
        """Tell the listeners, and whose turn it is in another process."""
        with self._lock:
            listeners = list(self._listeners)
            first = next(iter(self._traffic.line), None)
        for listener in listeners:
            listener.changed()
        if first is not None and not any(listener.gate == first for listener in listeners):
            ring(first)

    def _apply(self, function: Callable[[Traffic], T]) -> T:
        while self._left:
            self._left.pop(0)(self._traffic)
        return function(self._traffic)

    def _read(self, data: bytes) -> None:
        try:
            saved = json.loads(data or "null") or {"boot": None}
            self._traffic = Traffic.from_json(saved["traffic"]) if saved["boot"] == self._boot else Traffic()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("%s is begun anew, because it is not what AgentFly writes: %r", self._path, error)
            self._traffic = Traffic()

    def _still_busy(self) -> None:
        """Wait no longer for a process that holds the file and does nothing, for instance because it was stopped."""
        now = time.monotonic()
        self._busy_since = self._busy_since or now
        if now - self._busy_since > LOCK_PATIENCE_S:
            self._give_up(TimeoutError(f"another process has held it for {LOCK_PATIENCE_S:g} s"))

    def _give_up(self, error: OSError) -> None:
        logger.warning(
            "%s (%s cannot be used: %s). Make room there, or set AGENTFLY_STATE_DIR.", ALONE, self._path, error
        )
        self._path = None


class Host:
    """The accounts that are open in this process.

    There is one for the process, because what limits a model API knows nothing of engines: two of them that called the
    same endpoint with the same key, each within its limits, would be above them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._salt = secrets.token_bytes(32)
        self._pid = os.getpid()
        self._accounts: weakref.WeakValueDictionary[tuple[str, ...], Account] = weakref.WeakValueDictionary()

    def account(self, base_url: str, model: str, credentials: Credentials) -> Account:
        """The account of an endpoint, model and key. It stays the same one as long as somebody has it.

        It is asked for on a thread, because the file of a new one is looked for.
        """
        key = (base_url, model, credentials.fingerprint(self._salt))
        new: Account | None = None
        while True:
            with self._lock:
                if self._pid != os.getpid():  # a fork has copies of the accounts, and would take them for shared
                    self._accounts.clear()
                    self._pid = os.getpid()
                if (account := self._accounts.get(key)) is None and new is not None:
                    account = self._accounts[key] = new
            if account is not None:
                return account
            new = Account(_path(base_url, model, credentials), ProcessIdentity.here().boot)


HOST = Host()
"""The one of this process."""


def _path(base_url: str, model: str, credentials: Credentials) -> Path | None:
    """The file of an account; None if no directory can be written. Its name tells nobody the key, nor confirms it."""
    named = Credentials({"base": base_url, "model": model, "host": socket.gethostname(), **credentials.headers()})
    reasons: list[str] = []
    for directory in _directories():
        try:
            path = directory / f"{named.fingerprint(_salt(directory))}.traffic"
            remove_unused(directory.glob("*.traffic"), FORGOTTEN_S)
            return path
        except OSError as error:
            reasons.append(str(error))
    logger.warning("%s (%s). Set AGENTFLY_STATE_DIR to a directory that can be written.", ALONE, "; ".join(reasons))
    return None


def _directories() -> Iterator[Path]:
    """Where accounts may lie, in order: in the state directory, and otherwise in a spare one of the user's own."""
    with contextlib.suppress(PrerequisiteError):  # the user has no home
        yield state_directory() / "apis"
    for spare in spare_directories():
        with contextlib.suppress(OSError):
            spare.mkdir(exist_ok=True, mode=0o700)
        if spare in state_directories(spare.parent):
            yield spare / "apis"


def _salt(directory: Path) -> bytes:
    """Random bytes that this machine's users of the directory have in common, and nobody else has."""
    path = directory / "salt"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        draft = directory / f"salt.{secrets.token_hex(8)}"
        draft.touch(mode=0o600)
        draft.write_bytes(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # whole, or not there
        draft.unlink()
    return path.read_bytes()
