"""Mistakes of the author of a kind of resource: they are reported, even if the engine can handle them."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from typing import Any

import pytest

from agentfly.core.errors import ResourceStartError
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.kind import ResourceKind
from agentfly.resources.resource import Resource, Status
from agentfly.resources.spec import ResourceSpec


class Own(Resource):
    """A resource whose methods do what the spec says."""

    async def start(self) -> None:
        pass

    async def reset(self) -> None:
        self.spec.resetting()

    async def status(self) -> Status:
        return self.spec.stating()

    async def release(self) -> None:
        self.spec.releasing()
        if self.spec.release_takes_s:
            await asyncio.sleep(self.spec.release_takes_s)


class StartsInSync(Own):
    def start(self) -> None:  # the mistake
        pass


def well() -> Status:
    return Status.HEALTHY


def fails(*_: Any) -> Any:
    raise RuntimeError("the far side is gone")


@dataclass(frozen=True, kw_only=True)
class OwnSpec(ResourceSpec[Own]):
    kind = ResourceKind("own", Own)
    resetting: Any = well
    stating: Any = well
    releasing: Any = well
    release_takes_s: float = 0.0
    capacity: int = 1


@dataclass(frozen=True, kw_only=True)
class SyncSpec(OwnSpec):
    kind = ResourceKind("own-sync", StartsInSync)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ({"resetting": fails}, "is replaced.*RuntimeError: the far side is gone"),
        ({"stating": fails}, r"is replaced.*status\(\) raised RuntimeError: the far side is gone"),
        ({"stating": dict}, r"is replaced.*status\(\) returned \{\}; return Status.HEALTHY or Status.BROKEN"),
    ],
)
async def test_why_an_instance_is_replaced_is_logged_once(mistake, told, tmp_path, caplog):
    spec = OwnSpec(**mistake)
    with caplog.at_level(logging.WARNING, "agentfly"):
        async with ResourceEngine(ledger=tmp_path) as engine:
            for number in range(3):
                await engine.release(await engine.acquire(spec, f"owner {number}"))
    (message,) = [record.getMessage() for record in caplog.records]
    assert re.search(told, message)


async def test_a_start_that_is_no_coroutine_says_what_to_write(tmp_path):
    async with ResourceEngine(ledger=tmp_path) as engine:
        with pytest.raises(ResourceStartError) as caught:
            await engine.acquire(SyncSpec(), "me")
    told = r"sync-\S+ did not start: StartsInSync.start\(\) is not a coroutine. Write `async def start\(self\)`"
    caught.match(told)


async def test_the_time_that_a_release_may_take_is_said_to_be_twice_that_of_the_spec(tmp_path, caplog):
    async with ResourceEngine(ledger=tmp_path) as engine:
        await engine.acquire(OwnSpec(release_takes_s=0.5, release_timeout_s=0.01), "me")
    assert "with a limit of twice its release_timeout_s, took longer than its limit of 0.02 s" in caplog.text
