"""Virtual time: it skips waits, and stops while threads work."""

from __future__ import annotations

import asyncio
import threading
import time

from agentfly.core.threads.pool import run_in_thread
from agentfly.core.threads.run import DedicatedThread
from tests.support import virtual_time
from tests.support.virtual_time import run_in_virtual_time


def test_sleeps_take_no_time_and_end_in_their_order():
    async def main():
        ended = []

        async def sleep(seconds):
            await asyncio.sleep(seconds)
            ended.append((seconds, asyncio.get_running_loop().time()))

        await asyncio.gather(*(sleep(seconds) for seconds in (3600.0, 1.0, 60.0)))
        return ended

    assert run_in_virtual_time(main()) == [(1.0, 1.0), (60.0, 60.0), (3600.0, 3600.0)]


def test_the_clock_stands_still_while_a_thread_works():
    async def main():
        async with asyncio.timeout(0.001):
            await asyncio.to_thread(time.sleep, 0.05)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) == 0


def test_a_thread_that_waits_for_a_timer_of_the_loop_gets_it(monkeypatch):
    monkeypatch.setattr(virtual_time, "THREAD_PATIENCE_S", 0.01)

    async def main():
        rung = threading.Event()
        asyncio.get_running_loop().call_later(60, rung.set)
        await asyncio.to_thread(rung.wait)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) == 60


def test_agentflys_threads_hold_the_clock_while_they_work_and_no_longer():
    async def main():
        loop, thread = asyncio.get_running_loop(), DedicatedThread()
        async with asyncio.timeout(0.001):
            await run_in_thread(time.sleep, 0.02)
            await thread.start(time.sleep, 0.02)
        assert not loop.has_thread_at_work  # type: ignore[attr-defined]  # though the dedicated thread waits for further calls
        thread.close()
        return loop.time()

    assert run_in_virtual_time(main()) == 0
