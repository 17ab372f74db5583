"""Parallel tool calls, and the failure of one of them."""

from __future__ import annotations

import asyncio

import pytest

from agentfly.core.async_tasks import gather_or_raise


async def later(seconds: float, value: int) -> int:
    await asyncio.sleep(seconds)
    return value


async def test_the_results_come_in_the_order_of_the_calls() -> None:
    assert await gather_or_raise(later(0.01 * wait, wait) for wait in (2, 0, 1)) == [2, 0, 1]
    assert await gather_or_raise([]) == []


async def test_the_first_failure_cancels_the_others_and_comes_with_its_cause() -> None:
    ended = []

    async def waits() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("cancelled")

    async def fails() -> None:
        await asyncio.sleep(0)
        try:
            raise ConnectionRefusedError("nobody there")
        except ConnectionRefusedError as error:
            raise ValueError("no answer") from error

    with pytest.raises(ValueError, match="no answer") as failed:
        await gather_or_raise([waits(), fails()])
    assert isinstance(failed.value.__cause__, ConnectionRefusedError)
    assert ended == ["cancelled"]
