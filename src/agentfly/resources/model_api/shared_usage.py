"""SharedUsage: the usage record of one endpoint, shared by all processes of this host.

It is a small file in the state directory, which every process reads and replaces for every call. Its entries expire by
themselves if a process dies. If the disk fails, or a stopped process holds the lock, no call fails: this process then
counts for itself and logs a warning. Waiting processes are woken through sockets; a lost wake-up costs one poll
interval.
"""

from __future__ import annotations

import asyncio
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

from agentfly.core import user_directories
from agentfly.core.errors import PrerequisiteError
from agentfly.core.shared_file import FileLocked, lock_file, remove_stale_files
from agentfly.resources.credentials import Credentials
from agentfly.resources.model_api.usage_window import UsageWindow
from agentfly.resources.process.procfs import ProcessIdentity


@contextlib.contextmanager
def wakeups(name: str, heard: Callable[[], None]) -> Iterator[None]:
    """Have ``heard`` called in the running loop for each `wake` of ``name`` while the block runs."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        bell.setblocking(False)

        def answer() -> None:
            with contextlib.suppress(BlockingIOError):
                while True:
                    bell.recv(1)
                    heard()

        try:
            bell.bind(_address(name))
            loop.add_reader(bell, answer)
        except (OSError, NotImplementedError):  # a system without such addresses, or a loop without readers
            yield
            return
        try:
            yield
        finally:
            loop.remove_reader(bell)


def wake(name: str) -> None:
    """Wake the listeners of a name, if there are any."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        bell.setblocking(False)
        bell.sendto(b".", _address(name))


def _address(name: str) -> str:
    return f"\0agentfly/{name}"  # an abstract socket (unix(7)), which needs no removal


logger = logging.getLogger(__name__)

T = TypeVar("T")

LOCK_TIMEOUT_S = 2.0
"""Seconds for which the lock, which is held for a fraction of a millisecond, may be found held."""


STALE_FILE_S = 24 * 3600.0
"""Age in seconds after which the file of an unused endpoint is removed. Its records expired long before."""

NOT_SHARED = (
    "The limits of a model API are kept by this process for itself, and not together with the others of the machine"
)


class UsageListener(Protocol):
    """Is notified when any thread of this process changes the usage."""

    @property
    def limiter_id(self) -> str:
        """Its name in the usage window."""

    def changed(self) -> None:
        """The traffic was changed."""


class SharedUsage:
    """The traffic of one endpoint, model and key on this host. It may be used from any thread.

    Args:
        path: the file; None keeps the usage within this process.
        boot: which boot of the machine the times in the file are of.
    """

    def __init__(self, path: Path | None, boot: str) -> None:
        self._path = path
        self._boot = boot
        self._traffic = UsageWindow()
        self._lock = threading.Lock()
        self._left: list[Callable[[UsageWindow], object]] = []
        self._busy_since: float | None = None
        self._listeners: weakref.WeakSet[UsageListener] = weakref.WeakSet()

    def change(self, function: Callable[[UsageWindow], T]) -> T:
        """Apply ``function`` to the usage, which it may change, and return its result.

        Raises:
            FileLocked: another process holds the file. Nothing was done.
        """
        with self._lock:
            if (path := self._path) is None:
                return self._apply(function)
            with contextlib.ExitStack() as stack:
                try:
                    file = stack.enter_context(lock_file(path))
                    self._read(file.read())
                except FileLocked:
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
    def last_read(self) -> UsageWindow:
        """The traffic as it was when it was read last."""
        return self._traffic

    def leave(self, function: Callable[[UsageWindow], object]) -> None:
        """Apply a change at the next `change` of any caller, or at the next `catch_up`."""
        with self._lock:
            self._left.append(function)

    def catch_up(self) -> bool:
        """Apply the pending changes. Return False if another process has locked the file."""
        try:
            self.change(lambda traffic: None)
        except FileLocked:
            return False
        self.tell()
        return True

    def listen(self, listener: UsageListener) -> None:
        """Notify ``listener`` of every change in this process, as long as it exists."""
        with self._lock:
            self._listeners.add(listener)

    def tell(self) -> None:
        """Notify the listeners, and the process of the next gate."""
        with self._lock:
            listeners = list(self._listeners)
            first = next(iter(self._traffic.line), None)
        for listener in listeners:
            listener.changed()
        if first is not None and not any(listener.limiter_id == first for listener in listeners):
            wake(first)

    def _apply(self, function: Callable[[UsageWindow], T]) -> T:
        while self._left:
            self._left.pop(0)(self._traffic)
        return function(self._traffic)

    def _read(self, data: bytes) -> None:
        try:
            saved = json.loads(data or "null") or {"boot": None}
            self._traffic = UsageWindow.from_json(saved["traffic"]) if saved["boot"] == self._boot else UsageWindow()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("%s is begun anew, because it is not what AgentFly writes: %r", self._path, error)
            self._traffic = UsageWindow()

    def _still_busy(self) -> None:
        """Wait no longer for a process that holds the file and does nothing, for instance because it was stopped."""
        now = time.monotonic()
        self._busy_since = self._busy_since or now
        if now - self._busy_since > LOCK_TIMEOUT_S:
            self._give_up(TimeoutError(f"another process has held it for {LOCK_TIMEOUT_S:g} s"))

    def _give_up(self, error: OSError) -> None:
        logger.warning(
            "%s (%s cannot be used: %s). Make room there, or set AGENTFLY_STATE_DIR.", NOT_SHARED, self._path, error
        )
        self._path = None


class HostUsageRegistry:
    """The accounts that are open in this process.

    The process has one, because the limits of a model API are independent of engines: two engines that called the
    same endpoint with the same key, each within its limits, would be above them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._salt = secrets.token_bytes(32)
        self._pid = os.getpid()
        self._accounts: weakref.WeakValueDictionary[tuple[str, ...], SharedUsage] = weakref.WeakValueDictionary()

    def account(self, base_url: str, model: str, credentials: Credentials) -> SharedUsage:
        """Return the usage of an endpoint, model and key. It remains the same object while it is in use.

        Call it on a thread: a new account looks for its file.
        """
        key = (base_url, model, credentials.fingerprint(self._salt))
        new: SharedUsage | None = None
        while True:
            with self._lock:
                if self._pid != os.getpid():  # a fork has copies of the objects and would treat them as shared
                    self._accounts.clear()
                    self._pid = os.getpid()
                if (account := self._accounts.get(key)) is None and new is not None:
                    account = self._accounts[key] = new
            if account is not None:
                return account
            new = SharedUsage(_path(base_url, model, credentials), ProcessIdentity.current().boot)


HOST_USAGE = HostUsageRegistry()
"""The one of this process."""


def _path(base_url: str, model: str, credentials: Credentials) -> Path | None:
    """Return an account's file; None if no directory is writable. The name neither reveals nor confirms the key."""
    named = Credentials({"base": base_url, "model": model, "host": socket.gethostname(), **credentials.headers()})
    reasons: list[str] = []
    for directory in _directories():
        try:
            path = directory / f"{named.fingerprint(_salt(directory))}.traffic"
            remove_stale_files(directory.glob("*.traffic"), STALE_FILE_S)
            return path
        except OSError as error:
            reasons.append(str(error))
    logger.warning(
        "%s (%s). Set AGENTFLY_STATE_DIR to a directory that can be written.", NOT_SHARED, "; ".join(reasons)
    )
    return None


def _directories() -> Iterator[Path]:
    """Yield the possible directories: one in the state directory, then one in a fallback directory."""
    with contextlib.suppress(PrerequisiteError):  # the user has no home
        yield user_directories.state_directory() / "apis"
    for spare in user_directories.fallback_state_directories():
        with contextlib.suppress(OSError):
            spare.mkdir(exist_ok=True, mode=0o700)
        if user_directories.is_own_directory(spare):
            yield spare / "apis"


def _salt(directory: Path) -> bytes:
    """Return random bytes that only this machine's users of the directory share."""
    path = directory / "salt"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        draft = directory / f"salt.{secrets.token_hex(8)}"
        draft.touch(mode=0o600)
        draft.write_bytes(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # atomic: readers see the whole file or none
        draft.unlink()
    return path.read_bytes()
