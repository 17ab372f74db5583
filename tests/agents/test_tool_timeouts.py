"""Time limits of tool calls, and the threads that they run on."""

from __future__ import annotations

import asyncio
import contextvars
import sqlite3
import threading

import pytest

from agentfly.agents.tool_decorator import tool
from agentfly.contexts.context import Context
from agentfly.core.errors import ToolTimeout

speaker: contextvars.ContextVar[str] = contextvars.ContextVar("speaker", default="nobody")


async def test_a_call_that_takes_too_long_is_a_timeout_of_the_tool(context: Context) -> None:
    ended = threading.Event()

    @tool(timeout_s=0.02)
    def hang() -> None:
        """Hang."""
        ended.wait()

    @tool(timeout_s=0.02)
    async def wait() -> None:
        """Wait."""
        await asyncio.sleep(3600)

    for slow in (hang, wait):
        with pytest.raises(ToolTimeout, match=r"stopped after 0\.02 s"):
            await slow.call({}, context)
    ended.set()


@pytest.mark.parametrize("ending", ["returns", "raises"])
async def test_a_tool_that_takes_no_notice_of_its_time_has_overrun_all_the_same(ending: str, context: Context) -> None:
    @tool(timeout_s=0.01)
    async def stubborn() -> str:
        """Wait, and make something else of the end of time."""
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if ending == "raises":
                raise ValueError("interrupted") from None
        return "done"

    with pytest.raises(ToolTimeout, match=r"stopped after 0\.01 s"):
        await stubborn.call({}, context)


async def test_cancelling_the_caller_cancels_the_call(context: Context) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    @tool(timeout_s=60)
    async def wait() -> None:
        """Wait."""
        started.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    task = asyncio.create_task(wait.call({}, context))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set()


async def test_sync_tools_run_beside_one_another_and_never_hold_up_the_loop(context: Context) -> None:
    meeting = threading.Barrier(64, timeout=30)
    threads = set()

    @tool
    def meet() -> None:
        """Wait until all 64 callers are here: it can only end if all run at the same time."""
        threads.add(threading.current_thread())
        meeting.wait()

    await asyncio.gather(*(meet.call({}, context) for _ in range(64)))
    assert threading.main_thread() not in threads


async def test_sync_tools_one_after_another_start_no_thread_each(context: Context) -> None:
    @tool
    def where() -> int:
        """Say on which thread this runs."""
        return threading.get_ident()

    assert len({(await where.call({}, context)).observation for _ in range(20)}) < 5  # others may have come idle


async def test_a_sync_tool_sees_the_callers_context_variables(context: Context) -> None:
    @tool
    def who() -> str:
        """Say who speaks."""
        return speaker.get()

    token = speaker.set("Ada")
    assert (await who.call({}, context)).observation == "Ada"
    speaker.reset(token)


async def test_an_object_bound_to_its_thread_works_within_a_call(context: Context) -> None:
    @tool
    def query() -> int:
        """Count in a database that refuses other threads."""
        with sqlite3.connect(":memory:") as connection:
            row: tuple[int] = connection.execute("select 1 + 1").fetchone()
        return row[0]

    assert (await query.call({}, context)).observation == "2"
