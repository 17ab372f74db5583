"""Batches: rollouts are delivered as they finish, more can be added, and the caller may stop early."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
from dataclasses import replace
from typing import Any

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.tool_decorator import tool
from agentfly.contexts.context import Context
from agentfly.core.errors import ConfigError, UsageError
from agentfly.core.task import Task
from agentfly.core.trajectory import FinishReason
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.rollouts.batch import Batch, BatchProgress
from agentfly.rollouts.rollout_tasks import CANCEL_GRACE_S
from agentfly.rollouts.runner import Runner
from agentfly.rollouts.turn_generator import TokenTurnGenerator
from agentfly.testing.fake_resource import FakeBackend, FakeSpec
from tests.support.virtual_time import run_in_virtual_time

BOX = FakeSpec(world=FakeBackend(), name="box", capacity=100)


@tool
async def use(context: Context) -> str:
    """Use the box for a while."""
    await context.acquire(BOX)
    await asyncio.sleep(context.task.fields.get("seconds", 1.0))
    return "used"


AGENT = Agent(model="scripted", tools=[use])
TURNS = [HermesFormat().write("use", {}), "Done."]


def tasks(*seconds):
    return [Task(f"task {number}", {"seconds": each}) for number, each in enumerate(seconds)]


def in_virtual_time(scene, tmp_path, *, policy=None, **settings):
    """Run ``scene(runner)``. Whatever it does, no box is held once it has ended."""

    async def main():
        async with (
            ResourceEngine(ledger=tmp_path) as engine,
            Runner(AGENT, policy=policy or ScriptedPolicy(TURNS), engine=engine, **settings) as runner,
        ):
            result = await scene(runner)
            held = [instance for pool in engine.snapshot().pools for instance in pool.instances if instance.owners]
            return result, held

    result, held = run_in_virtual_time(main())
    assert not held
    return result


def test_more_can_be_added_while_what_there_is_runs_and_comes_later(tmp_path):
    async def scene(runner):
        order = []
        async with runner.batch(tasks(1, 3), label="b") as batch:
            async for trajectory in batch:
                order.append(trajectory.rollout_id)
                if len(order) == 1:
                    batch.add(tasks(1), attempts=2)
            assert batch.progress == BatchProgress(waiting=0, running=0, ready=0, delivered=4, cancelled=0)
            batch.add(tasks(1))  # also after the iteration has ended
            order += [trajectory.rollout_id async for trajectory in batch]
        return order

    assert in_virtual_time(scene, tmp_path) == ["b-0.0", "b-2.0", "b-2.1", "b-1.0", "b-3.0"]


def test_the_first_groups_to_become_whole_are_enough_and_the_rest_comes_first_next_time(tmp_path):
    async def scene(runner):
        async with runner.batch(tasks(5, 1, 9, 2), attempts=2, label="b") as batch:
            first = await batch.take(groups=2)
            state = batch.progress
            batch.add(tasks(2))
            second = await batch.take(groups=2)
            rest = await batch.take(groups=10)
        return [[trajectory.rollout_id for trajectory in taken] for taken in (first, second, rest)], state

    taken, state = in_virtual_time(scene, tmp_path)
    assert taken == [["b-1.0", "b-1.1", "b-3.0", "b-3.1"], ["b-4.0", "b-4.1", "b-0.0", "b-0.1"], ["b-2.0", "b-2.1"]]
    assert (state.running, state.ready, state.delivered, state.unclaimed) == (4, 0, 4, 4)


def test_what_is_more_than_enough_can_be_cancelled_and_is_never_trained(tmp_path):
    async def scene(runner):
        async with runner.batch(tasks(1, 60, 60), attempts=2, label="b") as batch:
            taken = await batch.take(groups=1, rest="cancel")
            took = asyncio.get_running_loop().time()
            return taken, took, batch.progress

    taken, took, state = in_virtual_time(scene, tmp_path, max_concurrent_rollouts=5)
    assert took < 2
    begun = ["b-0.0", "b-0.1", "b-1.0", "b-1.1", "b-2.0", "b-2.1"]
    assert [trajectory.rollout_id for trajectory in taken] == begun
    assert [trajectory.finish_reason for trajectory in taken] == [FinishReason.ANSWERED] * 2 + [
        FinishReason.CANCELLED
    ] * 4
    assert not any(trajectory.trainable for trajectory in taken[2:])
    assert (state.waiting, state.cancelled, state.unclaimed) == (0, 4, 0)


def test_groups_come_whole_each_once_and_in_the_order_of_their_attempts(tmp_path):
    seconds = {"b-0.0": 5.0, "b-1.2": 1.0}
    policy = ScriptedPolicy(["Done."], seconds=lambda rollout_id, turn: seconds.get(rollout_id, 0.0))

    async def scene(runner):
        async with runner.batch(tasks(1, 1, 1), attempts=3, label="b") as batch:
            alone = await anext(batch)
            return alone.group_id, [[trajectory.rollout_id for trajectory in group] async for group in batch.groups()]

    alone, groups = in_virtual_time(scene, tmp_path, policy=policy)
    whole = [[f"b-{number}.{attempt}" for attempt in range(3)] for number in (2, 1, 0)]
    assert groups == [group for group in whole if not group[0].startswith(alone)]
    assert len(groups) == 2


@pytest.mark.parametrize("when", [0.0, 0.5])
def test_a_cancelled_group_ends_gives_back_what_it_had_and_leaves_the_others_alone(tmp_path, when):
    async def scene(runner):
        async with runner.batch(tasks(60, 1, 2), attempts=3, label="b") as batch:
            await asyncio.sleep(when)
            batch.cancel_group("b-0")
            batch.cancel_group("b-0")  # again, before it has ended
            found = [trajectory async for trajectory in batch]
            with pytest.raises(UsageError, match="no group 'b-0'"):
                batch.cancel_group("b-0")
            return found, asyncio.get_running_loop().time()

    found, took = in_virtual_time(scene, tmp_path)
    ends = {trajectory.rollout_id: trajectory.finish_reason for trajectory in found}
    assert [ends.pop(f"b-0.{attempt}") for attempt in range(3)] == [FinishReason.CANCELLED] * 3
    assert set(ends.values()) == {FinishReason.ANSWERED}
    assert len(ends) == 6
    assert took < 3


@pytest.mark.parametrize("number", ["²", "٣", "03", "9" * 5000], ids=["square", "Arabic", "zero", "long"])
def test_a_name_that_no_group_can_have_is_refused_while_more_groups_may_come(tmp_path, number):
    async def scene(runner):
        async with runner.batch((task for task in tasks(*[1] * 14)), label="b") as batch:
            with pytest.raises(UsageError, match="no group"):
                batch.cancel_group(f"b-{number}")
            return len([trajectory async for trajectory in batch])

    assert in_virtual_time(scene, tmp_path, max_concurrent_rollouts=1) == 14


def test_a_batch_that_cannot_be_closed_holds_up_the_closing_of_no_other(tmp_path, monkeypatch):
    closed: list[Any] = []

    async def close(batch):
        if batch.add_label == "broken":
            raise RuntimeError("no")
        await asyncio.sleep(1)
        await original(batch)
        closed.append(batch.add_label)

    async def main():
        async with (
            ResourceEngine(ledger=tmp_path) as engine,
            Runner(AGENT, policy=ScriptedPolicy(TURNS), engine=engine) as runner,
        ):
            for label in ("one", "broken", "two"):
                runner.batch(tasks(5), label=label).add_label = label  # type: ignore[attr-defined]
            await asyncio.sleep(0.5)

    original = Batch.close
    monkeypatch.setattr(Batch, "close", close)
    with pytest.raises(RuntimeError, match="no"):
        run_in_virtual_time(main())
    assert sorted(closed) == ["one", "two"]


def test_a_group_that_waits_can_be_cancelled_and_never_begins(tmp_path):
    async def scene(runner):
        async with runner.batch((task for task in tasks(*[1] * 14)), attempts=2, label="b") as batch:
            batch.cancel_group("b-2")
            batch.cancel_group("b-12")  # of which nothing was read yet
            found = [trajectory.group_id async for trajectory in batch]
            for wrong in ("b-14", "b-2", "c-1", "b-x", "b-", "b-²", "b-٣", "b-03", "b--3", f"b-{'9' * 5000}"):
                with pytest.raises(UsageError, match="no group"):
                    batch.cancel_group(wrong)
            return found

    wanted = [f"b-{number}" for number in range(14) for _ in range(2) if number not in (2, 12)]
    assert in_virtual_time(scene, tmp_path, max_concurrent_rollouts=1) == wanted


def test_a_cancelled_group_does_not_count_as_one_that_is_enough(tmp_path):
    async def scene(runner):
        async with runner.batch(tasks(60, 1, 2), label="b") as batch:
            batch.cancel_group("b-0")
            return [(trajectory.group_id, trajectory.finish_reason) for trajectory in await batch.take(groups=2)]

    found = in_virtual_time(scene, tmp_path)
    assert found == [("b-0", "cancelled"), ("b-1", "answered"), ("b-2", "answered")]


def test_leaving_the_iteration_keeps_the_rest_running_and_leaving_the_block_ends_it(tmp_path):
    async def scene(runner):
        async with runner.batch(tasks(1, 5, 60), label="b") as batch:
            async for _ in batch:
                break
            await asyncio.sleep(10)
            assert batch.progress.ready == 1
        with pytest.raises(UsageError, match="closed"):
            batch.add(tasks(1))
        return [trajectory.rollout_id async for trajectory in batch]

    assert in_virtual_time(scene, tmp_path) == ["b-1.0"]


def test_cancelling_whoever_waits_for_a_stream_at_any_moment_gives_everything_back(tmp_path):
    async def reads(runner):
        async for _ in runner.stream(tasks(*range(1, 9)), attempts=2):
            await asyncio.sleep(0.25)

    async def scene(runner):
        for tick in range(40):
            reader = asyncio.create_task(reads(runner))
            await asyncio.sleep(tick * 0.25)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            assert len(asyncio.all_tasks()) < 40  # and nothing is left that runs
            await asyncio.sleep(0)
        return

    in_virtual_time(scene, tmp_path, max_concurrent_rollouts=6)


def test_leaving_the_runner_ends_the_batches_that_were_left_open(tmp_path):
    world, spec = FakeBackend(), None
    spec = FakeSpec(world=world, name="own")

    @tool
    async def hold(context: Context) -> str:
        """Hold it."""
        await context.acquire(spec)
        await asyncio.sleep(1000)
        return "held"

    async def main():
        agent = Agent(model="scripted", tools=[hold])
        policy = ScriptedPolicy([agent.format.write("hold", {})])
        async with ResourceEngine(ledger=tmp_path) as engine:
            async with Runner(agent, policy=policy, engine=engine) as runner:
                runner.batch(tasks(1, 1))
                await asyncio.sleep(1)
                assert world.alive
            return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) < 10


def test_a_tool_that_takes_no_notice_of_being_cancelled_does_not_keep_the_others_from_ending(tmp_path, caplog):
    @tool
    async def stubborn() -> str:
        """Go on whatever comes."""
        loop = asyncio.get_running_loop()
        end = loop.time() + 1000
        while loop.time() < end:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(end - loop.time())
        return "at last"

    async def main():
        agent = Agent(model="scripted", tools=[stubborn])
        policy = ScriptedPolicy([agent.format.write("stubborn", {}), "Done."])
        async with Runner(agent, policy=policy) as runner, runner.batch(tasks(1), label="b") as batch:
            await asyncio.sleep(1)
            await batch.cancel()
            return [(t.rollout_id, t.finish_reason) async for t in batch], asyncio.get_running_loop().time()

    found, took = run_in_virtual_time(main())
    assert found == [("b-0.0", "cancelled")]
    assert took < 2 * CANCEL_GRACE_S + 2
    assert "ignore their cancellation" in caplog.text


def test_tasks_are_read_as_they_are_needed_and_there_may_be_no_end_of_them(tmp_path):
    read = itertools.count()

    async def scene(runner):
        async with runner.batch((Task(f"task {number}", {"seconds": 1}) for number in read), label="b") as batch:
            taken = [await anext(batch) for _ in range(50)]
            assert batch.progress.waiting is None
            assert next(read) <= 50 + 8 + 2 * 8 + 1
            return {trajectory.group_id for trajectory in taken}

    assert in_virtual_time(scene, tmp_path, max_concurrent_rollouts=8) >= {f"b-{number}" for number in range(43)}


def test_tasks_that_cannot_be_read_end_the_batch_with_their_own_error(tmp_path):
    def broken():
        yield from tasks(1, 1)
        raise OSError("the disk is gone")

    async def scene(runner):
        with pytest.raises(OSError, match="the disk is gone"):
            await runner.collect(broken())

    in_virtual_time(scene, tmp_path, max_concurrent_rollouts=1)


@pytest.mark.parametrize("attempts", [0, -1, 1.5])
def test_a_number_of_attempts_that_is_none_is_refused(tmp_path, attempts):
    async def scene(runner):
        with pytest.raises(ConfigError, match="it must be a whole number of at least 1"):
            runner.batch(tasks(1), attempts=attempts)

    in_virtual_time(scene, tmp_path)


def test_thirty_of_thirty_two_rollouts_are_kept_where_one_raises_and_one_breaks_at_its_end(tmp_path, monkeypatch):
    class Policy(ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            if rollout_id == "b-7.0":
                await asyncio.sleep(1)
                raise RuntimeError("the sampler broke")
            return await super().generate(prompt_ids, sampling, rollout_id=rollout_id, images=images)

    finish, calls = TokenTurnGenerator.finish, itertools.count()

    def break_once(speaker):
        if next(calls) == 20:
            raise ValueError("tokens cannot be merged")
        finish(speaker)

    monkeypatch.setattr(TokenTurnGenerator, "finish", break_once)

    async def scene(runner):
        return await runner.collect(tasks(*[2] * 32), label="b")

    found = in_virtual_time(scene, tmp_path, policy=Policy(TURNS))
    failures = [trajectory.failure for trajectory in found if trajectory.failure]
    assert [trajectory.finish_reason for trajectory in found].count(FinishReason.ANSWERED) == 30
    assert {failure.message for failure in failures} == {"the sampler broke", "tokens cannot be merged"}
    assert all("Traceback" in failure.traceback and "test_batch.py" in failure.traceback for failure in failures)


@pytest.mark.parametrize("error", [ValueError("no room"), asyncio.CancelledError(), BaseException("unheard of")])
def test_what_breaks_outside_a_rollouts_own_care_ends_it_alone(tmp_path, error):
    class Forgetful(ScriptedPolicy):
        def release_rollout(self, rollout_id):
            if rollout_id == "b-1.0":
                raise error

    async def scene(runner):
        return await runner.collect(tasks(1, 1, 1, 1), label="b")

    found = in_virtual_time(scene, tmp_path, policy=Forgetful(TURNS))
    assert [trajectory.finish_reason for trajectory in found] == ["answered", "failed", "answered", "answered"]
    assert found[1].failure.kind == type(error).__name__
    assert not found[1].trainable


def test_rollouts_see_the_context_variables_of_whoever_asked_for_them(tmp_path):
    asked_by = contextvars.ContextVar("asked_by", default="nobody")
    seen = {}

    class Policy(ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            seen[rollout_id] = asked_by.get()
            return await super().generate(prompt_ids, sampling, rollout_id=rollout_id, images=images)

    async def ask(runner, name):
        asked_by.set(name)
        await runner.collect(tasks(1, 1), label=name)

    async def scene(runner):
        await asyncio.gather(ask(runner, "ada"), ask(runner, "bob"))

    in_virtual_time(scene, tmp_path, policy=Policy(TURNS), max_concurrent_rollouts=1)
    assert seen == {"ada-0.0": "ada", "ada-1.0": "ada", "bob-0.0": "bob", "bob-1.0": "bob"}


def test_generations_have_the_priority_of_their_batch(tmp_path):
    asked = []

    class Noting(ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            asked.append((rollout_id.partition("-")[0], sampling.priority, sampling.temperature))
            return await super().generate(prompt_ids, sampling, rollout_id=rollout_id, images=images)

    async def scene(runner):
        await runner.collect(tasks(0.1), label="training")
        await runner.collect(
            tasks(0.1), label="evaluation", priority=1, sampling=lambda params: replace(params, temperature=0.0)
        )

    in_virtual_time(scene, tmp_path, policy=Noting(TURNS))
    assert asked == [("training", 0, 1.0)] * 2 + [("evaluation", 1, 0.0)] * 2


async def test_whoever_waits_for_what_is_closed_meanwhile_is_told_and_never_takes_a_part_for_the_whole():
    never = ScriptedPolicy(["x"], seconds=lambda rollout_id, turn: 60.0)
    async with asyncio.timeout(20):
        async with Runner(Agent(model="scripted"), policy=never) as runner:
            batch = runner.batch(tasks(1), label="b")
            waiting = [asyncio.ensure_future(anext(batch)), asyncio.ensure_future(batch.take(1))]
            collecting = asyncio.ensure_future(runner.collect(tasks(1)))
            await asyncio.sleep(0.05)
            await batch.close()
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        outcomes += await asyncio.gather(collecting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [UsageError] * 3
    assert all("closed" in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize(("wrong", "told"), [(5, "5 is no task"), (None, "None is no task"), ({"x": 1}, "'prompt'")])
async def test_what_is_no_task_is_named_and_hides_nothing_behind_it(wrong, told):
    async with Runner(Agent(model="scripted"), policy=ScriptedPolicy(["x"])) as runner:
        with pytest.raises(UsageError, match=told):
            await runner.collect(iter([Task("a"), wrong, Task("b")]))
