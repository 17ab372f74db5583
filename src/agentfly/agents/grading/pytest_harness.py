"""The program that runs tests in a grading container: a supervisor, and a child process in which pytest runs.

It is copied into the container and run there by the container's own Python (3.8 or newer), so it imports nothing of
this package.

The supervisor reads its order from a file, which it removes at once. It starts the tests, reads their report from a
pipe, kills them at the time limit, and writes one line on its stdout. The line begins with the order's secret, so no
other printed text can be mistaken for it. The kernel lets no other process of the container's user read the memory of
either process.

The report is made in the test process, where the tested code runs, too. Each record is signed together with the
records before it. The key comes through a pipe. Code that searches its own process for the key can find it.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import hashlib
import hmac
import importlib
import json
import os
import pkgutil
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, Protocol

PR_SET_DUMPABLE = 4
MOST_REPORT = 16 * 2**20
MOST_OUTPUT = 8 * 2**10
MOST_REASON = 2000
CHUNK = 2**16
LAST_SECONDS = 1.0
"""In which what the tests wrote before their end is read."""

WATCHED = ("_pytest", "pluggy", "pytest", "unittest")
"""Packages whose functions must be at the end what they were at the beginning."""

REPLACED_AT_TIMES = frozenset({"_", "print", "input", "open", "__import__", "breakpoint", "exit", "quit", "help"})
"""Built-in functions that sound code replaces."""


class WriteRecord(Protocol):
    """Writes a record of the report."""

    def __call__(self, record: dict[str, Any]) -> None: ...


def forbid_ptrace() -> None:
    """Forbid other processes of this user to trace this process or read its memory."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


# --- the supervisor ---------------------------------------------------------------------------------------------------


def supervise(path: str) -> None:
    """Carry out the order in a file, which is removed before the tests start."""
    forbid_ptrace()
    with open(path, "rb") as file:  # noqa: PTH123
        order = json.loads(file.read())
    os.unlink(path)  # noqa: PTH108
    started = time.monotonic()
    tests = TestProcess(order)
    timed_out = tests.read_until(started + order["timeout_s"])
    tests.end()
    found = {
        "report": tests.report.decode("latin-1"),
        "output": tests.output[-MOST_OUTPUT:].decode("utf-8", errors="replace"),
        "timed_out": timed_out,
        "seconds": time.monotonic() - started,
    }
    sys.stdout.write(f"\n{order['secret']} {json.dumps(found)}\n")
    sys.stdout.flush()


class TestProcess:
    """The process that runs the tests, with its report and output.

    Attributes:
        report: data from its report pipe, up to a limit.
        output: the end of its printed output.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.report, self.output = bytearray(), bytearray()
        self._heard, spoken = os.pipe()
        printed, prints = os.pipe()
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-B", __file__, "tests", str(spoken)],
            stdin=subprocess.PIPE,
            stdout=prints,
            stderr=prints,
            cwd=order["root"],
            pass_fds=(spoken,),
            start_new_session=True,
        )
        os.close(spoken)
        os.close(prints)
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):  # it may have ended already, which its silence says
            self._child.stdin.write(json.dumps(order["tests"]).encode())
            self._child.stdin.close()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._heard, selectors.EVENT_READ)
        self._selector.register(printed, selectors.EVENT_READ)

    def read_until(self, deadline: float) -> bool:
        """Read from the tests until they end or exceed the limit of output. Return whether the deadline came first."""
        while self._child.poll() is None and len(self.report) <= MOST_REPORT:
            left = deadline - time.monotonic()
            if left <= 0:
                return True
            self._take(min(left, 0.1))
        return False

    def end(self) -> None:
        """Kill the remaining processes of the tests' session, and read their last output."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        last = time.monotonic() + LAST_SECONDS
        while self._take(0) and len(self.report) <= MOST_REPORT and time.monotonic() < last:
            pass

    def _take(self, seconds: float) -> bool:
        """Read from the pipes. Return whether there was anything."""
        found = False
        for key, _ in self._selector.select(seconds):
            chunk = os.read(key.fd, CHUNK)
            if not chunk:
                self._selector.unregister(key.fd)
            elif key.fd == self._heard:
                self.report += chunk
            else:
                self.output = (self.output + chunk)[-CHUNK:]
            found = found or bool(chunk)
        return found


# --- the tests --------------------------------------------------------------------------------------------------------


def run_tests(pipe: int) -> None:
    """Run the tests of the order on stdin, report them through the pipe, and end at once."""
    forbid_ptrace()
    os.set_inheritable(pipe, False)
    order = json.loads(sys.stdin.buffer.read())
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in [name for name in os.environ if name.startswith("PYTEST_ADDOPTS")]:
        del os.environ[name]
    sys.dont_write_bytecode = True
    sys.path += order["packages"]
    say = signed_record_writer(pipe, order.pop("key").encode())
    import pytest

    for package in ("_pytest", *order["plugins"]):
        import_all(package)
    before = snapshot_functions()
    sys.path[:0] = order["import_from"]
    reporter = PytestReporter(say, frozenset(order["names"]))
    code = pytest.main(order["arguments"], plugins=[reporter])
    say({"kind": "end", "code": int(code), "changed": tampered_functions(before)})
    os.close(pipe)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what was registered to run at the end does not


def signed_record_writer(pipe: int, key: bytes) -> WriteRecord:
    """Return a function that writes records into a pipe. Each is one line: its signature and its JSON."""
    signature = b""

    def say(record: dict[str, Any]) -> None:
        nonlocal signature
        content = json.dumps(record).encode()
        signature = hmac.new(key, signature + content, hashlib.sha256).hexdigest().encode()
        line = signature + b" " + content + b"\n"
        while line:
            line = line[os.write(pipe, line) :]

    return say


class PytestReporter:
    """A pytest plugin that selects the named tests and reports each of their phases."""

    def __init__(self, say: WriteRecord, names: frozenset[str]) -> None:
        self._say = say
        self._names = names

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Select the named tests with all their cases."""
        wanted = [item for item in items if any(covers(name, item.nodeid) for name in self._names)]
        left = set(map(id, wanted))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in left])
        items[:] = wanted

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Report a phase of a test."""
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        self._say({"kind": "phase", "id": report.nodeid, "when": report.when, "outcome": outcome})

    def pytest_collectreport(self, report: Any) -> None:
        """Report a file that could not be imported."""
        if report.failed:
            reason = str(report.longrepr)[-MOST_REASON:]
            self._say({"kind": "broken", "id": report.nodeid, "reason": reason})


def covers(name: str, node: str) -> bool:
    """Whether a name selects a test: the test itself, one of its cases, or its class or file."""
    return node == name or node.startswith((f"{name}[", f"{name}::"))


def import_all(package: str) -> None:
    """Import a package with its modules, so that none is imported from the path later."""
    inner = getattr(importlib.import_module(package), "__path__", ())
    for found in pkgutil.walk_packages(inner, f"{package}."):
        with contextlib.suppress(Exception):
            importlib.import_module(found.name)


def snapshot_functions() -> dict[str, tuple[object, object]]:
    """Return the functions of pytest and its dependencies, with their code, and the built-in functions."""
    found: dict[str, tuple[object, object]] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] in WATCHED:
            for place, value in functions_of(module):
                found[place] = (value, getattr(value, "__code__", None))
    for name, value in vars(builtins).items():
        if name not in REPLACED_AT_TIMES:
            found[f"builtins.{name}"] = (value, None)
    return found


def functions_of(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Return the functions that a module defines, and the attributes of its classes."""
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType):
            yield f"{module.__name__}.{name}", value
        elif isinstance(value, type):
            for attribute, own in list(vars(value).items()):
                if callable(own) or isinstance(own, (property, staticmethod, classmethod)):
                    yield f"{module.__name__}.{name}.{attribute}", own


def tampered_functions(before: dict[str, tuple[object, object]]) -> list[str]:
    """Return the names of changed functions."""
    now = snapshot_functions()
    return [
        name
        for name, (value, code) in before.items()
        if name not in now or now[name][0] is not value or now[name][1] is not code
    ][:20]


if __name__ == "__main__":
    if sys.argv[1] == "tests":
        run_tests(int(sys.argv[2]))
    else:
        supervise(sys.argv[2])
