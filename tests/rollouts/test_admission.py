"""Admission: as many rollouts begin as may, fewer while resources are short, and evaluation before training."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.reward import reward
from agentfly.agents.tool_decorator import tool
from agentfly.agents.tool_result import ToolResult
from agentfly.contexts.context import Context
from agentfly.core.errors import ToolDefinitionError
from agentfly.core.task import Task
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.resource import Scope
from agentfly.rollouts import admission as concurrency
from agentfly.rollouts.admission import Admission, AdmissionTicket, BlockReason
from agentfly.rollouts.run import evaluate, run
from agentfly.rollouts.runner import Runner
from agentfly.testing.fake_resource import FakeBackend, FakeSpec
from tests.support.virtual_time import run_in_virtual_time


def spec(name, capacity=1, **fields):
    return FakeSpec(world=FakeBackend(), name=name, capacity=capacity, **fields)


@dataclass(eq=False)
class Queue:
    """A source of numbered rollouts, which notes which have begun."""

    numbers: list[int]
    priority: int = 0
    begun: list[int] = field(default_factory=list)
    tickets: dict[int, AdmissionTicket] = field(default_factory=dict)

    @property
    def waits(self):
        return bool(self.numbers)

    def begin_next(self, ticket):
        if not self.numbers:
            return False
        number = self.numbers.pop(0)
        self.begun.append(number)
        self.tickets[number] = ticket
        return True


def test_no_more_begin_than_may_run_and_in_their_order():
    admission, queue = Admission(2), Queue([0, 1, 2, 3])
    admission.enqueue(queue)
    assert queue.begun == [0, 1]
    queue.tickets[1].release()
    queue.tickets[1].release()  # again
    assert queue.begun == [0, 1, 2]
    queue.tickets[0].release()
    queue.tickets[2].release()
    assert queue.begun == [0, 1, 2, 3]


def test_a_line_that_grows_beyond_the_places_lets_fewer_begin_and_one_that_empties_lets_more():
    admission, queue, box = Admission(6), Queue(list(range(12))), spec("box", capacity=2)
    admission.enqueue(queue)
    assert queue.begun == [0, 1, 2, 3, 4, 5]
    waits = [queue.tickets[number].waiting_for_resources((box,), Scope.ROLLOUT) for number in range(6)]
    for wait in waits:
        wait.__enter__()  # the third in line and those after it find two before them: the limit falls to two
    for number in range(3):
        waits[number].__exit__(None, None, None)
        queue.tickets[number].release()
    assert queue.begun == [0, 1, 2, 3, 4, 5]  # three could run, but three are ahead
    waits[3].__exit__(None, None, None)
    waits[4].__exit__(None, None, None)
    assert queue.begun == [0, 1, 2, 3, 4, 5, 6]
    waits[5].__exit__(None, None, None)  # the line is empty: one more may be ahead
    assert queue.begun == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    for number in range(12):
        queue.tickets[number].release()
    assert queue.begun == list(range(12))


def test_those_of_higher_priority_begin_first_and_of_equal_ones_those_that_were_asked_for_first():
    admission, first, second, urgent = Admission(1), Queue([1, 2]), Queue([3]), Queue([4, 5], priority=1)
    for queue in (first, second, urgent):
        admission.enqueue(queue)
    order = [1]
    current = first.tickets[1]
    for queue in (urgent, urgent, first, second):
        current.release()
        order.append(queue.begun[-1])
        current = queue.tickets[queue.begun[-1]]
    assert order == [1, 4, 5, 2, 3]
    first.numbers.append(6)
    second.numbers.append(7)
    admission.enqueue(second)
    admission.enqueue(first)  # it keeps the place that it had
    current.release()
    assert first.begun == [1, 2, 6]


def test_those_who_wait_for_a_resource_with_lower_priority_do_not_keep_evaluation_from_beginning():
    admission, box = Admission(8), spec("box", capacity=1)
    training, evaluation = Queue(list(range(8))), Queue([8, 9], priority=1)
    admission.enqueue(training)
    with contextlib.ExitStack() as waits:
        for ticket in list(training.tickets.values())[:4]:
            waits.enter_context(ticket.waiting_for_resources((box,), Scope.ROLLOUT))
        for ticket in list(training.tickets.values())[4:6]:
            ticket.release()
        training.numbers += [10, 11]
        admission.enqueue(training)
        admission.enqueue(evaluation)
        assert training.begun == list(range(8))  # six are ahead where five may be
        assert evaluation.begun == [8, 9]


def test_a_source_that_is_forgotten_has_nobody_let_in():
    admission, queue = Admission(1), Queue([0, 1])
    admission.enqueue(queue)
    admission.remove(queue)
    queue.tickets[0].release()
    assert queue.begun == [0]


@pytest.mark.parametrize(("fields", "limited"), [({"max_concurrency": 1}, True), ({}, False)])
def test_places_of_a_shared_resource_are_the_seats_of_its_replicas(fields, limited):
    admission, queue, judge = Admission(4), Queue(list(range(5))), spec("judge", capacity=2, replicas=2, **fields)
    admission.enqueue(queue)
    with contextlib.ExitStack() as waits:
        for number in range(4):
            waits.enter_context(queue.tickets[number].waiting_for_resources((judge,), Scope.GLOBAL))
        queue.tickets[0].release()
        assert (4 in queue.begun) is not limited


class Clock:
    """Tells the time that it is set to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_where_nobody_says_how_many_may_run_as_many_begin_as_keep_the_policy_busy():
    admission, queue = Admission(generations=4), Queue(list(range(40)))
    admission.enqueue(queue)
    assert queue.begun == [0, 1, 2, 3, 4]  # as many as it has places for, and one in line
    for number in range(5):
        queue.tickets[number].generation.__enter__()
    assert len(queue.begun) == 5
    for number in range(5):
        queue.tickets[number].generation.__exit__(None, None, None)  # to their tools, which take long
    assert len(queue.begun) == 10
    for number in range(5):
        queue.tickets[number].generation.__enter__()  # and back
    for number in (5, 6):
        with queue.tickets[number].generation:
            pass
    assert len(queue.begun) == 10  # eight are at the policy
    for number in (7, 8, 9):
        queue.tickets[number].release()  # without ever having been there
    assert len(queue.begun) == 10
    queue.tickets[0].generation.__exit__(None, None, None)
    assert len(queue.begun) == 11
    with queue.tickets[1].generation:  # several at a time, as of subagents
        assert len(queue.begun) == 11


def test_a_number_that_was_chosen_is_how_many_run_whatever_the_policy_can_do():
    admission, queue = Admission(10, generations=4), Queue(list(range(40)))
    admission.enqueue(queue)
    assert len(queue.begun) == 10


def test_training_that_keeps_the_policy_busy_does_not_keep_evaluation_from_beginning():
    admission, training, evaluation = Admission(generations=2), Queue(list(range(9))), Queue([9, 10], priority=1)
    admission.enqueue(training)
    admission.enqueue(evaluation)
    assert (training.begun, evaluation.begun) == ([0, 1, 2], [9, 10])


def test_the_time_is_told_in_which_rollouts_were_held_back_and_by_what():
    clock, box = Clock(), spec("box", capacity=1)
    admission, queue = Admission(3, generations=2, clock=clock), Queue(list(range(6)))
    admission.enqueue(queue)  # three begin, and are on their way to the policy
    clock.now = 1.0
    queue.tickets[0].generation.__enter__()
    queue.tickets[1].generation.__enter__()
    clock.now = 3.0
    queue.tickets[0].generation.__exit__(None, None, None)
    queue.tickets[1].generation.__exit__(None, None, None)
    clock.now = 7.0  # the third is alone on its way, where there would be room for two
    with (
        queue.tickets[0].waiting_for_resources((box,), Scope.ROLLOUT),
        queue.tickets[1].waiting_for_resources((box,), Scope.ROLLOUT),
    ):
        queue.tickets[2].release()
        clock.now = 15.0
    found = admission.meter.read()
    assert (found.seconds, found.rollout_seconds, found.generation_seconds) == (15.0, 7.0 * 3 + 8.0 * 2, 4.0)
    assert found.blocked_seconds == {BlockReason.POLICY: 3.0, BlockReason.LIMIT: 4.0, BlockReason.RESOURCES: 8.0}
    assert found.metrics()["concurrency/blocked_by_resources"] == pytest.approx(8 / 15)
    for number in range(6):
        if number in queue.tickets:
            queue.tickets[number].release()
    clock.now = 100.0
    assert (admission.meter.read() - found).blocked_seconds == dict.fromkeys(BlockReason, 0.0)  # nobody waits


@pytest.mark.parametrize(("free", "limit"), [(None, 4096), (2**40, 4096), (2**30, 512), (0, 64)])
def test_without_a_policy_that_says_more_memory_is_the_bound(monkeypatch, free, limit):
    monkeypatch.setattr(concurrency, "_available_bytes", lambda: free)
    assert Admission().max_concurrent == limit


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


class Busy(ScriptedPolicy):
    """A policy that makes so many generations at a time, of a second each."""

    def __init__(self, *turns, at_a_time):
        super().__init__(turns, seconds=1)
        self.max_concurrent_generations = at_a_time
        self._places = asyncio.Semaphore(at_a_time)

    async def generate(self, *args, **kwargs):
        async with self._places:
            return await super().generate(*args, **kwargs)


async def busy_run(engine, seconds, **settings):
    """A run whose tools take so long, by a policy that makes four generations at a time; its metrics and duration."""

    @tool(name="use")
    async def use() -> ToolResult:
        """Use it."""
        await asyncio.sleep(seconds)
        return ToolResult("used", reward=1.0)

    agent = agent_with(use)
    policy = Busy(agent.format.write("use", {}), "Done.", at_a_time=4)
    tasks = [Task(f"t{number}") for number in range(200)]
    result = await run(agent, tasks, policy=policy, engine=engine, **settings)
    return result.metrics, asyncio.get_running_loop().time()


@pytest.mark.parametrize("seconds", [0.0, 1.0, 20.0])
def test_however_long_tools_take_as_many_rollouts_run_as_keep_the_policy_busy(tmp_path, caplog, seconds):
    metrics, took = in_virtual_time(lambda engine: busy_run(engine, seconds), tmp_path)
    assert took <= 200 * 2 / 4 + seconds + 2  # hardly more than the policy's own time
    assert metrics["concurrency/rollouts"] <= 4 * (2 + seconds) / 2 + 4  # and no more rollouts than that takes
    assert metrics["concurrency/blocked_by_policy"] > 0.5
    assert metrics["concurrency/blocked_by_limit"] == 0.0
    assert not caplog.records


def test_a_limit_that_makes_a_run_slower_is_told(tmp_path, caplog):
    metrics, took = in_virtual_time(lambda engine: busy_run(engine, 8.0, max_concurrent_rollouts=4), tmp_path)
    assert took == pytest.approx(200 * 10 / 4)
    assert metrics["concurrency/blocked_by_limit"] > 0.7  # else all four are at the policy
    [told] = [record.getMessage() for record in caplog.records]
    assert "max_concurrent_rollouts=4" in told
    assert "1 concurrent generations on average, and the policy can make 4" in told


def test_a_limit_of_which_nobody_knows_whether_it_matters_is_told_by_the_metrics_alone(tmp_path, caplog):
    @reward
    async def finished(trajectory) -> float:
        return 1.0

    async def scene(engine):
        agent = agent_with(using(spec("box", capacity=99)))
        tasks = [Task(f"t{number}") for number in range(20)]
        settings = {"policy": calling(agent, "use"), "engine": engine, "max_concurrent_rollouts": 2}
        return (await run(agent, tasks, reward=finished, **settings)).metrics

    assert in_virtual_time(scene, tmp_path)["concurrency/blocked_by_limit"] > 0.5
    assert not caplog.records


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
            await training.aclose()  # type: ignore[attr-defined]
        return took, waiting

    took, waiting = in_virtual_time(scene, tmp_path)
    assert waiting > 0  # training still waits
    assert took <= 1 + 2 * 6 + 1


def test_evaluation_on_the_same_runner_goes_before_training_that_holds_every_resource(tmp_path):
    box = spec("box", capacity=8)

    async def scene(engine):
        agent = agent_with(using(box))
        policy = ScriptedPolicy(lambda prompt, turn: agent.format.write("use", {}) if turn == 0 else "Done.", seconds=1)
        async with Runner(agent, policy=policy, engine=engine, max_concurrent_rollouts=16) as runner:
            training = runner.batch([Task(f"t{number}") for number in range(64)], label="training")
            await asyncio.sleep(2)  # eight use the boxes, the others wait for one
            held_out = [Task(f"e{number}") for number in range(8)]
            began = asyncio.get_running_loop().time()
            results = await runner.collect(held_out, priority=1)
            return asyncio.get_running_loop().time() - began, training.progress, results

    took, training, results = in_virtual_time(scene, tmp_path)
    assert [result.finish_reason for result in results] == ["answered"] * 8
    assert took <= 4 + 6 + 6 + 2  # the boxes come back within four seconds, and training gets none in between
    assert training.waiting >= 32


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
            async with Runner(agent, policy=policy, engine=engine, max_failure_rate=1.0) as runner:
                tasks = [Task("even" if number % 2 else "odd") for number in range(8)]
                results = await runner.collect(tasks)
            failed[declared] = [result.failure.kind for result in results if result.failure]
        return failed

    failed = in_virtual_time(scene, tmp_path)
    assert failed[True] == []
    assert set(failed[False]) == {"DeadlockBroken"}  # undeclared, a circle is found and broken


def test_needs_may_come_from_the_task_and_the_reward_and_are_got_in_one_step(tmp_path):
    world = FakeBackend()
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
        async with Runner(agent, policy=policy, engine=engine, reward=graded, max_failure_rate=1.0) as runner:
            return await runner.collect([Task("a", {"image": "red"}), Task("b", {"image": "blue"}), Task("c")])

    red, blue, without = in_virtual_time(scene, tmp_path)
    assert [one.turns[0].tool_results[0].observation for one in (red, blue)] == ["red", "blue"]
    assert [red.reward, blue.reward, without.reward] == [1.0, 1.0, None]
    assert without.failure.kind == ToolDefinitionError.__name__
    assert "KeyError" in without.failure.message
    assert grader.world.count("start") == 1


@pytest.mark.parametrize("wrong", ["a box", 3, [3], spec("box"), None])
def test_what_is_no_list_of_specs_is_no_need(wrong):
    with pytest.raises(ToolDefinitionError, match="resources= is to be a list of resource specs"):
        using(spec("box"), resources=wrong)
