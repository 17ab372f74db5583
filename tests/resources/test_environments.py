"""Environments behave the same in the loop, on a thread and in a process."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from agentfly.core.errors import ConfigError, ResourceDied, UsageError
from agentfly.resources.environments.environment import Environment
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.resource import Status

Runs = Literal["loop", "thread", "process"]
EVERYWHERE: list[Runs] = ["loop", "thread", "process"]
everywhere = pytest.mark.parametrize("runs", EVERYWHERE)


class IllegalMove(Exception):
    """An exception type of a simulator."""

    def __init__(self, move: str, *, because: str = "rules") -> None:
        super().__init__(f"{move} is illegal")
        self.move = move


class Counter:
    """A simulator with a reset."""

    def __init__(self, start: int = 0) -> None:
        self.start = self.value = start
        self.resets = 0

    def reset(self, start: int | None = None) -> int:
        self.resets += 1
        self.value = self.start if start is None else start
        return self.value

    def step(self, by: int) -> int:
        self.value += by
        return self.value

    async def step_async(self, by: int) -> int:
        await asyncio.sleep(0)
        return self.step(by)

    def resets_so_far(self) -> int:
        return self.resets

    def place(self) -> tuple[int, int]:
        return os.getpid(), threading.get_ident()

    def illegal(self, move: str) -> None:
        raise IllegalMove(move)

    def status(self) -> str:
        return "the counter's own"

    def times_out(self) -> None:
        raise TimeoutError("the simulator's own")


class Ledger:
    """A simulator without a reset, bound to the thread that made it, which writes down its end."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("create table entries (entry text)")
        self.write("made")

    def step(self, entry: str) -> int:
        self.connection.execute("insert into entries values (?)", (entry,))
        return int(self.connection.execute("select count(*) from entries").fetchone()[0])

    def close(self) -> None:
        self.connection.close()
        self.write("closed")

    def write(self, line: str) -> None:
        with open(self.path, "a") as file:  # noqa: PTH123  (kept to what the simulator's process has loaded)
            file.write(line + "\n")


class Quitter:
    """A simulator that calls ``sys.exit`` wherever it can."""

    def step(self) -> None:
        sys.exit(3)

    async def step_async(self) -> None:
        await asyncio.sleep(0)
        sys.exit("no more moves")

    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    def run_dry(self) -> int:
        return next(iter(()))

    def live_on(self) -> str:
        return "alive"

    def close(self) -> None:
        sys.exit()


class Promise:
    """An awaitable that is no coroutine."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(0).__await__()
        return self.value


class Promising:
    """A simulator that gives awaitables of its own type."""

    def __init__(self, path: str) -> None:
        self.path = path

    def step(self) -> Promise:
        return Promise("stepped")

    def close(self) -> Promise:
        return Promise(self.write())  # type: ignore[func-returns-value]

    def write(self) -> None:
        with open(self.path, "w") as file:  # noqa: PTH123  (kept to what the simulator's process has loaded)
            file.write("closed")


def promise_of_a_simulator(path: str) -> Promise:
    return Promise(Promising(path))


class StubbornAtTheEnd(Counter):
    def close(self) -> None:
        raise RuntimeError("cannot close")


async def make_counter(start: int) -> Counter:
    await asyncio.sleep(0)
    return Counter(start)


def quitting_factory() -> Counter:
    sys.exit("the game's files are missing")


def failing_factory() -> Counter:
    raise OSError("the game's files are missing")


def environment(**fields: Any) -> Environment:
    return Environment(EnvironmentSpec(**fields), "environment-under-test")


@everywhere
async def test_methods_sync_and_async_are_awaited_and_give_what_they_return(runs: Runs) -> None:
    counter = environment(factory=Counter, args=(5,), runs=runs)
    await counter.start()
    assert await counter.step(2) == 7
    assert await counter.step_async(by=3) == 10
    assert await counter.call("status") == "the counter's own"
    await counter.release()


@everywhere
async def test_every_owner_meets_a_freshly_reset_simulator(runs: Runs) -> None:
    counter = environment(factory=Counter, kwargs={"start": 1}, runs=runs)
    await counter.start()
    seen = []
    for _ in range(4):
        seen.append(await counter.step(1))
        await counter.reset()
    assert seen == [2, 2, 2, 2]
    assert await counter.reset(start=9) == 9
    assert await counter.resets_so_far() == 6
    await counter.release()


@everywhere
async def test_a_simulator_without_reset_is_closed_and_made_anew_for_the_next_owner(runs: Runs, tmp_path: Any) -> None:
    path = tmp_path / "lines"
    ledger = environment(factory=Ledger, args=(str(path),), runs=runs)
    await ledger.start()
    assert [await ledger.step("a"), await ledger.step("b")] == [1, 2]
    await ledger.reset()
    assert await ledger.step("c") == 1
    await ledger.release()
    await ledger.release()
    assert path.read_text().split() == ["made", "closed", "made", "closed"]


@everywhere
async def test_an_exception_of_the_simulator_comes_back_as_itself_and_the_simulator_lives_on(runs: Runs) -> None:
    declared = {"result_types": (IllegalMove,)} if runs == "process" else {}
    counter = environment(factory=Counter, runs=runs, **declared)
    await counter.start()
    with pytest.raises(IllegalMove, match="e9 is illegal") as caught:
        await counter.illegal("e9")
    assert (str(caught.value), caught.value.move) == ("e9 is illegal", "e9")
    with pytest.raises(TimeoutError, match="the simulator's own"):
        await counter.times_out()
    assert await counter.status() is Status.HEALTHY
    assert await counter.step(1) == 1
    await counter.release()


@everywhere
async def test_a_mistyped_method_is_answered_with_the_nearest_name(runs: Runs) -> None:
    counter = environment(factory=Counter, runs=runs)
    await counter.start()
    with pytest.raises(UsageError, match=r"no method 'stpe'\. Did you mean 'step'"):
        await counter.stpe(1)
    with pytest.raises(UsageError, match="no method '__init__'"):
        await counter.call("__init__")
    with pytest.raises(AttributeError):
        _ = counter._value
    await counter.release()


@pytest.mark.slow
@everywhere
async def test_a_factory_may_be_async_or_given_by_name(runs: Runs) -> None:
    counter = environment(factory=make_counter, args=(3,), runs=runs)
    await counter.start()
    assert await counter.step(1) == 4
    await counter.release()
    named = environment(factory="collections:Counter", kwargs={"apples": 2}, runs=runs)
    await named.start()
    assert await named.total() == 2
    await named.release()


@everywhere
async def test_a_factory_that_fails_says_why_and_leaves_nothing(runs: Runs) -> None:
    counter = environment(factory=failing_factory, runs=runs)
    with pytest.raises(OSError, match="the game's files are missing"):
        await counter.start()
    assert await counter.status() is Status.BROKEN
    await counter.release()


@everywhere
@pytest.mark.parametrize(
    ("factory", "said"),
    [("collections:Countr", "has no 'Countr'; is it 'Counter'"), ("no_such_module_here:Game", "cannot be imported")],
)
async def test_a_factory_name_that_leads_nowhere_is_a_configuration_error(runs: Runs, factory: str, said: str) -> None:
    misnamed = environment(factory=factory, runs=runs)
    with pytest.raises(ConfigError, match=said):
        await misnamed.start()
    await misnamed.release()


@everywhere
async def test_a_close_that_raises_does_not_keep_the_instance(runs: Runs) -> None:
    counter = environment(factory=StubbornAtTheEnd, runs=runs)
    await counter.start()
    await counter.release()
    assert await counter.status() is Status.BROKEN


@everywhere
async def test_a_released_environment_refuses_calls(runs: Runs) -> None:
    counter = environment(factory=Counter, runs=runs)
    await counter.start()
    await counter.release()
    with pytest.raises(ResourceDied, match="it was released"):
        await counter.step(1)


async def test_where_a_simulator_lives_is_what_the_spec_says() -> None:
    here = os.getpid(), threading.get_ident()
    places = {}
    for runs in EVERYWHERE:
        counter = environment(factory=Counter, runs=runs)
        await counter.start()
        places[runs] = await counter.place()
        assert await counter.place() == places[runs], "it stays where it is"
        await counter.release()
    assert places["loop"] == here
    assert places["thread"][0] == here[0]
    assert places["thread"][1] != here[1]
    assert places["process"][0] != here[0]


@everywhere
async def test_a_simulator_that_exits_ends_nothing_but_its_call(runs: Runs) -> None:
    quitter = environment(factory=Quitter, runs=runs)
    await quitter.start()
    with pytest.raises(RuntimeError, match=r"sys\.exit\(3\) was called"):
        await quitter.step()
    with pytest.raises(RuntimeError, match=r"sys\.exit\('no more moves'\) was called"):
        await quitter.step_async()
    with pytest.raises(RuntimeError, match="StopIteration"):
        await quitter.run_dry()
    with pytest.raises(RuntimeError, match="CancelledError"):
        await quitter.cancel_itself()
    assert await quitter.live_on() == "alive"
    await quitter.release()
    assert await quitter.status() is Status.BROKEN


@everywhere
async def test_a_factory_that_exits_fails_its_start_alone(runs: Runs) -> None:
    counter = environment(factory=quitting_factory, runs=runs)
    with pytest.raises(RuntimeError, match="the game's files are missing"):
        await counter.start()
    await counter.release()


@everywhere
async def test_an_awaitable_of_any_type_is_awaited(runs: Runs, tmp_path: Path) -> None:
    path = tmp_path / "end"
    promising = environment(factory=promise_of_a_simulator, args=(str(path),), runs=runs)
    await promising.start()
    assert await promising.step() == "stepped"
    await promising.release()
    assert path.read_text() == "closed"


class Tangled:
    """A simulator that keeps its state in its module."""

    thread_safe = False
    seen: ClassVar[list[str]] = []

    def see(self, what: str) -> list[str]:
        self.seen.append(what)
        return self.seen


def make_tangled() -> Tangled:
    return Tangled()


@everywhere
async def test_what_is_not_thread_safe_lives_in_a_process_of_its_own_or_nowhere(runs: Runs) -> None:
    pair = [environment(factory=make_tangled, runs=runs, capacity=2) for _ in range(2)]
    if runs == "process":
        await asyncio.gather(*(one.start() for one in pair))
        for _ in range(2):
            await asyncio.gather(*(one.see(str(place)) for place, one in enumerate(pair)))
        assert [await one.see("!") for one in pair] == [["0", "0", "!"], ["1", "1", "!"]]
    else:
        with pytest.raises(ConfigError, match="not thread-safe"):
            await pair[0].start()
    for one in pair:
        await one.release()


@pytest.mark.slow
@everywhere
async def test_a_start_that_takes_long_is_told_while_it_lasts(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentfly.resources.environments.environment.SLOW_START_WARNING_S", 0.05)
    loading = environment(factory=load_for, args=(0.3,), runs=runs, start_timeout_s=9)
    await loading.start()
    told = [record.getMessage() for record in caplog.records if "is still being created" in record.getMessage()]
    assert len(told) >= 2
    assert "environment:load_for environment-under-test is still being created after 0.05 s" in told[0]
    assert "start_timeout_s=9" in told[0]
    await loading.release()


async def load_for(seconds: float) -> Counter:
    await asyncio.sleep(seconds)
    return Counter()


class LosesItsEngine(Counter):
    def step(self, by: int) -> int:
        raise ResourceDied("The engine that it plays with has ended.")


@everywhere
async def test_a_simulator_can_say_that_it_is_beyond_repair(runs: Runs) -> None:
    broken = environment(factory=LosesItsEngine, runs=runs)
    await broken.start()
    assert await broken.status() is Status.HEALTHY
    with pytest.raises(ResourceDied, match="The engine that it plays with has ended"):
        await broken.step(1)
    assert await broken.status() is Status.BROKEN
    with pytest.raises(ResourceDied, match=r"cannot be used: step\(\) raised ResourceDied"):
        await broken.step(1)
    await broken.release()


async def forgets_to_return() -> None:
    Counter()


@everywhere
async def test_a_factory_that_gives_nothing_is_a_configuration_error(runs: Runs) -> None:
    nothing = environment(factory=forgets_to_return, runs=runs)
    with pytest.raises(ConfigError, match="The factory forgets_to_return returned None"):
        await nothing.start()
    await nothing.release()
