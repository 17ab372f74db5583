"""Missing task fields of tools or rewards are found before the first generation, and no files are left."""

from __future__ import annotations

from typing import Annotated, Any

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import group_reward
from agentfly.agents.reward import reward
from agentfly.agents.tool_decorator import tool
from agentfly.agents.user_function import FromTask
from agentfly.agents.weighted_reward import weighted
from agentfly.core.errors import RewardDefinitionError, ToolDefinitionError
from agentfly.core.task import Task
from agentfly.evaluation.preflight import check_definitions
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.run import evaluate, run
from agentfly.training.trainer import Trainer

TASKS = [Task("go", {"answer": "42", "answr": "42"}), Task("go", {"answer": "42"})]


@reward
def mistaken(response: str, answr: str) -> float:
    return float(answr in response)


@reward
def content(response: str, answer: str, unit: float = 1.0) -> float:
    return unit * (answer in response)


@reward(per_turn=True)
def each(turn: object, answr: Annotated[str, FromTask()]) -> float:
    return 1.0


@group_reward
def ranked(responses: list[str], answr: str) -> list[float]:
    return [1.0 for _ in responses]


@group_reward(after=mistaken)
def later(responses: list[str], prompt: str, answer: str) -> list[float]:
    return [1.0 for _ in responses]


@tool
class Notebook:
    """Keeps notes."""

    def __init__(self, answr: str, size: int = 3) -> None:
        self.answr = answr

    def read(self) -> str:
        """Read the notes."""
        return self.answr


@tool
def look(answr: Annotated[str, FromTask()]) -> str:
    """Look at it."""
    return answr


REWARDS = [mistaken, each, ranked, later, weighted({content: 1.0, mistaken: 0.5})]
PLAIN = Agent(model="scripted")
SCRIPTED = ScriptedPolicy(["It is 42."])


@pytest.mark.parametrize("roll", [run, evaluate])
@pytest.mark.parametrize("asking", REWARDS, ids=lambda one: one.name)
async def test_a_reward_that_asks_for_a_field_that_a_task_lacks_is_refused_before_anything_is_said(
    asking, roll, tmp_path
):
    asked = []

    def script(*_):
        asked.append(True)
        return "It is 42."

    with pytest.raises(
        RewardDefinitionError, match=r"the field 'answr', which 1 of 2 tasks do not have.*\['answer'\].*'prompt'"
    ):
        await roll(PLAIN, TASKS, reward=asking, policy=ScriptedPolicy(script), run_dir=tmp_path / "run")
    assert not asked
    assert not (tmp_path / "run").exists()
    assert [finding.subject for finding in check_definitions(PLAIN, TASKS, asking) if not finding.ok] == [
        f"reward {asking.name}"
    ]


HELPER = Agent(model="scripted", tools=[Notebook]).as_tool("Helps.", name="helper")  # type: ignore[list-item]


@pytest.mark.parametrize("given", [Notebook, look, HELPER], ids=["class", "function", "subagent"])
async def test_a_tool_that_asks_for_a_field_that_a_task_lacks_is_refused_before_anything_is_said(given, tmp_path):
    agent = Agent(model="scripted", tools=[given])
    with pytest.raises(ToolDefinitionError, match=r"takes the field 'answr', which 1 of 2 tasks do not have"):
        await run(agent, TASKS, policy=SCRIPTED, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not all(finding.ok for finding in check_definitions(agent, TASKS))


@pytest.mark.parametrize("held_out", [False, True])
def test_training_is_refused_also_for_held_out_tasks(held_out, tmp_path):
    tasks: dict[str, Any] = {"tasks": TASKS[:1], "eval_tasks": TASKS} if held_out else {"tasks": TASKS}
    with pytest.raises(RewardDefinitionError, match="takes the field 'answr'"):
        Trainer(PLAIN, reward=mistaken, run_dir=tmp_path / "run", **tasks)
    assert not (tmp_path / "run").exists()


async def test_what_every_task_has_is_not_missed():
    agent = Agent(model="scripted", tools=[Notebook, look])  # type: ignore[list-item]
    result = await run(agent, TASKS[:1], reward=weighted({content: 1.0, mistaken: 1.0}), policy=SCRIPTED)
    assert result.rewards == [2.0]
