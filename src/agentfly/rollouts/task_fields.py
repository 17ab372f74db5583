"""Task fields: what tools and reward ask of every task, looked for before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import AnyReward
from agentfly.agents.tool import Tool
from agentfly.errors import RewardDefinitionError, ToolDefinitionError
from agentfly.task import Task


def require_fields(agent: Agent, tasks: Sequence[Task], reward: AnyReward | None) -> None:
    """See that each task has the fields that the agent's tools and the reward ask for.

    Raises: as of `require_tool_fields` and `require_reward_fields`.
    """
    for tool in agent.tools:
        require_tool_fields(tool, tasks)
    if reward is not None:
        require_reward_fields(reward, tasks)


def require_tool_fields(tool: Tool, tasks: Sequence[Task]) -> None:
    """See that each task has the fields that a tool, or the class that it is a method of, asks for.

    Raises:
        ToolDefinitionError: one has not.
    """
    for name in tool.task_fields:
        if lacking := _lacking(name, tasks):
            raise ToolDefinitionError(f"The tool {tool.name!r} asks for the field {name!r}, {lacking}")


def require_reward_fields(reward: AnyReward, tasks: Sequence[Task]) -> None:
    """See that each task has the fields that a reward, or one that it is made of, asks for.

    Raises:
        RewardDefinitionError: one has not.
    """
    for name in reward.task_fields:
        if lacking := _lacking(name, tasks):
            raise RewardDefinitionError(
                f"The reward {reward.name!r} asks for the field {name!r}, {lacking} Beside these it can ask for "
                f"'context', {', '.join(map(repr, reward.given))}."
            )


def _lacking(name: str, tasks: Sequence[Task]) -> str:
    """How many tasks do not have a field, and what to do; empty if all have it."""
    lacking = [task for task in tasks if name not in task.fields]
    if not lacking:
        return ""
    return (
        f"which {len(lacking)} of {len(tasks)} tasks do not have, for instance {lacking[0].id}, which has "
        f"{sorted(map(str, lacking[0].fields))}. Rename the parameter, give it a default, or add the field to the "
        "tasks."
    )
