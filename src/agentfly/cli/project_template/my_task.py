"""my-task: look at the requested shelf, and not at the other one in the prompt.

This file holds all that a run needs, and config.yaml names it: the agent with its tool, the reward, the tasks, and an
oracle that proves that the tasks can be solved. Replace them with your own one by one; `agentfly check config.yaml`
reports whether they fit together.
"""

from __future__ import annotations

import re

import agentfly as af

SHELVES = {
    "tea": "full",
    "rice": "low",
    "milk": "empty",
    "soap": "half",
    "salt": "full",
    "corn": "low",
    "sugar": "half",
    "honey": "empty",
}


@af.tool
def check(item: str) -> af.ToolResult:
    """Look how full the shelf of an item is.

    Args:
        item: what is on the shelf.
    """
    if item not in SHELVES:
        raise af.ToolError(f"There is no shelf of {item!r}.")  # the model sees the error and may try again
    return af.ToolResult(SHELVES[item], done=True)  # one look ends the rollout


def agent(model: str) -> af.Agent:
    """The agent, with the model of the configuration."""
    return af.Agent(
        model=model,
        tools=[check],
        system_prompt="You keep the stockroom.",
        tool_prompt="",  # `tiny` was made to call a tool `check`, and reads no descriptions: leave out for other models
        max_turns=2,
        max_tokens_per_turn=96,
    )


@af.reward
def right_shelf(trajectory: af.Trajectory, item: str) -> dict[str, float]:
    """1 if the agent looked at the requested shelf; `item` is a field of the task.

    Other numbers beside ``reward`` appear in the metrics, as ``reward_metrics/called``.
    """
    calls = [result.call for turn in trajectory.turns for result in turn.tool_results if result.failure is None]
    right = any(call.arguments == {"item": item} for call in calls)
    return {"reward": float(right), "called": float(bool(calls))}


def tasks() -> list[af.Task]:
    """Every pair of items: the model sees the prompt, tools and reward get the fields."""
    pairs = [(item, other) for item in SHELVES for other in SHELVES if item != other]
    return [af.Task(f"Leave the {other}. What about the {item}?", {"item": item}) for item, other in pairs]


def train_tasks() -> list[af.Task]:
    """The tasks to train on."""
    return [task for number, task in enumerate(tasks()) if number % 7]


def eval_tasks() -> list[af.Task]:
    """The held-out tasks: success is measured on tasks that were never trained on."""
    return tasks()[::7]


def oracle(conversation: str, turn: int) -> str:
    """Return the next turn of a perfect agent, given the conversation; `agentfly check` runs it."""
    item = re.findall(r"What about the (\w+)\?", conversation)[-1]
    return agent("tiny").format.write("check", {"item": item})
