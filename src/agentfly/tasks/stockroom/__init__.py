"""The stockroom: check the requested shelf, then order what the shop needs for it. The task of the demo.

A task has two turns in a sandbox and follows a rule that must be learned. `agentfly demo` trains on it.
"""

from agentfly.tasks.stockroom.agent import ABOUT, action_agent, hermes_agent, oracle, thoughtful_agent
from agentfly.tasks.stockroom.tasks import (
    eval_tasks,
    eval_tasks_with_examples,
    thoughtful_train_tasks,
    train_tasks,
    train_tasks_with_examples,
)
from agentfly.tasks.stockroom.tools import check, order, stockroom_reward

__all__ = [
    "ABOUT",
    "action_agent",
    "check",
    "eval_tasks",
    "eval_tasks_with_examples",
    "hermes_agent",
    "oracle",
    "order",
    "stockroom_reward",
    "thoughtful_agent",
    "thoughtful_train_tasks",
    "train_tasks",
    "train_tasks_with_examples",
]
