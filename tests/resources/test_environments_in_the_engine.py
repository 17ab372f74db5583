"""Environments as the engine gives them: few simulators for many rollouts, none left."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from agentfly.errors import ResourceDied
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.environments.spec import EnvironmentSpec


class Catalogue:
    """Costly to load; it counts its loads and ends in a file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.note("loaded")
        self.basket: list[str] = []

    def reset(self) -> None:
        self.basket.clear()

    def put(self, item: str) -> list[str]:
        self.basket.append(item)
        return list(self.basket)

    def crash(self) -> None:
        os._exit(1)

    def doze(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self.note("closed")

    def note(self, line: str) -> None:
        with open(self.path, "a") as file:  # noqa: PTH123  (kept to what the simulator's process has loaded)
            file.write(line + "\n")


def catalogue(path: Path, **fields: Any) -> EnvironmentSpec:
    return EnvironmentSpec(factory=Catalogue, args=(str(path),), **fields)


@pytest.mark.parametrize("runs", ["loop", "thread", "process"])
async def test_hundred_episodes_load_a_catalogue_once_a_slot_and_leave_none_open(runs: Any, tmp_path: Path) -> None:
    spec = catalogue(tmp_path / "lines", runs=runs, capacity=4)
    async with ResourceEngine(ledger=tmp_path / "state") as engine:

        async def episode(number: int) -> None:
            owner = f"rollout-{number}"
            lease = await engine.acquire(spec, owner)
            assert await lease.resource.put(owner) == [owner], "what an earlier owner left"
            assert len(await lease.resource.put("more")) == 2
            await engine.release_owner(owner)

        await asyncio.gather(*(episode(number) for number in range(100)))
    lines = (tmp_path / "lines").read_text().split()
    assert 1 <= lines.count("loaded") <= 4
    assert lines.count("closed") == lines.count("loaded")


async def test_a_crashed_simulator_is_replaced_for_the_next_owner(tmp_path: Path) -> None:
    spec = catalogue(tmp_path / "lines", runs="process", capacity=1)
    async with ResourceEngine(ledger=tmp_path / "state") as engine:
        for number in range(3):
            lease = await engine.acquire(spec, f"rollout-{number}")
            assert await lease.resource.put("item") == ["item"]
            with pytest.raises(ResourceDied):
                await lease.resource.crash()
            await engine.release_owner(f"rollout-{number}")
        lease = await engine.acquire(spec, "rollout-4")
        assert await lease.resource.put("item") == ["item"]
    assert (tmp_path / "lines").read_text().split() == ["loaded"] * 4 + ["closed"]


@pytest.mark.parametrize("runs", ["thread", "process"])
async def test_a_cancelled_owner_does_not_cost_the_simulator(runs: Any, tmp_path: Path) -> None:
    spec = catalogue(tmp_path / "lines", runs=runs, capacity=1)
    async with ResourceEngine(ledger=tmp_path / "state") as engine:
        for number in range(3):
            lease = await engine.acquire(spec, f"rollout-{number}")
            await lease.resource.put("item")
            dozing = asyncio.create_task(lease.resource.doze(0.3))
            await asyncio.sleep(0.05)
            dozing.cancel()
            await engine.release_owner(f"rollout-{number}")
        lease = await engine.acquire(spec, "last")
        assert await lease.resource.put("item") == ["item"]
    assert (tmp_path / "lines").read_text().split() == ["loaded", "closed"]
