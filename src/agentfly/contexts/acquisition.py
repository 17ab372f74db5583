"""Acquisition and lending: what `Context.acquire` and `Context.lease` return, each to be used in its one way.

Used in another way, each says what to write. Python's own words for that name neither, and would be told to the model.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from agentfly.errors import NoSuchAttribute, UsageError

R_co = TypeVar("R_co", covariant=True)

_ACQUIRE = (
    "Write `resource = await context.acquire(…)`, or in a sync tool `context.wait(context.acquire(…))`, for what is "
    "kept until the rollout ends; and `async with context.lease(…) as resource:` for the length of a block."
)


class Acquisition(Coroutine[Any, Any, R_co]):
    """A coroutine that gets a resource; to be awaited.

    Args:
        work: the coroutine itself.
    """

    def __init__(self, work: Coroutine[Any, Any, R_co]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, R_co]:
        return self._work.__await__()

    def send(self, value: Any) -> Any:
        """Go on, as coroutines do."""
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        """Go on with an exception, as coroutines do."""
        return self._work.throw(*error)

    def close(self) -> None:
        """End, as coroutines do."""
        self._work.close()

    async def __aenter__(self) -> NoReturn:
        self._work.close()
        raise UsageError(f"`async with context.acquire(…)`: acquire() is no block. {_ACQUIRE}")

    async def __aexit__(self, *_: object) -> None:
        """Never reached, but looked for before the block is entered."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NoSuchAttribute(
            f"context.acquire(…).{name}: acquire() was not awaited, so this is no resource. {_ACQUIRE}"
        )


class Lending(AbstractAsyncContextManager[R_co]):
    """A block within which a resource is lent; to be entered with ``async with``.

    Args:
        block: the block itself.
    """

    def __init__(self, block: AbstractAsyncContextManager[R_co]) -> None:
        self._block = block

    async def __aenter__(self) -> R_co:
        return await self._block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._block.__aexit__(kind, error, trace)

    def __await__(self) -> NoReturn:
        raise UsageError(f"`await context.lease(…)`: lease() is a block. {_ACQUIRE}")

    def __getattr__(self, name: str) -> NoReturn:
        raise NoSuchAttribute(f"context.lease(…).{name}: lease() was not entered, so this is no resource. {_ACQUIRE}")
