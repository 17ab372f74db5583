"""Environments in the engine: few simulators for many rollouts, and none is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import agentfly as af
from agentfly.core.errors import ResourceDied
from agentfly.core.events import EventStream, ResourceStuck
from agentfly.resources.engine import controller, orphans
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.environments.environment import Environment
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.process import cgroups
from agentfly.resources.process.procfs import start_time


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


@pytest.mark.slow
@pytest.mark.parametrize("runs", ["loop", "thread", "process"])
async def test_500_episodes_load_a_catalogue_once_a_slot_and_leave_none_open(runs: Any, tmp_path: Path) -> None:
    spec = catalogue(tmp_path / "lines", runs=runs, capacity=8, reuse="reset")
    async with ResourceEngine(ledger=tmp_path / "state") as engine:

        async def episode(number: int) -> None:
            owner = f"rollout-{number}"
            lease = await engine.acquire(spec, owner)
            assert await lease.resource.put(owner) == [owner], "what an earlier owner left"
            assert len(await lease.resource.put("more")) == 2
            await engine.release_owner(owner)

        await asyncio.gather(*(episode(number) for number in range(500)))
        assert (tmp_path / "lines").read_text().split() == ["loaded"] * 8
    assert (tmp_path / "lines").read_text().split() == ["loaded"] * 8 + ["closed"] * 8


class Maze:
    """A game of several tasks, in which some actions are no actions."""

    def reset(self, task: int = 0) -> str:
        self.random = random.Random(task)
        return self.look()

    def look(self) -> str:
        return f"You see {self.random.randrange(10**9)} doors."

    def step(self, action: str) -> dict[str, Any]:
        if action == "wait":
            time.sleep(60)
        return {"observation": self.look(), "valid": action.startswith("move ")}


MAZE = EnvironmentSpec(factory=Maze, runs="process", capacity=2, call_timeout_s=2.0)


async def enter(maze: Any, context: af.Context) -> None:
    await maze.reset(context.task["level"])


@af.tool
async def act(action: str, context: af.Context) -> af.ToolResult:
    """Do something in the maze.

    Args:
        action: what to do.
    """
    seen = await (await context.acquire(MAZE, prepare=enter)).step(action)
    return af.ToolResult(seen["observation"], info={"valid": seen["valid"]})


@pytest.mark.slow
async def test_attempts_at_one_task_begin_alike_and_invalid_actions_can_be_counted() -> None:
    agent = af.Agent(model="tiny", tools=[act])
    moves = ["move north", "put key in/on door", "move east"]
    script = [*(agent.format.write("act", {"action": move}) for move in moves), "Done."]
    tasks = [{"prompt": "Leave the maze.", "level": level} for level in (17, 18)]
    result = await af.run(agent, tasks, attempts=4, policy=af.ScriptedPolicy(script))
    seen = [[call for turn in each.turns for call in turn.tool_results] for each in result.trajectories]
    assert len(seen) == 8
    assert len({tuple(call.observation for call in calls) for calls in seen}) == 2, "one story a task"
    assert [call.info["valid"] for calls in seen for call in calls] == [True, False, True] * 8


@pytest.mark.slow
async def test_a_step_that_hangs_fails_its_rollout_alone_and_the_instance_is_replaced() -> None:
    agent = af.Agent(model="tiny", tools=[act])

    def hangs_on_level_1(conversation: str, turn: int) -> str:
        action = "wait" if "Wait." in conversation else "move on"
        return agent.format.write("act", {"action": action}) if turn < 2 else "Done."

    tasks = [{"prompt": "Wait." if level == 1 else "Go.", "level": level} for level in range(6)]
    result = await af.run(agent, tasks, policy=af.ScriptedPolicy(hangs_on_level_1))
    finishes = {each.task.fields["level"]: each.finish_reason for each in result.trajectories}
    assert finishes == {level: "failed" if level == 1 else "answered" for level in range(6)}
    (failed,) = (each for each in result.trajectories if each.finish_reason == "failed")
    assert "step() did not end within call_timeout_s=2" in failed.failure.message


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("runs", ["thread", "process"])
async def test_a_cancelled_owner_does_not_cost_the_simulator(runs: Any, tmp_path: Path) -> None:
    spec = catalogue(tmp_path / "lines", runs=runs, capacity=1, reuse="reset")
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


class Gate:
    """Waits on its thread until it is opened."""

    opened = threading.Event()
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def wait(self) -> None:
        self.opened.wait()

    def step(self) -> str:
        return "through"


async def test_a_hanging_thread_keeps_its_place_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "STUCK_RETRY_S", (0.02, 0.05))
    Gate.opened.clear()
    Gate.made = 0
    stuck, events = asyncio.Event(), EventStream()
    spec = EnvironmentSpec(factory=Gate, runs="thread", capacity=1, call_timeout_s=0.1, release_timeout_s=0.1)
    with events.subscribed(lambda event: stuck.set() if isinstance(event, ResourceStuck) else None):
        async with ResourceEngine(ledger=tmp_path / "state", events=events) as engine:
            lease = await engine.acquire(spec, "first")
            with pytest.raises(ResourceDied):
                await lease.resource.wait()
            await engine.release_owner("first")
            waiting = asyncio.create_task(engine.acquire(spec, "second"))
            await stuck.wait()
            (pool,) = engine.snapshot().pools
            assert [instance.name for instance in pool.instances] == [lease.instance]
            assert not waiting.done()
            Gate.opened.set()
            assert await (await waiting).resource.step() == "through"
            assert Gate.made == 2


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while start_time(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    return start_time(pid) is None


OWNER = """
    import asyncio, os, sys
    from pathlib import Path
    from agentfly.resources.engine.engine import ResourceEngine
    from agentfly.resources.environments.spec import EnvironmentSpec

    class Machine:
        def pid(self):
            return os.getpid()

    async def main():
        async with ResourceEngine(ledger=Path(sys.argv[1])) as engine:
            lease = await engine.acquire(EnvironmentSpec(factory=Machine, runs="process"), "rollout")
            print(await lease.resource.pid(), lease.resource.traces["pid"], flush=True)
            await asyncio.sleep(300)

    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("keeper_alive", [True, False])
async def test_after_the_owner_was_killed_the_ledger_leads_to_an_end_of_all(tmp_path: Path, keeper_alive: bool) -> None:
    script = tmp_path / "owner.py"
    script.write_text(textwrap.dedent(OWNER))
    state = tmp_path / "state"
    owner = subprocess.Popen([sys.executable, str(script), str(state)], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert owner.stdout is not None
    pids = [int(pid) for pid in (await asyncio.to_thread(owner.stdout.readline)).split()]
    assert all(start_time(pid) is not None for pid in pids)
    if not keeper_alive:  # stopped, it cannot do its work, and a later process must
        os.kill(pids[1], signal.SIGSTOP)
    owner.kill()
    await asyncio.to_thread(owner.wait)
    owner.stdout.close()
    (removed,) = await orphans.reap_orphans(state)
    assert removed.kind == "environment"
    assert all([await asyncio.to_thread(ends, pid) for pid in pids])
    assert await orphans.reap_orphans(state) == []


async def test_where_control_groups_can_be_made_is_tried_before_the_start_and_never_in_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried_in: list[int] = []

    def try_it(home: cgroups.CgroupParent) -> bool:
        tried_in.append(threading.get_ident())
        return works(home)

    works = cgroups._probe
    monkeypatch.setattr(cgroups, "_probe", try_it)
    cgroups.writable_cgroup_parent.cache_clear()
    spec = catalogue(tmp_path / "notes", runs="process", memory="300MiB")
    async with ResourceEngine(ledger=tmp_path / "state") as engine:
        environment = Environment(spec, "direct")
        assert not tried_in
        lease = await engine.acquire(spec, "owner")
        assert set(tried_in).isdisjoint({threading.get_ident()})
        assert tried_in or cgroups.writable_cgroup_parent() is None
        assert await lease.resource.put("a") == ["a"]
    cgroups.writable_cgroup_parent.cache_clear()
    tried_in.clear()
    await environment.start()
    assert set(tried_in).isdisjoint({threading.get_ident()})
    await environment.release()
