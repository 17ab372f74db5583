"""A programmer's mistakes in a tool: they end the rollout with the cure, and the model does not see them."""

from __future__ import annotations

import copy
import inspect
import logging

import pytest

from agentfly.agents.tool_decorator import tool
from agentfly.agents.tool_result import ToolResult
from agentfly.contexts.context import Context
from agentfly.core.errors import ToolCrashed, ToolDefinitionError, UsageError
from agentfly.core.task import Task
from agentfly.core.trajectory import Failure, Trajectory
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.testing.fake_resource import FakeBackend, FakeSpec

BOX = FakeSpec(world=FakeBackend(), name="box")


async def lease_awaited(context):
    await context.lease(BOX)


async def acquire_entered(context):
    async with context.acquire(BOX) as box:
        await box.use()


async def acquire_not_awaited(context):
    await context.acquire(BOX).use()


async def lease_not_entered(context):
    await context.lease(BOX).use()


async def no_such_method(context):
    box = await context.acquire(BOX)
    await box.usee()


def waits_for_a_spec(context):
    context.wait(BOX)


MISTAKES = [
    (lambda context: context.acquire({"memory": "1GiB"}), r"takes a ResourceSpec.*got a dict, \{'memory'"),
    (lambda context: context.acquire("container"), r"takes a ResourceSpec.*got a str, 'container'"),
    (lambda context: context.acquire(FakeSpec), r"the class FakeSpec: create one, FakeSpec\("),
    (lambda context: context.acquire(BOX, "run"), r"scope='run': write one of 'call', 'rollout', 'global'"),
    (lease_awaited, r"lease\(\) is a block. Write .*async with context.lease"),
    (acquire_entered, r"acquire\(\) is no block. Write `resource = await context.acquire"),
    (acquire_not_awaited, r"\.use: acquire\(\) was not awaited"),
    (lease_not_entered, r"\.use: lease\(\) was not entered"),
    (waits_for_a_spec, r"context.wait\(FakeSpec\): it takes what an async method returned"),
    (no_such_method, r"box-\S+ has no 'usee'. Did you mean 'use'\? It has .*use"),
]


@pytest.fixture
async def call(tmp_path):
    """Call a function as a tool, in a rollout of its own."""
    async with ResourceEngine(ledger=tmp_path) as engine:
        rollout = Context(Trajectory("r0", "g0", Task("do it", {}), 0), engine)

        async def call(function):
            async with rollout.call() as context:
                return await tool(name="work")(documented(function)).call({}, context)

        yield call
        await rollout.close()


def documented(function):
    if inspect.iscoroutinefunction(function):

        async def work(context: Context) -> object:
            """Work."""
            return await function(context)

        return work

    def work_on_thread(context: Context) -> object:
        """Work."""
        return function(context)

    return work_on_thread


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(("mistake", "told"), MISTAKES)
async def test_a_mistake_in_the_use_of_resources_is_a_usage_error_with_the_cure(call, mistake, told):
    with pytest.raises(UsageError, match=told):
        await call(mistake)


async def test_protocols_that_look_for_an_attribute_are_told_as_always_that_a_resource_has_none(call):
    async def look(context):
        box = await context.acquire(BOX)
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            copy.copy(box)
        return [hasattr(box, "nosuch"), getattr(box, "nosuch", 7), inspect.isawaitable(box), hasattr(box, "use")]

    assert (await call(look)).observation == "[false, 7, false, true]"


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("wrap", [lambda got: [got], lambda got: {"out": got}, ToolResult])
async def test_a_coroutine_in_what_a_tool_returns_is_a_forgotten_await(call, wrap):
    async def forgetful(context):
        box = await context.acquire(BOX)
        return wrap(box.use())

    with pytest.raises(ToolDefinitionError, match=r"'work' returned a coroutine.*`await` is missing"):
        await call(forgetful)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(
    "text", [str, lambda got: f"It says {got}.", lambda got: [str(got)], lambda got: ToolResult(repr(got))]
)
async def test_the_text_of_a_resources_coroutine_is_a_forgotten_await(call, text):
    async def forgetful(context):
        box = await context.acquire(BOX)
        return text(box.use())

    with pytest.raises(ToolDefinitionError, match=r"'work' returned the text of a coroutine.*`await` is missing"):
        await call(forgetful)


async def test_the_text_of_another_programs_coroutine_is_an_observation(call):
    async def look(context):
        return "<coroutine object main at 0x7f5c1234>"

    assert (await call(look)).observation == "<coroutine object main at 0x7f5c1234>"


async def test_a_crash_of_a_tools_own_code_is_told_to_its_author_once_with_the_line_of_it(call, caplog):
    @tool
    async def crashing(context: Context) -> str:
        """Crash."""
        return {}["nothing"]  # type: ignore[index]

    async def twice(context):
        for _ in range(2):
            with pytest.raises(ToolCrashed, match="KeyError: 'nothing'"):
                await crashing.call({}, context)

    with caplog.at_level(logging.WARNING, "agentfly"):
        await call(twice)
    (record,) = [record for record in caplog.records if record.name == "agentfly.agents.tool"]
    assert "'crashing' crashed with KeyError: 'nothing', at " in record.getMessage()
    assert "test_tool_definition_errors.py" in record.getMessage()
    assert "in crashing" in record.getMessage()


async def test_a_failure_is_placed_at_the_users_line_and_not_at_agentflys(call):
    async def mistaken(context):
        return await context.acquire("container")

    with pytest.raises(UsageError) as caught:
        await call(mistaken)
    assert "test_tool_definition_errors.py" in Failure.of(caught.value).location
    assert "in mistaken" in Failure.of(caught.value).location


def test_one_spec_where_a_list_of_them_is_wanted_is_named_by_its_type():
    declaring = tool(name="work", resources=lambda task: BOX)(documented(no_such_method))  # type: ignore[arg-type, return-value]
    with pytest.raises(ToolDefinitionError, match=r"this is one FakeSpec: put it in a list, \[FakeSpec\(…\)\]\.$"):
        declaring.resources_for(Task("do it"))


def test_a_function_that_asks_for_a_field_that_the_task_lacks_is_told_the_fields_there_are():
    declaring = tool(name="work", resources=lambda task: task["topic"])(documented(no_such_method))
    with pytest.raises(ToolDefinitionError, match=r"the task t7 has no field 'topic', only \['subject'\]"):
        declaring.resources_for(Task("do it", {"subject": "maths"}, id="t7"))
