"""AgentFly: train language-model agents with reinforcement learning.

The public names are imported when they are first used, so that ``import agentfly`` stays light and fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentfly.agents.agent import Agent as Agent
    from agentfly.agents.grading.tests_pass import tests_pass as tests_pass
    from agentfly.agents.group_reward import group_reward as group_reward
    from agentfly.agents.memory.memory import FullHistory as FullHistory
    from agentfly.agents.memory.memory import Past as Past
    from agentfly.agents.memory.summary_folding import SummaryFolding as SummaryFolding
    from agentfly.agents.memory.window import Window as Window
    from agentfly.agents.reward import reward as reward
    from agentfly.agents.reward_result import RewardResult as RewardResult
    from agentfly.agents.tool import FromTask as FromTask
    from agentfly.agents.tool import ToolResult as ToolResult
    from agentfly.agents.tool import tool as tool
    from agentfly.agents.weighted import weighted as weighted
    from agentfly.contexts.context import Context as Context
    from agentfly.errors import AgentFlyError as AgentFlyError
    from agentfly.errors import ToolError as ToolError
    from agentfly.gateway.gateway import Gateway as Gateway
    from agentfly.gateway.limits import GatewayLimits as GatewayLimits
    from agentfly.gateway.sampling import RolloutSampling as RolloutSampling
    from agentfly.images import Image as Image
    from agentfly.policies.openai import OpenAIPolicy as OpenAIPolicy
    from agentfly.policies.scripted import ScriptedPolicy as ScriptedPolicy
    from agentfly.policies.vllm.policy import VLLMPolicy as VLLMPolicy
    from agentfly.resources.apis.spec import ModelAPISpec as ModelAPISpec
    from agentfly.resources.containers.spec import ContainerSpec as ContainerSpec
    from agentfly.resources.engine import ResourceEngine as ResourceEngine
    from agentfly.resources.environments.spec import EnvironmentSpec as EnvironmentSpec
    from agentfly.resources.mcp.spec import MCPServerSpec as MCPServerSpec
    from agentfly.resources.models.spec import ModelServerSpec as ModelServerSpec
    from agentfly.rollouts.preflight import check as check
    from agentfly.rollouts.rescoring import rescore as rescore
    from agentfly.rollouts.run import RunResult as RunResult
    from agentfly.rollouts.run import evaluate as evaluate
    from agentfly.rollouts.run import run as run
    from agentfly.rollouts.runner import Runner as Runner
    from agentfly.task import Task as Task
    from agentfly.training.config.train_config import TrainConfig as TrainConfig
    from agentfly.training.train import train as train
    from agentfly.training.train import train_async as train_async
    from agentfly.trajectory import Trajectory as Trajectory
    from agentfly.viewing.trajectory_text import trajectory_text as trajectory_text

__version__ = "0.1.0"

_HOMES = {
    "Agent": "agentfly.agents.agent",
    "AgentFlyError": "agentfly.errors",
    "ContainerSpec": "agentfly.resources.containers.spec",
    "Context": "agentfly.contexts.context",
    "EnvironmentSpec": "agentfly.resources.environments.spec",
    "FromTask": "agentfly.agents.tool",
    "FullHistory": "agentfly.agents.memory.memory",
    "Gateway": "agentfly.gateway.gateway",
    "GatewayLimits": "agentfly.gateway.limits",
    "Image": "agentfly.images",
    "MCPServerSpec": "agentfly.resources.mcp.spec",
    "ModelAPISpec": "agentfly.resources.apis.spec",
    "ModelServerSpec": "agentfly.resources.models.spec",
    "OpenAIPolicy": "agentfly.policies.openai",
    "Past": "agentfly.agents.memory.memory",
    "ResourceEngine": "agentfly.resources.engine",
    "RewardResult": "agentfly.agents.reward_result",
    "RolloutSampling": "agentfly.gateway.sampling",
    "RunResult": "agentfly.rollouts.run",
    "Runner": "agentfly.rollouts.runner",
    "ScriptedPolicy": "agentfly.policies.scripted",
    "SummaryFolding": "agentfly.agents.memory.summary_folding",
    "Task": "agentfly.task",
    "ToolError": "agentfly.errors",
    "ToolResult": "agentfly.agents.tool",
    "TrainConfig": "agentfly.training.config.train_config",
    "Trajectory": "agentfly.trajectory",
    "VLLMPolicy": "agentfly.policies.vllm.policy",
    "Window": "agentfly.agents.memory.window",
    "check": "agentfly.rollouts.preflight",
    "evaluate": "agentfly.rollouts.run",
    "group_reward": "agentfly.agents.group_reward",
    "rescore": "agentfly.rollouts.rescoring",
    "mcp_tools": "agentfly.agents.mcp",
    "reward": "agentfly.agents.reward",
    "run": "agentfly.rollouts.run",
    "tests_pass": "agentfly.agents.grading.tests_pass",
    "tool": "agentfly.agents.tool",
    "train": "agentfly.training.train",
    "trajectory_text": "agentfly.viewing.trajectory_text",
    "train_async": "agentfly.training.train",
    "weighted": "agentfly.agents.weighted",
}

__all__ = ["__version__"]
__all__ += list(_HOMES)


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'agentfly' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
