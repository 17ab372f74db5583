"""The depot: fetch an item and bring it to another room. A task of many steps, for studies.

An errand takes three to six correct steps in a small world. Its states recur within and across attempts. Only the end
of an errand is rewarded. `python -m benchmarks.studies` compares training algorithms on it.
"""

from agentfly.tasks.depot.agent import depot_agent, forgetful_depot_agent, oracle
from agentfly.tasks.depot.tasks import eval_tasks, train_tasks
from agentfly.tasks.depot.tools import depot_reward, go, put, take

__all__ = [
    "depot_agent",
    "depot_reward",
    "eval_tasks",
    "forgetful_depot_agent",
    "go",
    "oracle",
    "put",
    "take",
    "train_tasks",
]
