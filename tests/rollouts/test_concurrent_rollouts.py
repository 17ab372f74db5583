"""Concurrent rollouts: delivery as they finish or in order, and the limit on their number."""

import asyncio

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.tool_decorator import tool
from agentfly.core.errors import ResourceStartError
from agentfly.core.events import EventStream, RolloutFinished
from agentfly.core.task import Task
from agentfly.core.trajectory import FinishReason
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.failure_budget import FailureBudgetExceeded
from agentfly.rollouts.run import run
from agentfly.rollouts.runner import Runner


@tool
def fail() -> str:
    """Fail as a machine does."""
    raise ResourceStartError("no disk space")


def call(name):
    return HermesFormat().write(name, {})


def agent():
    return Agent(model="scripted", tools=[fail])


async def test_a_run_that_infrastructure_spoils_stops_and_says_why():
    script = lambda prompt, turn: call("fail")  # noqa: E731
    with pytest.raises(FailureBudgetExceeded, match="no disk space"):
        await run(agent(), [f"task {i}" for i in range(40)], policy=ScriptedPolicy(script))


async def test_failures_that_come_first_do_not_stop_a_batch_that_is_sound():
    broken = lambda prompt: any(f"task {i}<" in prompt for i in range(8))  # noqa: E731
    script = lambda prompt, turn: call("fail") if broken(prompt) else "fine"  # noqa: E731
    seconds = lambda rollout_id, turn: 0.0 if int(rollout_id[2:-2]) < 8 else 0.05  # noqa: E731
    policy = ScriptedPolicy(script, seconds=seconds)
    result = await run(agent(), [f"task {i}" for i in range(64)], policy=policy, label="s")
    assert sum(t.finish_reason is FinishReason.ANSWERED for t in result.trajectories) == 56


async def test_a_single_rollout_that_fails_is_reported_rather_than_returned_empty():
    with pytest.raises(FailureBudgetExceeded, match="no disk space"):
        await run(agent(), ["go"], policy=ScriptedPolicy([call("fail")]))


async def test_attempts_at_a_task_share_a_group_and_come_back_in_order():
    seconds = lambda rollout_id, turn: 0.03 if rollout_id.endswith(".0") else 0.0  # noqa: E731
    result = await run(agent(), ["a", "b"], attempts=3, policy=ScriptedPolicy(["hi"], seconds=seconds), label="s")
    assert [(t.group_id, t.attempt) for t in result.trajectories] == [("s-0", i) for i in range(3)] + [
        ("s-1", i) for i in range(3)
    ]


async def test_trajectories_stream_as_they_finish():
    seconds = lambda rollout_id, turn: 0.05 if rollout_id == "s-0.0" else 0.0  # noqa: E731
    async with Runner(agent(), policy=ScriptedPolicy(["hi"], seconds=seconds)) as runner:
        order = [t.rollout_id async for t in runner.stream([Task("a"), Task("b")], label="s")]
    assert order == ["s-1.0", "s-0.0"]


async def test_no_more_rollouts_run_at_a_time_than_allowed():
    running = most = 0

    class Counting(ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await super().generate(prompt_ids, sampling, rollout_id=rollout_id)
            finally:
                running -= 1

    policy = Counting(["hi"], seconds=0.001)
    result = await run(agent(), ["go"], attempts=20, policy=policy, max_concurrent_rollouts=3)
    assert len(result.trajectories) == 20
    assert most == 3


async def test_leaving_a_stream_cancels_what_still_runs():
    stopped = []

    class Watching(ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            try:
                return await super().generate(prompt_ids, sampling, rollout_id=rollout_id)
            except asyncio.CancelledError:
                stopped.append(rollout_id)
                raise

    seconds = lambda rollout_id, turn: 0.0 if rollout_id == "s-0.0" else 60.0  # noqa: E731
    async with Runner(agent(), policy=Watching(["hi"], seconds=seconds)) as runner:
        stream = runner.stream([Task("a"), Task("b"), Task("c")], label="s")
        assert (await anext(stream)).rollout_id == "s-0.0"
        await stream.aclose()  # type: ignore[attr-defined]
    assert sorted(stopped) == ["s-1.0", "s-2.0"]


async def test_a_rollout_that_is_cancelled_twice_is_still_told_to_have_finished():
    events, told, rollouts = EventStream(), [], asyncio.Queue()  # type: ignore[var-annotated]

    class Watching(ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            rollouts.put_nowait(asyncio.current_task())
            return await super().generate(prompt_ids, sampling, rollout_id=rollout_id)

    with events.subscribed(told.append):
        running = asyncio.create_task(run(agent(), ["go"], policy=Watching(["hi"], seconds=60.0), events=events))
        rollout = await rollouts.get()
        while not rollout.done():
            rollout.cancel()
            await asyncio.sleep(0)
        await asyncio.wait({running})
    assert isinstance(running.exception(), FailureBudgetExceeded)
    assert [event.finish_reason for event in told if isinstance(event, RolloutFinished)] == [FinishReason.CANCELLED]


@pytest.mark.slow
async def test_a_sync_tool_that_blocks_holds_nobody_else_up():
    import time

    @tool
    def block() -> str:
        """Block the thread for a while."""
        time.sleep(2.0)
        return "done"

    lags = []

    async def heartbeat():
        while True:
            before = asyncio.get_running_loop().time()
            await asyncio.sleep(0.01)
            lags.append(asyncio.get_running_loop().time() - before - 0.01)

    beat = asyncio.create_task(heartbeat())
    blocking = Agent(model="scripted", tools=[block])
    await run(blocking, ["go"], attempts=16, policy=ScriptedPolicy([call("block"), "end"]))
    beat.cancel()
    assert max(lags) < 1.0, "the loop stood still while sync tools ran"
