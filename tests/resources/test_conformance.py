"""The conformance suite passes correct resources, and names the clause that a wrong one violates."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import types
from dataclasses import dataclass, field

import pytest

from agentfly.resources.kind import ResourceKind
from agentfly.resources.process.procfs import start_time
from agentfly.resources.resource import Resource, Status
from agentfly.resources.spec import ResourceSpec
from agentfly.testing.fake_resource import FakeSpec
from agentfly.testing.resource_conformance import check_resource


def leave_something(resource):
    resource.contents.append("something")


def is_empty(resource):
    return not resource.contents


@pytest.mark.slow
async def test_the_fake_resource_keeps_the_contract():
    await check_resource(FakeSpec(), dirty=leave_something, is_clean=is_empty)


@dataclass(frozen=True, kw_only=True)
class SleepSpec(ResourceSpec):
    """A real process, kept or broken in one way."""

    kind = ResourceKind("sleep", f"{__name__}:Sleep", reap="sleep_for_conformance:end_sleep")
    fault: str = ""

    @property
    def preparation_key(self):
        return "sleep"


class Sleep(Resource):
    can_freeze = True
    prepared = False
    shelf: list[str] = []
    processes: list[subprocess.Popen] = []

    def __init__(self, spec, instance):
        super().__init__(spec, instance)
        self.contents = self.shelf if spec.fault == "shares" else []
        self.process = None
        self.released = False
        self.frozen = False
        self.ended = asyncio.Event()

    @classmethod
    async def prepare(cls, spec):
        if spec.fault == "prepares only once":
            if cls.prepared:
                raise OSError("it is there already")
            cls.prepared = True

    async def freeze(self):
        self.process.send_signal(signal.SIGSTOP)
        self.frozen = True

    async def thaw(self):
        if self.spec.fault == "thaws only what is frozen" and not self.frozen:
            raise OSError("it is not frozen")
        self.process.send_signal(signal.SIGCONT)
        self.frozen = False

    async def use(self):
        await self.ended.wait()

    async def start(self):
        if self.spec.fault == "never starts":
            raise OSError("no such program")
        if self.spec.fault == "starts dirty":
            self.contents.append("dust")
        self.process = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220
        self.processes.append(self.process)

    async def reset(self):
        if self.spec.fault == "reset raises":
            raise OSError("half-open")
        if self.spec.fault == "reset breaks":
            self.process.kill()
            self.process.wait()
        if self.spec.fault != "reset cleans nothing":
            self.contents.clear()

    async def status(self):
        if self.spec.fault == "status raises" and self.released:
            raise OSError("gone")
        if self.spec.fault == "frozen counts as broken" and self.frozen:
            return Status.BROKEN
        if self.spec.fault == "always healthy":
            return Status.HEALTHY
        if self.process is None or self.process.poll() is not None:
            return Status.BROKEN
        return Status.HEALTHY

    def quick_status(self):
        return Status.BROKEN if self.spec.fault == "too quick" else Status.HEALTHY

    async def release(self):
        if self.released and self.spec.fault == "release only once":
            raise OSError("already released")
        if self.process is None and self.spec.fault == "release needs a start":
            raise OSError("not started")
        if self.spec.fault == "a release cut off is forgotten":
            if self.released:
                return
            self.released = True
            await asyncio.sleep(0.005)
        if self.spec.fault == "waits for the frozen" and self.frozen:
            await asyncio.sleep(600)
        self.released = True
        if self.spec.fault != "uses outlive it":
            self.ended.set()
        if self.process is not None and self.spec.fault != "release leaves it":
            self.process.kill()
            self.process.wait()

    @property
    def traces(self):
        if self.spec.fault == "traces are no JSON":
            return {"process": self.process, "set": {1}}
        if self.process is None:
            return {}
        return {"pid": self.process.pid, "started": start_time(self.process.pid)}


def end_sleep(traces):
    if traces and start_time(traces["pid"]) == traces["started"] is not None:
        subprocess.run(["kill", "-9", str(traces["pid"])], check=True)
        while start_time(traces["pid"]) is not None:
            pass


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The kind's reap lives in a module, as that of a user does."""
    module = types.ModuleType("sleep_for_conformance")
    module.end_sleep = end_sleep  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sleep_for_conformance", module)
    yield
    for process in Sleep.processes:
        process.kill()
        process.wait()
    Sleep.processes.clear()
    Sleep.shelf.clear()
    Sleep.prepared = False


@pytest.mark.slow
async def test_a_process_that_is_started_and_ended_properly_keeps_the_contract():
    await check_resource(SleepSpec(), dirty=leave_something, is_clean=is_empty, use=Sleep.use)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "clause"),
    [
        ("never starts", "start\\(\\) succeeds, within 60 s: OSError: no such program"),
        ("starts dirty", "An instance is clean after start"),
        ("shares", "An instance is clean"),
        ("reset raises", "reset\\(\\) succeeds on a used instance"),
        ("reset breaks", "status\\(\\) is healthy after reset"),
        ("reset cleans nothing", "An instance is clean after reset"),
        ("too quick", "quick_status\\(\\) is healthy after start"),
        ("status raises", "status\\(\\) never raises"),
        ("always healthy", "status\\(\\) is broken after release"),
        ("release only once", "release\\(\\) may be called again"),
        ("release needs a start", "release\\(\\) copes with a start\\(\\) never called"),
        ("release leaves it", "status\\(\\) is broken after release"),
        ("traces are no JSON", "traces are JSON-able before start"),
        ("prepares only once", "prepare\\(\\) succeeds"),
        ("thaws only what is frozen", "thaw\\(\\) is fine where nothing is frozen"),
        ("frozen counts as broken", "status\\(\\) is healthy while it is frozen"),
        ("waits for the frozen", "release\\(\\) succeeds, within 1 s: TimeoutError"),
        ("a release cut off is forgotten", "status\\(\\) is broken after a release\\(\\) that was cancelled"),
        ("uses outlive it", "What an owner had called ends when the instance is released"),
    ],
)
async def test_what_breaks_a_clause_is_told_which(fault, clause):
    spec = SleepSpec(fault=fault, release_timeout_s=0.5)
    with pytest.raises(AssertionError, match=clause):
        await check_resource(spec, dirty=leave_something, is_clean=is_empty, use=Sleep.use)


@dataclass(kw_only=True, unsafe_hash=True)
class MeltingSpec:
    capacity: int = 2
    names: list[str] = field(default_factory=list, hash=False)


async def test_a_spec_that_is_not_frozen_is_told():
    with pytest.raises(AssertionError, match="frozen"):
        await check_resource(MeltingSpec())  # type: ignore[arg-type]


async def test_a_dirt_that_is_never_seen_proves_nothing_and_is_told():
    with pytest.raises(AssertionError, match="is_clean\\(\\) sees what dirty\\(\\) leaves"):
        await check_resource(FakeSpec(), dirty=lambda resource: None, is_clean=lambda resource: True)
