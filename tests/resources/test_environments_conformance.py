"""Environments pass the conformance suite in the loop, on a thread and in a process, with and without a reset."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from agentfly.resources.environments.environment import Environment
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.testing.resource_conformance import check_resource


class Shelf:
    """A simulator that is made anew for each owner."""

    def __init__(self) -> None:
        self.items: list[str] = []

    def put(self, item: str) -> None:
        self.items.append(item)

    def count(self) -> int:
        return len(self.items)


class ClearedShelf(Shelf):
    """One that clears itself."""

    def reset(self) -> None:
        self.items.clear()


async def leave_something(shelf: Environment) -> None:
    await shelf.put("something")


async def is_empty(shelf: Environment) -> bool:
    return bool(await shelf.count() == 0)


@pytest.mark.slow
@pytest.mark.parametrize("runs", ["loop", "thread", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize("factory", [Shelf, ClearedShelf])
async def test_environments_keep_the_contract(factory: Any, runs: Literal["loop", "thread", "process"]) -> None:
    await check_resource(EnvironmentSpec(factory=factory, runs=runs), dirty=leave_something, is_clean=is_empty)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"starts": "spawn"}, {"memory": "256MiB", "idle": "freeze"}])
async def test_environments_in_processes_keep_the_contract_however_they_are_kept(fields: dict[str, Any]) -> None:
    spec = EnvironmentSpec(factory=ClearedShelf, runs="process", **fields)
    await check_resource(spec, dirty=leave_something, is_clean=is_empty)
