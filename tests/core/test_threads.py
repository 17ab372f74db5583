"""Threads: they are reused, and no call can keep one from others for good."""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import logging
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.core.threads.call import ThreadExit
from agentfly.core.threads.pool import LIMIT_VARIABLE, ThreadPool, run_in_thread, run_in_thread_to_completion
from agentfly.core.threads.run import DedicatedThread
from tests.support.scale import scaled

speaker: contextvars.ContextVar[str] = contextvars.ContextVar("speaker", default="nobody")


@asynccontextmanager
async def hanging(threads: ThreadPool, number: int = 1) -> AsyncIterator[Callable[[], None]]:
    """Calls that were given up and do not return, until the function that is given lets them, or the block ends."""
    begun, ending = threading.Semaphore(0), threading.Event()

    def hang() -> None:
        begun.release()
        ending.wait()

    for _ in range(number):
        call = asyncio.create_task(threads.call(hang, {}))
        await run_in_thread(begun.acquire)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    try:
        yield ending.set
    finally:
        ending.set()


async def eventually(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  (threads wake no event loop)
        await asyncio.sleep(0.001)


async def test_calls_one_after_another_are_made_on_one_thread() -> None:
    threads = ThreadPool()
    used = {await threads.call(threading.get_ident, {}) for _ in range(50)}
    assert len(used) == 1
    assert threading.get_ident() not in used


async def test_calls_at_the_same_time_do_not_wait_for_one_another() -> None:
    threads, meeting = ThreadPool(), threading.Barrier(100, timeout=30)
    await asyncio.gather(*(threads.call(meeting.wait, {}) for _ in range(100)))


async def test_a_call_sees_the_context_variables_of_its_caller_and_changes_none() -> None:
    threads = ThreadPool()

    def say(name: str) -> str:
        before = speaker.get()
        speaker.set(name)
        return before

    assert [await threads.call(say, {"name": name}) for name in ("Ada", "Bob")] == ["nobody", "nobody"]
    speaker.set("Eve")
    assert await threads.call(say, {"name": "Ada"}) == "Eve"


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(), asyncio.CancelledError()], ids=repr
)
async def test_what_would_end_more_than_the_call_is_told_as_an_exception(error: BaseException) -> None:
    def fail() -> None:
        raise error

    threads = ThreadPool()
    with pytest.raises(ThreadExit) as told:
        await threads.call(fail, {})
    assert told.value.error is error


async def test_beyond_the_limit_calls_wait_for_their_turn_and_the_user_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads, at_work, most = ThreadPool(limit=3), 0, 0
    lock = threading.Lock()

    def work(number: int) -> int:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.001)
        with lock:
            at_work -= 1
        return number

    results = await asyncio.gather(*(threads.call(work, {"number": number}) for number in range(40)))
    assert results == list(range(40))
    assert most == 3
    [told] = [record.getMessage() for record in caplog.records]
    assert "All 3 threads" in told
    assert LIMIT_VARIABLE in told


async def test_a_call_that_hangs_takes_no_thread_from_others() -> None:
    threads = ThreadPool(limit=4)
    async with hanging(threads, 3) as let_go:
        assert threads.abandoned_calls == 3
        assert await asyncio.gather(*(threads.call(lambda: 1, {}) for _ in range(10))) == [1] * 10
        let_go()
        await eventually(lambda: threads.abandoned_calls == 0)


async def test_where_every_thread_hangs_further_calls_fail_and_name_what_hangs() -> None:
    threads = ThreadPool(limit=2)
    async with hanging(threads, 2) as let_go:
        with pytest.raises(PrerequisiteError, match=rf"2 are at functions.*hang \(2\).*{LIMIT_VARIABLE}"):
            await threads.call(lambda: 1, {})
        assert await threads.start(lambda: 2) == 2  # what is not the user's is bounded by nothing
        let_go()
        await eventually(lambda: threads.abandoned_calls == 0)
    assert await threads.call(lambda: 3, {}) == 3


async def test_a_call_in_line_fails_once_the_last_thread_before_it_hangs() -> None:
    threads = ThreadPool(limit=1)
    ending = threading.Event()
    first = asyncio.create_task(threads.call(ending.wait, {}))
    await asyncio.sleep(0)
    second = asyncio.create_task(threads.call(lambda: 1, {}))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(PrerequisiteError, match="do not return"):
        await second
    ending.set()


async def test_a_call_in_line_that_is_given_up_is_never_made() -> None:
    threads, ending, made = ThreadPool(limit=1), threading.Event(), []
    first = asyncio.create_task(threads.call(ending.wait, {}))
    await asyncio.sleep(0)
    second = asyncio.create_task(threads.call(lambda: made.append(2), {}))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait({second})
    third = asyncio.create_task(threads.call(lambda: made.append(3), {}))
    await asyncio.sleep(0)
    ending.set()
    await asyncio.gather(first, third)
    assert made == [3]
    assert threads.abandoned_calls == 0


async def test_a_call_that_waits_for_the_event_loop_leaves_its_place_to_others() -> None:
    threads, loop = ThreadPool(limit=1), asyncio.get_running_loop()

    async def needs_a_thread() -> int:
        return await threads.call(lambda: 7, {})

    def wait() -> int:
        with threads.not_counted_while_waiting():
            return asyncio.run_coroutine_threadsafe(needs_a_thread(), loop).result(30)

    assert await asyncio.gather(*(threads.call(wait, {}) for _ in range(5))) == [7] * 5


async def test_the_user_is_told_of_calls_that_hang_each_time_their_number_has_doubled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads = ThreadPool()
    async with hanging(threads, 40):
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split()[0] for line in told] == ["16", "32"]
    assert "hang (32)" in told[1]


async def test_where_the_system_refuses_a_thread_a_call_waits_for_one_that_there_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads, start, started = ThreadPool(), _thread.start_new_thread, []  # type: ignore[var-annotated]

    def start_one(*given: object) -> int:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(given)
        return start(*given)  # type: ignore[call-overload]

    monkeypatch.setattr(_thread, "start_new_thread", start_one)
    assert await asyncio.gather(*(threads.call(lambda: 1, {}) for _ in range(5))) == [1] * 5
    assert "can't start new thread" in caplog.text
    with pytest.raises(PrerequisiteError, match=r"can't start new thread.*ulimit -u"):
        await ThreadPool().call(lambda: 1, {})
    with pytest.raises(PrerequisiteError, match="can't start new thread"):
        ThreadPool().start(lambda: 1)


async def test_threads_without_work_end() -> None:
    threads, meeting = ThreadPool(idle_s=0.01), threading.Barrier(5, timeout=30)

    def meet() -> threading.Thread:
        meeting.wait()
        return threading.current_thread()

    used = await asyncio.gather(*(threads.call(meet, {}) for _ in range(5)))
    natives = {thread.native_id for thread in used}
    await eventually(lambda: not natives & {int(task.name) for task in Path("/proc/self/task").iterdir()})
    assert await threads.call(lambda: 1, {}) == 1


async def test_calls_of_event_loops_in_several_threads_share_the_threads() -> None:
    threads = ThreadPool()

    def in_a_loop() -> int:
        return asyncio.run(threads.call(threading.get_ident, {}))

    assert len({await run_in_thread(in_a_loop) for _ in range(5)}) == 1


def test_those_without_an_event_loop_can_wait_too() -> None:
    threads = ThreadPool()
    assert threads.submit(divmod, 7, 2).result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result()


async def test_a_process_that_was_forked_has_threads_of_its_own() -> None:
    threads = ThreadPool()
    await threads.call(lambda: 1, {})
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = threads.submit(lambda: 42).result(30)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode((await run_in_thread(os.waitpid, child, 0))[1]) == 42


def test_the_end_of_the_process_waits_for_no_call_that_hangs() -> None:
    program = """
import asyncio, threading
from agentfly.core.threads.run import DedicatedThread
from agentfly.core.threads.pool import THREAD_POOL

async def main():
    for caller in (THREAD_POOL, DedicatedThread()):
        try:
            async with asyncio.timeout(0.01):
                await caller.call(threading.Event().wait, {})
        except TimeoutError:
            print("given up")

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "given up\n" * 2


@pytest.mark.parametrize("said", ["0", "-3", "many", ""])
def test_a_limit_that_is_no_number_is_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, said)
    with pytest.raises(ConfigError, match=LIMIT_VARIABLE):
        _ = ThreadPool().limit


def test_the_environment_says_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "12")
    assert ThreadPool().limit == 12


async def test_what_is_bound_to_its_thread_stays_there_whatever_else_runs() -> None:
    threads = ThreadPool()
    databases = [DedicatedThread(threads) for _ in range(5)]
    connections = [await one.call(sqlite3.connect, {"database": ":memory:"}) for one in databases]

    def count(connection: sqlite3.Connection) -> int:
        row: tuple[int] = connection.execute("select 1 + 1").fetchone()
        return row[0]

    for _ in range(10):
        counts = (one.call(count, {"connection": it}) for one, it in zip(databases, connections, strict=True))
        others = (threads.call(lambda: 2, {}) for _ in range(5))
        assert await asyncio.gather(*counts, *others) == [2] * 10
    for one, it in zip(databases, connections, strict=True):
        await one.call(it.close, {})
        one.close()


async def test_a_dedicated_thread_makes_calls_in_their_order_and_none_that_was_given_up_before() -> None:
    thread, made, ending = DedicatedThread(ThreadPool()), [], threading.Event()
    first = asyncio.create_task(thread.call(ending.wait, {}))
    await asyncio.sleep(0)
    given_up = asyncio.create_task(thread.call(lambda: made.append("given up"), {}))
    last = [thread.start(made.append, number) for number in range(5)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait({given_up})
    ending.set()
    await asyncio.gather(first, *last)
    assert made == list(range(5))  # type: ignore[comparison-overlap]
    thread.close()


async def test_a_dedicated_thread_goes_back_to_the_others() -> None:
    threads = ThreadPool()
    one = DedicatedThread(threads)
    used = await one.call(threading.get_ident, {})
    one.close()
    await eventually(lambda: bool(threads._idle))
    assert await threads.call(threading.get_ident, {}) == used


async def test_work_that_is_to_end_is_told_to_stop_and_waited_for() -> None:
    begun, stop, ended = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        stop.wait()
        ended.append(True)

    working = asyncio.create_task(run_in_thread_to_completion(work, stop))
    await run_in_thread(begun.wait)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert ended


async def live_through(seed: int, calls: int) -> None:
    """Calls that return, raise, wait for others and are given up, at random times, on few threads."""
    chance = random.Random(seed)
    threads, loop = ThreadPool(limit=chance.randint(2, 6), idle_s=0.002), asyncio.get_running_loop()
    made: Counter[int] = Counter()
    counting = threading.Lock()

    async def nothing() -> None:
        await asyncio.sleep(0)

    def work(number: int, seconds: float, kind: str) -> int:
        with counting:
            made[number] += 1
        time.sleep(seconds)
        if kind == "wait":
            with threads.not_counted_while_waiting():
                asyncio.run_coroutine_threadsafe(nothing(), loop).result(30)
        if kind == "fail":
            raise ValueError(number)
        return number

    async def one(number: int) -> object:
        await asyncio.sleep(chance.random() * 0.01)
        kind = chance.choice(["return", "wait", "fail"])
        given = {"number": number, "seconds": chance.random() * 0.002, "kind": kind}
        call = asyncio.create_task(threads.call(work, given))
        if chance.random() < 0.3:
            await asyncio.sleep(chance.random() * 0.002)
            call.cancel()
        return (await asyncio.gather(call, return_exceptions=True))[0]

    outcomes = await asyncio.gather(*map(one, range(calls)))
    for number, outcome in enumerate(outcomes):
        given_up = isinstance(outcome, (asyncio.CancelledError, PrerequisiteError))
        assert made[number] == 1 or (given_up and made[number] == 0)
        assert given_up or outcome == number or (isinstance(outcome, ValueError) and outcome.args == (number,))
    await eventually(lambda: threads.abandoned_calls == threads._working == 0 and not threads._queue)
    assert await threads.call(lambda: 1, {}) == 1


def test_no_call_is_lost_or_made_twice_and_every_thread_comes_back() -> None:
    for seed in range(5):
        asyncio.run(live_through(seed, 60))


@pytest.mark.long
def test_no_call_is_lost_or_made_twice_in_many_histories() -> None:
    for seed in range(100, 100 + scaled(20, 500)):
        asyncio.run(live_through(seed, 300))
