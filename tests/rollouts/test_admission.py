"""When rollouts begin: as many as may, fewer while resources are short, and evaluation before training."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.reward import reward
from agentfly.agents.tool import tool
from agentfly.contexts.context import Context
from agentfly.errors import ToolDefinitionError
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.scope import Scope
from agentfly.rollouts.admission import Admission, Guest
from agentfly.rollouts.run import evaluate
from agentfly.rollouts.runner import Runner
from agentfly.task import Task
from agentfly.testing.fake_resource import FakeSpec, FakeWorld
from agentfly.testing.virtual_time import run_in_virtual_time


def spec(name, capacity=1, **fields):
    return FakeSpec(world=FakeWorld(), name=name, capacity=capacity, **fields)


@dataclass
class Hall:
    """Rollouts at the door of an admission, which note when they have begun."""

    admission: Admission
    begun: list[int] = field(default_factory=list)
    ends: dict[int, asyncio.Event] = field(default_factory=dict)
    guests: dict[int, Guest] = field(default_factory=dict)
    left: Callable[[], object] = bool  # called when one leaves, at once

    def arrive(self, number):
        self.ends[number] = asyncio.Event()
        return asyncio.create_task(self.stay(number))

    async def stay(self, number):
        async with self.admission.turn() as self.guests[number]:
            self.begun.append(number)
            await self.ends[number].wait()
        self.left()


async def test_no_more_begin_than_may_run_and_in_the_order_of_arrival():
    hall = Hall(Admission(2))
    tasks = [hall.arrive(number) for number in range(4)]
    await asyncio.sleep(0)
    assert hall.begun == [0, 1]
    hall.ends[1].set()
    await tasks[1]
    await asyncio.sleep(0)
    assert hall.begun == [0, 1, 2]
    for end in hall.ends.values():
        end.set()
    await asyncio.gather(*tasks)


async def test_a_line_that_grows_beyond_the_places_lets_fewer_begin_and_one_that_empties_lets_more():
    hall, box = Hall(Admission(6)), spec("box", capacity=2)
    tasks = [hall.arrive(number) for number in range(12)]
    await asyncio.sleep(0.01)
    assert hall.begun == [0, 1, 2, 3, 4, 5]
    waits = [hall.guests[number].notice((box,), Scope.ROLLOUT) for number in range(6)]
    for wait in waits:
        wait.__enter__()  # the third in line and those after it find two before them: the limit falls to two
    for number in range(3):
        waits[number].__exit__(None, None, None)
        hall.ends[number].set()
    await asyncio.sleep(0.01)
    assert hall.begun == [0, 1, 2, 3, 4, 5]  # three could run, but three are ahead
    waits[3].__exit__(None, None, None)
    waits[4].__exit__(None, None, None)
    await asyncio.sleep(0.01)
    assert hall.begun == [0, 1, 2, 3, 4, 5, 6]
    waits[5].__exit__(None, None, None)  # the line is empty: one more may be ahead
    await asyncio.sleep(0.01)
    assert hall.begun == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    for end in hall.ends.values():
        end.set()
    await asyncio.sleep(0.01)
    assert hall.begun == list(range(12))
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("admitted", [False, True])
async def test_who_is_cancelled_at_the_door_takes_nobodys_place(admitted):
    hall = Hall(Admission(1))
    first, second, third = (hall.arrive(number) for number in range(3))
    await asyncio.sleep(0)
    if admitted:
        hall.left = second.cancel  # it is let in, and not there to notice
        hall.ends[0].set()
        await first
    else:
        second.cancel()
        await asyncio.wait({second})
        hall.ends[0].set()
    await asyncio.sleep(0.01)
    assert hall.begun == [0, 2]
    hall.ends[2].set()
    await third


@pytest.mark.parametrize(("fields", "limited"), [({"max_concurrency": 1}, True), ({}, False)])
async def test_places_of_a_shared_resource_are_the_seats_of_its_replicas(fields, limited):
    hall, judge = Hall(Admission(4)), spec("judge", capacity=2, replicas=2, **fields)
    tasks = [hall.arrive(number) for number in range(5)]
    await asyncio.sleep(0.01)
    with contextlib.ExitStack() as waits:
        for number in range(4):
            waits.enter_context(hall.guests[number].notice((judge,), Scope.GLOBAL))
        hall.ends[0].set()
        await asyncio.sleep(0.01)
        assert (4 in hall.begun) is not limited
    for end in hall.ends.values():
        end.set()
    await asyncio.gather(*tasks)


# --- in whole runs ----------------------------------------------------------------------------------------------------


def in_virtual_time(scene, tmp_path):
    async def main():
        async with ResourceEngine(ledger=tmp_path) as engine:
            return await scene(engine)

    return run_in_virtual_time(main())


def agent_with(*tools, **fields):
    return Agent(model="scripted", tools=tools, **fields)


def calling(agent, *names):
    return ScriptedPolicy([*(agent.format.write(name, {}) for name in names), "Done."], seconds=1)


def using(box, name="use", seconds=5.0, **settings):
    async def use(context: Context) -> str:
        """Use it."""
        await context.acquire(box)
        await asyncio.sleep(seconds)
        return "used"

    return tool(name=name, **settings)(use)


def test_while_the_pool_is_short_few_rollouts_stand_in_line_and_the_pool_is_never_idle(tmp_path):
    box = spec("box", capacity=4)

    async def scene(engine):
        agent = agent_with(using(box))
        lengths = []

        class Policy(ScriptedPolicy):
            async def generate(self, prompt_ids, params, *, rollout_id, images=()):
                pools = engine.snapshot().pools
                lengths.append(len(pools[0].queue) if pools else 0)
                return await super().generate(prompt_ids, params, rollout_id=rollout_id)

        policy = Policy([agent.format.write("use", {}), "Done."], seconds=1)
        async with Runner(agent, policy=policy, engine=engine, max_concurrent_rollouts=16) as runner:
            results = await runner.collect([Task(f"t{number}") for number in range(64)])
        assert all(result.reward is None and not result.infrastructure_failed for result in results)
        return lengths, asyncio.get_running_loop().time()

    lengths, seconds = in_virtual_time(scene, tmp_path)
    assert max(lengths[-60:]) <= 5  # about as many as there are boxes, where sixteen could run
    assert seconds == pytest.approx(64 / 4 * 6 + 1)  # five seconds of use and the last word, and one before it all


def test_evaluation_goes_before_prefetched_training_rollouts_and_needs_none_of_them_to_be_read(tmp_path):
    box = spec("box", capacity=8)

    async def scene(engine):
        agent = agent_with(using(box))
        async with Runner(agent, policy=calling(agent, "use"), engine=engine, max_concurrent_rollouts=64) as runner:
            training = runner.stream([Task(f"t{number}") for number in range(64)])
            await anext(training)  # the other 63 go on without being asked for
            began = asyncio.get_running_loop().time()
            held_out = [Task(f"e{number}") for number in range(8)]
            await evaluate(agent, held_out, policy=calling(agent, "use"), engine=engine)
            took = asyncio.get_running_loop().time() - began
            waiting = sum(len(pool.queue) for pool in engine.snapshot().pools)
            await asyncio.sleep(1000)
            assert not any(instance.owners for pool in engine.snapshot().pools for instance in pool.instances)
            await training.aclose()
        return took, waiting

    took, waiting = in_virtual_time(scene, tmp_path)
    assert waiting > 0  # training still waits
    assert took <= 1 + 2 * 6 + 1


def test_many_rollouts_that_need_two_pools_in_opposite_order_all_finish_if_the_tools_say_so(tmp_path):
    box, judge = spec("box", capacity=2), spec("judge", capacity=2)

    async def scene(engine):
        agents = {}
        for declared in (True, False):
            tools = [
                using(needed, name, resources=[needed] if declared else [])
                for needed, name in ((box, "first"), (judge, "second"))
            ]
            agents[declared] = agent_with(*tools)
        failed = {}
        for declared, agent in agents.items():
            orders = {True: ("first", "second"), False: ("second", "first")}
            turns = {
                even: [*(agent.format.write(name, {}) for name in names), "Done."] for even, names in orders.items()
            }

            def script(prompt, turn, turns=turns):
                return turns["even" in prompt][turn]

            policy = ScriptedPolicy(script, seconds=1)
            async with Runner(agent, policy=policy, engine=engine, max_failure_share=1.0) as runner:
                tasks = [Task("even" if number % 2 else "odd") for number in range(8)]
                results = await runner.collect(tasks)
            failed[declared] = [result.failure.kind for result in results if result.failure]
        return failed

    failed = in_virtual_time(scene, tmp_path)
    assert failed[True] == []
    assert set(failed[False]) == {"DeadlockBroken"}  # undeclared, a circle is found and broken


def test_needs_may_come_from_the_task_and_the_reward_and_are_got_in_one_step(tmp_path):
    world = FakeWorld()
    grader = spec("grader")

    def image_of(task):
        return [FakeSpec(world=world, name=task["image"])]

    @tool(resources=image_of)
    async def work(context: Context) -> str:
        """Work in the task's image."""
        box = await context.acquire(image_of(context.task)[0])
        return box.spec.name

    @reward(resources=[grader])
    async def graded(context: Context) -> float:
        await context.acquire(grader)
        return 1.0

    async def scene(engine):
        agent = agent_with(work)
        policy = calling(agent, "work")
        async with Runner(agent, policy=policy, engine=engine, reward=graded, max_failure_share=1.0) as runner:
            return await runner.collect([Task("a", {"image": "red"}), Task("b", {"image": "blue"}), Task("c")])

    red, blue, without = in_virtual_time(scene, tmp_path)
    assert [one.turns[0].results[0].observation for one in (red, blue)] == ["red", "blue"]
    assert [red.reward, blue.reward, without.reward] == [1.0, 1.0, None]
    assert without.failure.kind == ToolDefinitionError.__name__
    assert "KeyError" in without.failure.message
    assert grader.world.count("start") == 1


@pytest.mark.parametrize("wrong", ["a box", 3, [3], spec("box"), None])
def test_what_is_no_list_of_specs_is_no_need(wrong):
    with pytest.raises(ToolDefinitionError, match="resources= is to be a list of resource specs"):
        using(spec("box"), resources=wrong)
