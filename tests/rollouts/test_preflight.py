"""The preflight check: it tries everything that a run needs, and reports failures with the cure."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Annotated

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import group_reward
from agentfly.agents.reward import reward
from agentfly.agents.tool_decorator import tool
from agentfly.agents.user_function import FromTask
from agentfly.agents.weighted_reward import weighted
from agentfly.contexts.context import Context
from agentfly.core.errors import PrerequisiteError, ToolError
from agentfly.core.task import Task
from agentfly.evaluation.preflight import check, check_definitions, preflight
from agentfly.policies.openai import OpenAIPolicy
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.tasks import stockroom
from agentfly.testing.fake_openai_server import FakeOpenAIServer
from agentfly.testing.fake_resource import FakeBackend, FakeSpec

WORLD = FakeBackend()
BOX = FakeSpec(world=WORLD, name="box")
TASKS = [Task("go", {"answer": "42"})]


@tool(resources=[BOX])
async def ask(question: str, context: Context) -> str:
    """Ask the box.

    Args:
        question: what is asked.
    """
    box = await context.acquire(BOX)
    await box.use()
    if question == "why":
        raise ToolError("nobody knows why")
    return "42"


@reward
def correct(response: str, answer: str) -> float:
    return float(answer in response)


AGENT = Agent(model="scripted", tools=[ask])
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGM4wcUFAAJ6AN1nJ0J9AAAAAElFTkSuQmCC"
)


def asking(question):
    return [AGENT.format.write("ask", {"question": question}), "It is 42."]


@pytest.fixture(autouse=True)
def well():
    async def behave(operation, instance):
        pass

    WORLD.hook = behave


async def found(tmp_path, agent=AGENT, tasks=TASKS, **settings):
    """What does not work, and what does, by what was tried."""
    async with ResourceEngine(ledger=tmp_path) as engine:
        settings = {"reward": correct, "policy": ScriptedPolicy(["fine"]), "engine": engine, "limit_s": 5} | settings
        findings = await check(agent, tasks, **settings)
        held = [instance for pool in engine.snapshot().pools for instance in pool.instances if instance.owners]
        assert not held
    return (
        {finding.subject: finding.detail for finding in findings if not finding.ok},
        {finding.subject: finding.detail for finding in findings if finding.ok},
    )


async def test_all_is_well_where_the_oracle_earns_its_score(tmp_path):
    failed, well = await found(tmp_path, oracle=asking("what"))
    assert not failed
    assert well["tool ask"] == "declares box"
    assert well["resource box"].startswith("starts")
    assert well["calls of ask"] == "1, the last answered '42'"
    assert well["score of correct"] == "1 for the oracle"
    assert list(well)[-3:] == ["model scripted", "chat format", "generation"]


async def test_without_an_oracle_the_reward_scores_an_agent_that_does_nothing(tmp_path):
    failed, well = await found(tmp_path)
    assert not failed
    assert well["score of correct for an idle agent"] == "0 for an agent that does nothing"


@pytest.mark.parametrize(
    ("scored", "oracle", "told"),
    [
        (lambda response: 1.0, None, "counts as solved before anything is done"),
        (lambda response: 1.0, "what", "counts as solved before anything is done"),
        (lambda response: {"reward": 0.2, "success": 1}, "what", "counts as solved before anything is done"),
        (lambda response: 0.5, "what", "no less than the 0.5 of the oracle"),
        (lambda response: 0.5, None, None),
        (lambda response: float("42" in response), "what", None),
        (lambda response: {"reward": 3.0, "success": 0}, None, None),
    ],
)
async def test_an_agent_that_earns_its_reward_by_doing_nothing_is_told(tmp_path, scored, oracle, told):
    @reward
    def generous(response: str) -> object:
        return scored(response)

    async with ResourceEngine(ledger=tmp_path) as engine:
        settings = {"reward": generous, "policy": ScriptedPolicy(["fine"]), "engine": engine}
        findings = await check(AGENT, TASKS, oracle=oracle and asking(oracle), **settings)
    assert all(finding.ok for finding in findings)
    doubts = [finding for finding in findings if finding.suspicious]
    assert [finding.subject for finding in doubts] == ["score of generous for an idle agent"] * (told is not None)
    assert all(told in finding.detail for finding in doubts)


async def test_an_idle_agent_is_played_to_its_end_however_many_turns_that_takes(tmp_path):
    failed, well = await found(tmp_path, replace(AGENT, tool_call_format="react"))
    assert not failed
    assert "rollout of an idle agent" in well


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"max_tokens_per_turn": 30}, r"turn 1 takes \d+ tokens of the model, and max_tokens_per_turn is 30"),
        ({"max_tokens_per_turn": 80, "max_sampled_tokens": 80}, r"the turns take \d+ .* and max_sampled_tokens is 80"),
        ({"max_tokens_per_turn": 80, "max_sequence_tokens": 90}, r"conversation takes \d+ .*max_sequence_tokens is 90"),
        ({}, None),
    ],
)
async def test_an_oracle_that_says_more_than_the_model_may_is_told_and_is_never_cut_itself(tmp_path, limits, told):
    model = ScriptedPolicy(["fine"], limited=True)  # stands for a model whose tokens are bytes
    failed, well = await found(tmp_path, replace(AGENT, **limits), oracle=asking("what"), policy=model)
    assert well["score of correct"] == "1 for the oracle"
    if told is None:
        assert re.match(r"\d+ tokens of the model, and 76 in its longest turn", well["length of the oracle"])
    else:
        assert re.search(told, failed["length of the oracle"])


async def test_an_oracle_that_does_not_fit_into_the_model_is_told(tmp_path):
    model = ScriptedPolicy(["fine"], limited=True, context_length=600)
    failed, _ = await found(tmp_path, oracle=[*asking("what")[:1], "It is 42. " * 40], policy=model)
    assert "does not fit into the model's context" in failed["length of the oracle"]


async def test_a_resource_that_does_not_start_is_told_with_what_would_need_it(tmp_path):
    async def broken(operation, instance):
        if operation == "start":
            raise PrerequisiteError("There is no such image. Pull it first.")

    WORLD.hook = broken
    failed, _ = await found(tmp_path, oracle=asking("what"))
    assert "There is no such image. Pull it first." in failed["resource box"]
    assert "There is no such image. Pull it first." in failed["rollout of the oracle"]


async def test_a_resource_that_never_starts_is_given_up_in_time(tmp_path):
    async def hanging(operation, instance):
        if operation == "start":
            await asyncio.sleep(1000)

    WORLD.hook = hanging
    failed, _ = await found(tmp_path, limit_s=0.2)
    assert "longer than 0.2 s" in failed["resource box"]


async def test_an_oracle_whose_call_fails_or_that_comes_to_no_end_of_its_own_is_told(tmp_path):
    failed, _ = await found(tmp_path, oracle=asking("why"))
    assert failed == {"calls of ask": "Error: nobody knows why"}
    failed, _ = await found(tmp_path, oracle=lambda prompt, turn: AGENT.format.write("nothing", {}))
    assert failed == {"rollout of the oracle": "It ended after 3 turns as invalid_calls."}


async def test_a_reward_that_gives_no_score_is_told(tmp_path):
    @reward
    def picky(response: str) -> float:
        raise KeyError("no box in the response")

    failed, _ = await found(tmp_path, reward=picky)
    assert "None for an agent that does nothing" in failed["score of picky for an idle agent"]
    assert "no box in the response" in failed["score of picky for an idle agent"]


async def test_a_model_that_cannot_be_loaded_or_whose_prompt_does_not_fit_is_told(tmp_path):
    def load():
        raise PrerequisiteError("There is no model here. Get it.")

    failed, _ = await found(tmp_path, policy=load)
    assert failed == {"model scripted": "There is no model here. Get it."}
    failed, well = await found(tmp_path, policy=lambda: ScriptedPolicy(["fine"], context_length=20))
    assert "no room" in failed["generation"]
    assert "chat format" in well


async def test_a_task_with_images_is_tried_and_told_where_the_model_sees_none(tmp_path):
    tasks = [Task([{"role": "user", "content": [{"type": "image", "image": PIXEL}]}], {"answer": "42"})]  # type: ignore[typeddict-item]
    settings = {"tasks": tasks, "oracle": asking("what")}
    failed, _ = await found(tmp_path, policy=ScriptedPolicy(["fine"], sees=True), **settings)
    assert not failed
    failed, _ = await found(tmp_path, policy=ScriptedPolicy(["fine"]), **settings)
    assert list(failed) == ["generation"]
    assert "a model that sees no images" in failed["generation"]


def test_a_field_that_tasks_lack_is_found_without_starting_anything():
    @tool
    def look(rates: Annotated[dict[str, float], FromTask()], unit: Annotated[str, FromTask()] = "m") -> str:
        """Look around."""
        return "a door"

    tasks = [Task("a", {"rates": {}}), Task("b", {"rate": {}})]
    (finding,) = check_definitions(Agent(model="scripted", tools=[look]), tasks)
    assert not finding.ok
    assert "'rates', which 1 of 2 tasks do not have" in finding.detail
    assert "['rate']" in finding.detail


async def test_what_is_written_wrongly_is_told_before_anything_is_started(tmp_path):
    def needs(task):
        raise KeyError("no image")

    @tool(resources=needs)
    def look() -> str:
        """Look around."""
        return "a door"

    failed, well = await found(tmp_path, Agent(model="scripted", tools=[look]))
    assert "no image" in failed["tool look"]
    assert list(well) == ["reward correct"]


async def test_whoever_looks_at_the_first_findings_only_leaves_nothing_behind(tmp_path):
    async with ResourceEngine(ledger=tmp_path) as engine:
        findings = preflight(AGENT, TASKS, policy=ScriptedPolicy(["fine"]), engine=engine)
        async for finding in findings:
            if finding.subject == "resource box":
                break
        await findings.aclose()
        assert not [instance for pool in engine.snapshot().pools for instance in pool.instances if instance.owners]


@pytest.mark.slow
async def test_the_oracle_of_the_stockroom_earns_the_full_reward_in_a_real_sandbox(tmp_path):
    agent = stockroom.hermes_agent("tiny")
    failed, well = await found(
        tmp_path,
        agent,
        stockroom.train_tasks(),
        reward=stockroom.stockroom_reward,
        oracle=stockroom.oracle(agent.format),
        limit_s=60,
    )
    assert not failed
    assert well["score of stockroom_reward"] == "1 for the oracle"


@pytest.mark.parametrize(
    "asking_for_answers",
    [
        correct,
        weighted({correct: 1.0}),
        reward(per_turn=True)(lambda turn, answer: 1.0),
        group_reward(lambda trajectories, answer: [1.0] * len(trajectories)),
        group_reward(after=correct)(lambda trajectories: [1.0] * len(trajectories)),
    ],
    ids=["reward", "sum", "of turns", "of groups", "after"],
)
def test_a_field_that_the_reward_asks_for_is_looked_for_in_every_task(asking_for_answers):
    tasks = [*TASKS, Task("go on", {"answers": "42"})]
    lacking = [finding for finding in check_definitions(AGENT, tasks, asking_for_answers) if not finding.ok]
    assert ["'answer', which 1 of 2 tasks do not have" in finding.detail for finding in lacking] == [True]
    assert all(finding.ok for finding in check_definitions(AGENT, TASKS, asking_for_answers))


async def test_an_agent_that_speaks_its_models_own_format_is_checked_against_an_endpoint() -> None:
    @tool
    def look(item: str) -> str:
        """Look at an item."""
        return item

    agent = Agent(model="m", tools=[look], tool_call_format="model")
    async with FakeOpenAIServer() as far_side:
        findings = await check(agent, ["What about tea?"], policy=OpenAIPolicy(far_side.url, "m"))
    assert [finding.detail for finding in findings if not finding.ok] == []
