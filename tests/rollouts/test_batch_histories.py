"""Long random histories of batches: nothing is lost, delivered twice, or left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import group_reward
from agentfly.agents.tool_decorator import tool
from agentfly.contexts.context import Context
from agentfly.core.errors import ResourceStartError, UsageError
from agentfly.core.events import EventStream, RolloutFinished, RolloutStarted
from agentfly.core.task import Task
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.rollouts.failure_budget import FailureBudgetExceeded
from agentfly.rollouts.rollout_record import RolloutRecord
from agentfly.rollouts.runner import Runner
from agentfly.testing.fake_resource import FakeBackend, FakeSpec
from tests.support.virtual_time import run_in_virtual_time


class History:
    """Random users of one runner, and what they were handed out."""

    def __init__(self, runner, chance):
        self.runner = runner
        self.chance = chance
        self.taken = Counter()  # type: ignore[var-annotated]

    def tasks(self):
        seconds = [self.chance.choice([0.0, 1.0, 3.0]) for _ in range(self.chance.randrange(4))]
        tasks = [Task(f"task {self.chance.random()}", {"seconds": each}) for each in seconds]
        return tasks if self.chance.random() < 0.5 else iter(tasks)

    async def user(self, name, record):
        chance = self.chance
        settings = {"attempts": chance.randint(1, 3), "priority": chance.randrange(2), "label": name}
        async with self.runner.batch(self.tasks(), record=record, **settings) as batch:
            with contextlib.suppress(FailureBudgetExceeded):  # where every rollout so far failed
                await self.use(batch, name)

    async def use(self, batch, name):
        for _ in range(12):
            await self.act(batch, name)
        if self.chance.random() < 0.7:
            rest = [trajectory async for trajectory in batch]
            self.take(rest)
            state = batch.progress
            assert (state.waiting, state.running, state.ready) == (0, 0, 0)
            assert state.delivered == sum(count for who, count in self.taken.items() if who.startswith(name))

    async def act(self, batch, name):
        chance = self.chance
        match chance.randrange(7):
            case 0 | 1:
                batch.add(self.tasks(), attempts=chance.choice([None, 1, 2]))
            case 2:
                await asyncio.sleep(chance.choice([0.0, 0.5, 2.0]))
            case 3:
                self.take(await batch.take(chance.randrange(3), rest="cancel" if chance.random() < 0.2 else "keep"))
            case 4:
                async for trajectory in batch:
                    self.take([trajectory])
                    if chance.random() < 0.5:
                        break
            case 5:
                try:
                    batch.cancel_group(f"{name}-{chance.randrange(8)}")
                except UsageError:
                    return
            case 6:
                reader = asyncio.create_task(batch.take(2))
                await asyncio.sleep(chance.choice([0.0, 1.0]))
                reader.cancel()
                await asyncio.wait({reader})
                if not reader.cancelled():
                    self.take(reader.result())

    def take(self, trajectories):
        for trajectory in trajectories:
            assert trajectory.finish_reason is not None
            assert trajectory.reward is None or trajectory.finish_reason != "cancelled"
            self.taken[trajectory.rollout_id] += 1


@pytest.mark.parametrize("seed", range(24))
def test_each_rollout_is_handed_out_once_at_most_and_ends_with_everything_given_back(seed, tmp_path):
    chance = random.Random(seed)
    box = FakeSpec(world=FakeBackend(), name="box", capacity=3)

    @tool
    async def use(context: Context) -> str:
        """Use the box."""
        if chance.random() < 0.1:
            raise ResourceStartError("no disk space")
        await context.acquire(box)
        await asyncio.sleep(context.task["seconds"])
        return "used"

    @group_reward
    async def ranked(responses: list[str]) -> list[float]:
        await asyncio.sleep(chance.choice([0.0, 1.0]))
        return [1.0] * len(responses)

    begun, ended = Counter(), Counter()  # type: ignore[var-annotated]

    def watch(event):
        if isinstance(event, RolloutStarted):
            begun[event.rollout_id] += 1
        elif isinstance(event, RolloutFinished):
            ended[event.rollout_id] += 1

    async def main():
        agent = Agent(model="scripted", tools=[use])
        policy = ScriptedPolicy([agent.format.write("use", {}), "Done."], seconds=0.5)
        events = EventStream()
        async with ResourceEngine(ledger=tmp_path) as engine:
            runner = Runner(
                agent,
                policy=policy,
                engine=engine,
                events=events,
                reward=ranked if seed % 2 else None,
                max_concurrent_rollouts=5,
                max_failure_rate=1.0,
            )
            with events.subscribed(watch):
                async with runner:
                    history = History(runner, chance)
                    record = RolloutRecord(tmp_path / "record.jsonl")
                    async with record.opened({}, {}), asyncio.TaskGroup() as users:
                        users.create_task(history.user("ada", record if seed % 3 else None))
                        users.create_task(history.user("bob", None))
                assert not [one for pool in engine.snapshot().pools for one in pool.instances if one.owners]
                assert not [pool.queue for pool in engine.snapshot().pools if pool.queue]
            return history.taken

    taken = run_in_virtual_time(main())
    assert begun == ended
    assert set(taken.values()) <= {1}
    assert set(begun.values()) <= {1}
