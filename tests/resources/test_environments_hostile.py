"""Failing simulators: only their own call fails, the error says why, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from agentfly.core.errors import ResourceDied, UsageError, error_message
from agentfly.resources.environments.environment import Environment
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.resource import Status

Runs = Literal["loop", "thread", "process"]
Starts = Literal["fork", "spawn"]
everywhere = pytest.mark.parametrize("runs", ["loop", "thread", "process"])
both_starts = pytest.mark.parametrize("starts", ["fork", "spawn"])


class Panic(BaseException):
    """What libraries in Rust raise, which is no Exception."""


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class OneWay:
    """It can be pickled, and not restored."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return int, ("no number",)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


class Careless:
    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def start(self) -> str:
        return "its own start"

    def panics(self) -> None:
        raise Panic("index out of bounds")

    def is_speechless(self) -> None:
        raise Speechless

    def gives(self, what: str) -> Any:
        return OneWay() if what == "one way" else nested(100_000)

    def says(self, text: str) -> int:
        print(text, flush=True)
        return os.getpid()

    def takes(self, value: object) -> str:
        return type(value).__name__

    def forgets_that_it_forked(self, fails: bool) -> int:
        pid = os.fork()
        if pid == 0:
            if fails:
                raise RuntimeError("in the child")
            return -1
        os.waitpid(pid, 0)
        return os.getpid()

    def ends_its_group(self, note: str) -> None:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path(note).write_text(str(child.pid))
        os.killpg(0, signal.SIGKILL)


@asynccontextmanager
async def started(runs: Runs = "process", **fields: Any) -> AsyncIterator[Environment]:
    environment = Environment(EnvironmentSpec(factory=Careless, runs=runs, **fields), "careless-1")
    await environment.start()
    try:
        yield environment
    finally:
        await environment.release()


@everywhere
async def test_what_is_no_exception_fails_its_call_alone(runs: Runs) -> None:
    async with started(runs) as environment:
        with pytest.raises(RuntimeError, match="index out of bounds"):
            await environment.panics()
        assert await environment.count() == 1


@everywhere
async def test_an_exception_that_cannot_say_what_it_is_fails_its_call_alone(runs: Runs) -> None:
    declared = {"result_types": (Speechless,)} if runs == "process" else {}
    async with started(runs, **declared) as environment:
        with pytest.raises(Speechless) as raised:
            await environment.is_speechless()
        assert "cannot be read" in error_message(raised.value)
        assert await environment.count() == 1


@everywhere
async def test_a_start_of_the_simulators_own_makes_no_second_simulator(runs: Runs) -> None:
    async with started(runs) as environment:
        assert await environment.count() == 1
        with pytest.raises(UsageError, match=r"call\('start'\)"):
            await environment.start()
        assert await environment.call("start") == "its own start"
        assert await environment.count() == 2


async def test_what_cannot_be_restored_on_the_other_side_is_an_error_of_its_writer() -> None:
    async with started(allow_pickle=True) as environment:
        with pytest.raises(UsageError, match=r"gives\(\).* cannot be read outside"):
            await environment.gives("one way")
        with pytest.raises(UsageError, match="arguments of a call cannot be read"):
            await environment.takes(OneWay())
        assert await environment.count() == 1


async def test_what_is_nested_without_end_is_refused_before_the_deadline_of_a_call() -> None:
    async with started(call_timeout_s=20) as environment:
        with pytest.raises(UsageError, match=r"levels deep, or contains itself"):
            await environment.gives("nested")
        with pytest.raises(UsageError, match="cannot be sent"):
            await environment.takes(nested(100_000))
        assert await environment.count() == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_a_fork_that_the_simulator_forgot_never_answers_in_its_place(fails: bool) -> None:
    async with started() as environment:
        assert await environment.forgets_that_it_forked(fails) > 0
        assert [await environment.count() for _ in range(3)] == [1, 2, 3]


@both_starts
async def test_a_simulator_that_ends_its_whole_group_leaves_nothing_and_is_told(starts: Starts, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    async with started(starts=starts) as environment:
        with pytest.raises(ResourceDied, match="SIGKILL"):
            await environment.ends_its_group(str(note))
    child = int(note.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@both_starts
async def test_what_is_no_text_in_the_module_path_is_passed_over_as_python_does(
    starts: Starts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    async with started(starts=starts) as environment:
        assert await environment.count() == 1


async def test_sync_simulators_on_threads_take_no_file_descriptors() -> None:
    before = psutil.Process().num_fds()
    async with started("thread") as environment:
        assert await environment.count() == 1
        assert psutil.Process().num_fds() == before


async def test_how_a_simulator_died_between_calls_is_told_at_the_next_one() -> None:
    async with started() as environment:
        pid = await environment.says("its last words")
        os.kill(pid, signal.SIGTERM)
        async with asyncio.timeout(20):
            while await environment.status() is Status.HEALTHY:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(ResourceDied, match=r"(?s)ended by SIGTERM.*its last words"):
            await environment.count()
