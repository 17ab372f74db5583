"""Exceptions of user code that are not an `Exception`: they end one rollout at most, and never block a run."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import group_reward
from agentfly.agents.memory import Past
from agentfly.agents.reward import reward
from agentfly.agents.tool_decorator import tool
from agentfly.contexts.context import Context
from agentfly.core import signals
from agentfly.core.task import Task
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.rollouts.failure_budget import FailureBudgetExceeded
from agentfly.rollouts.runner import Runner
from agentfly.testing.fake_resource import FakeBackend, FakeSpec

ERRORS = [GeneratorExit, SystemExit, KeyboardInterrupt, asyncio.CancelledError, BaseException]

BOX = FakeSpec(world=FakeBackend(), name="box")


def script(first: str) -> ScriptedPolicy:
    return ScriptedPolicy([first, "Done."])


def call(name: str) -> ScriptedPolicy:
    return script(HermesFormat().write(name, {}))


def places(error: type[BaseException]):
    """Each place where users' code is called: an agent, its policy and reward, and what the code's failure is."""

    @tool(name="use")
    async def async_tool() -> str:
        """Use it."""
        raise error

    @tool(name="use")
    def sync_tool() -> str:
        """Use it."""
        raise error

    @tool
    class Made:
        """Made."""

        def __init__(self) -> None:
            raise error

        async def use(self) -> str:
            """Use it."""
            return "used"

    @tool
    class Closed:
        """Closed."""

        async def use(self) -> str:
            """Use it."""
            return "used"

        async def aclose(self) -> None:
            raise error

    @tool(name="use")
    async def prepared(context: Context) -> str:
        """Use it."""

        async def prepare(*_: object) -> None:
            raise error

        await context.acquire(BOX, prepare=prepare)
        return "used"

    @reward
    async def async_reward() -> float:
        raise error

    @reward
    def sync_reward() -> float:
        raise error

    @group_reward
    async def together(trajectories: list[object]) -> list[float]:
        raise error

    class Forgetful:
        async def recall(self, past: Past) -> list[object]:
            raise error

    async def answer(prompt: str, turn: int) -> str:
        raise error

    plain = Agent(model="scripted")
    return {
        "an async tool": (Agent(model="scripted", tools=[async_tool]), call("use"), None, "told"),
        "a sync tool": (Agent(model="scripted", tools=[sync_tool]), call("use"), None, "told"),
        "a constructor": (Agent(model="scripted", tools=[Made]), call("made_use"), None, "failed"),  # type: ignore[list-item]
        "aclose": (Agent(model="scripted", tools=[Closed]), call("closed_use"), None, "logged"),  # type: ignore[list-item]
        "a preparation": (Agent(model="scripted", tools=[prepared]), call("use"), None, "failed"),
        "an async reward": (plain, script("Done."), async_reward, "unscored"),
        "a sync reward": (plain, script("Done."), sync_reward, "unscored"),
        "a group reward": (plain, script("Done."), together, "unscored"),
        "a memory": (Agent(model="scripted", memory=Forgetful()), script("Done."), None, "failed"),  # type: ignore[arg-type]
        "a policy": (plain, ScriptedPolicy(answer), None, "failed"),
    }


async def rolled_out(place, error, tmp_path):
    """What comes of two rollouts in which users' code raises an error."""
    agent, policy, score, _ = places(error)[place]
    async with (
        ResourceEngine(ledger=tmp_path) as engine,
        Runner(agent, policy=policy, engine=engine, reward=score, max_failure_rate=1.0) as runner,
        runner.batch([Task("a"), Task("b")]) as batch,
    ):
        found = []
        with contextlib.suppress(FailureBudgetExceeded):  # if each of them was spoiled
            async for trajectory in batch:
                found.append(trajectory)
        held = [instance for pool in engine.snapshot().pools for instance in pool.instances if instance.owners]
    assert len(found) == 2
    assert not held
    return found


@pytest.mark.parametrize("error", [error for error in ERRORS if error is not KeyboardInterrupt])
@pytest.mark.parametrize("place", places(Exception))
async def test_a_run_goes_on_whatever_users_code_raises(place, error, tmp_path):
    outcome = places(error)[place][-1]
    for trajectory in await rolled_out(place, error, tmp_path):
        failures = [one.kind for one in (trajectory.failure, trajectory.reward_failure) if one is not None]
        assert trajectory.finish_reason == ("failed" if outcome == "failed" else "answered")
        assert len(failures) == (outcome in ("failed", "unscored"))
        assert trajectory.infrastructure_failed == bool(failures)
        if outcome == "told":
            assert trajectory.turns[0].tool_results[0].observation.startswith(f"Error: {error.__name__}")


@pytest.mark.parametrize("place", places(Exception))
def test_an_interruption_that_users_code_raises_ends_the_run_or_the_rollout_and_everything_is_given_back(
    place, tmp_path
):
    with contextlib.suppress(KeyboardInterrupt):  # in the main thread it may be Ctrl-C, on another it cannot
        asyncio.run(rolled_out(place, KeyboardInterrupt, tmp_path))
    assert not [path for path in tmp_path.iterdir() if path.stat().st_size]


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["ctrl-c", "background"])
def ctrl_c(request):
    """What Ctrl-C does as the program begins: a shell has its background jobs ignore it."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("place", places(Exception))
def test_where_ctrl_c_is_handled_an_interruption_that_users_code_raises_is_its_failure(place, tmp_path):
    for trajectory in signals.run_until_signal(rolled_out(place, KeyboardInterrupt, tmp_path)):
        assert trajectory.finish_reason in ("answered", "failed")
