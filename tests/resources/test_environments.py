"""An environment does the same wherever it lives: in the loop, on a thread, in a process."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from typing import Any, Literal

import cloudpickle
import pytest

from agentfly.errors import ConfigError, ResourceDied, UsageError
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

    def slow_step(self, by: int, seconds: float) -> int:
        time.sleep(seconds)
        return self.step(by)

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


class StubbornAtTheEnd(Counter):
    def close(self) -> None:
        raise RuntimeError("cannot close")


async def make_counter(start: int) -> Counter:
    await asyncio.sleep(0)
    return Counter(start)


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
    counter = environment(factory=Counter, runs=runs)
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
    with pytest.raises(UsageError, match="no method 'stpe'; did you mean 'step'"):
        await counter.stpe(1)
    with pytest.raises(UsageError, match="no method '__init__'"):
        await counter.call("__init__")
    with pytest.raises(AttributeError):
        _ = counter._value
    await counter.release()


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


@pytest.mark.parametrize("runs", ["thread", "process"])
async def test_a_cancelled_call_runs_to_its_end_and_the_next_waits_for_it(runs: Runs) -> None:
    counter = environment(factory=Counter, runs=runs)
    await counter.start()
    call = asyncio.create_task(counter.slow_step(1, 0.3))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await counter.step(1) == 2
    call = asyncio.create_task(counter.slow_step(1, 0.3))
    await asyncio.sleep(0.05)
    call.cancel()
    await counter.reset()
    assert await counter.step(1) == 1
    assert await counter.status() is Status.HEALTHY
    await counter.release()


@pytest.mark.parametrize("runs", ["thread", "process"])
async def test_calls_that_overlap_are_made_one_at_a_time_in_order(runs: Runs) -> None:
    counter = environment(factory=Counter, runs=runs)
    await counter.start()
    results = await asyncio.gather(counter.slow_step(1, 0.05), *(counter.step(1) for _ in range(20)))
    assert results == list(range(1, 22))
    await counter.release()


@pytest.mark.parametrize("runs", ["thread", "process"])
async def test_a_call_beyond_its_deadline_loses_the_instance_and_is_told(runs: Runs) -> None:
    counter = environment(factory=Counter, runs=runs, call_timeout_s=0.2)
    await counter.start()
    with pytest.raises(ResourceDied, match=r"slow_step\(\) did not end within call_timeout_s=0.2"):
        await counter.slow_step(1, 1.0)
    assert await counter.status() is Status.BROKEN
    with pytest.raises(ResourceDied, match="cannot be used"):
        await counter.step(1)
    await counter.release()


@pytest.mark.parametrize("runs", ["thread", "process"])
async def test_blocking_simulators_do_not_hold_up_the_loop(runs: Runs) -> None:
    counters = [environment(factory=Counter, runs=runs) for _ in range(4)]
    await asyncio.gather(*(counter.start() for counter in counters))
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    heart = asyncio.create_task(beat())
    await asyncio.gather(*(counter.slow_step(1, 0.5) for counter in counters))
    heart.cancel()
    assert beats >= 5, "the loop stood still while the simulators slept"
    await asyncio.gather(*(counter.release() for counter in counters))


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


def test_specs_are_values_and_travel() -> None:
    spec = EnvironmentSpec(factory="games:Chess", kwargs={"level": 3, "board": "small"}, runs="process")
    same = EnvironmentSpec(factory="games:Chess", kwargs=(("board", "small"), ("level", 3)), runs="process")
    assert spec == same
    assert hash(spec) == hash(same)
    assert cloudpickle.loads(cloudpickle.dumps(spec)) == spec
    assert spec != EnvironmentSpec(factory="games:Chess", kwargs={"level": 4, "board": "small"}, runs="process")
    assert spec.label == "environment:Chess"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"factory": "games.Chess"}, "written 'module:name'"),
        ({"factory": object()}, "Give what makes the environment"),
        ({"factory": Counter, "args": ([1, 2],)}, r"args\[0\] is a list"),
        ({"factory": Counter, "kwargs": {"options": {"a": 1}}}, r"kwargs\['options'\] is a dict"),
        ({"factory": Counter, "runs": "threads"}, "'loop', 'thread' or 'process'"),
        ({"factory": Counter, "call_timeout_s": 0}, "a call needs some time"),
    ],
)
def test_a_spec_that_cannot_work_is_refused_with_the_cure(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EnvironmentSpec(**fields)


class Client:
    """Something alive: it owns a lock."""

    def __init__(self) -> None:
        self.session = {"lock": threading.Lock()}


class Hooked:
    def __init__(self, client: Client) -> None:
        self.client = client

    def __call__(self) -> Counter:
        return Counter()


def test_what_cannot_travel_to_a_process_is_named_by_its_path() -> None:
    with pytest.raises(UsageError, match=r"factory\.client\.session\['lock'\] is a _thread.lock"):
        EnvironmentSpec(factory=Hooked(Client()), runs="process")
    client = Client()
    with pytest.raises(UsageError, match=r"factory, variable 'client'\.session\['lock'\] is a _thread.lock"):
        EnvironmentSpec(factory=lambda: Hooked(client), runs="process")
    with pytest.raises(UsageError, match=r"kwargs\['client'\]\.session\['lock'\]"):
        EnvironmentSpec(factory=Hooked, kwargs={"client": client}, runs="process")
    assert EnvironmentSpec(factory=Hooked, kwargs={"client": client}).runs == "loop"


class HangsAtTheEnd(Counter):
    def close(self) -> None:
        time.sleep(5)


@pytest.mark.parametrize("runs", ["thread", "process"])
async def test_a_close_that_hangs_is_given_up_after_the_release_timeout(runs: Runs) -> None:
    counter = environment(factory=HangsAtTheEnd, runs=runs, release_timeout_s=0.2)
    await counter.start()
    async with asyncio.timeout(4):
        await counter.release()
    assert await counter.status() is Status.BROKEN


@pytest.mark.parametrize("runs", ["thread", "process"])
async def test_release_gives_up_a_call_that_nobody_waits_for_any_more(runs: Runs) -> None:
    counter = environment(factory=Counter, runs=runs, release_timeout_s=0.2)
    await counter.start()
    call = asyncio.create_task(counter.slow_step(1, 5.0))
    await asyncio.sleep(0.05)
    call.cancel()
    async with asyncio.timeout(4):
        await counter.release()


class SlowToMake:
    def __init__(self, path: str) -> None:
        with open(path, "a") as file:  # noqa: PTH123  (kept to what the simulator's process has loaded)
            file.write("made\n")
        if os.path.getsize(path) > len("made\n"):  # noqa: PTH202
            time.sleep(0.5)

    def step(self) -> str:
        return "stepped"


@pytest.mark.parametrize("runs", ["thread", "process"])
async def test_an_interrupted_making_anew_is_never_given_to_anybody(runs: Runs, tmp_path: Any) -> None:
    slow = environment(factory=SlowToMake, args=(str(tmp_path / "lines"),), runs=runs)
    await slow.start()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(slow.reset(), 0.2)
    assert await slow.status() is Status.BROKEN
    with pytest.raises(ResourceDied, match="making anew was interrupted"):
        await slow.step()
    await slow.release()
