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
    from agentfly.agents.memory import FullHistory as FullHistory
    from agentfly.agents.memory import Past as Past
    from agentfly.agents.memory import SummaryFolding as SummaryFolding
    from agentfly.agents.memory import Window as Window
    from agentfly.agents.reward import reward as reward
    from agentfly.agents.reward_result import RewardResult as RewardResult
    from agentfly.agents.tool_decorator import tool as tool
    from agentfly.agents.tool_result import ToolResult as ToolResult
    from agentfly.agents.user_function import FromTask as FromTask
    from agentfly.agents.weighted_reward import weighted as weighted
    from agentfly.contexts.context import Context as Context
    from agentfly.core.errors import AgentFlyError as AgentFlyError
    from agentfly.core.errors import ToolError as ToolError
    from agentfly.core.messages import Image as Image
    from agentfly.core.task import Task as Task
    from agentfly.core.trajectory import Trajectory as Trajectory
    from agentfly.evaluation.preflight import check as check
    from agentfly.evaluation.rescoring import rescore as rescore
    from agentfly.gateway.gateway import Gateway as Gateway
    from agentfly.gateway.limits import GatewayLimits as GatewayLimits
    from agentfly.gateway.model_request import RolloutSampling as RolloutSampling
    from agentfly.policies.openai import OpenAIPolicy as OpenAIPolicy
    from agentfly.policies.scripted import ScriptedPolicy as ScriptedPolicy
    from agentfly.policies.vllm.policy import VLLMPolicy as VLLMPolicy
    from agentfly.resources.containers.spec import ContainerSpec as ContainerSpec
    from agentfly.resources.engine.engine import ResourceEngine as ResourceEngine
    from agentfly.resources.environments.spec import EnvironmentSpec as EnvironmentSpec
    from agentfly.resources.mcp.spec import MCPServerSpec as MCPServerSpec
    from agentfly.resources.model_api.model_api import ModelAPISpec as ModelAPISpec
    from agentfly.resources.model_server.spec import ModelServerSpec as ModelServerSpec
    from agentfly.rollouts.run import RunResult as RunResult
    from agentfly.rollouts.run import evaluate as evaluate
    from agentfly.rollouts.run import run as run
    from agentfly.rollouts.runner import Runner as Runner
    from agentfly.training.config.train_config import TrainConfig as TrainConfig
    from agentfly.training.train import train as train
    from agentfly.training.train import train_async as train_async
    from agentfly.viewing.trajectory_text import trajectory_text as trajectory_text

__version__ = "0.1.0"

_HOMES = {
    "Agent": "agentfly.agents.agent",
    "AgentFlyError": "agentfly.core.errors",
    "ContainerSpec": "agentfly.resources.containers.spec",
    "Context": "agentfly.contexts.context",
    "EnvironmentSpec": "agentfly.resources.environments.spec",
    "FromTask": "agentfly.agents.tool_decorator",
    "FullHistory": "agentfly.agents.memory",
    "Gateway": "agentfly.gateway.gateway",
    "GatewayLimits": "agentfly.gateway.limits",
    "Image": "agentfly.core.messages",
    "MCPServerSpec": "agentfly.resources.mcp.spec",
    "ModelAPISpec": "agentfly.resources.model_api.model_api",
    "ModelServerSpec": "agentfly.resources.model_server.spec",
    "OpenAIPolicy": "agentfly.policies.openai",
    "Past": "agentfly.agents.memory",
    "ResourceEngine": "agentfly.resources.engine.engine",
    "RewardResult": "agentfly.agents.reward_result",
    "RolloutSampling": "agentfly.gateway.model_request",
    "RunResult": "agentfly.rollouts.run",
    "Runner": "agentfly.rollouts.runner",
    "ScriptedPolicy": "agentfly.policies.scripted",
    "SummaryFolding": "agentfly.agents.memory",
    "Task": "agentfly.core.task",
    "ToolError": "agentfly.core.errors",
    "ToolResult": "agentfly.agents.tool_decorator",
    "TrainConfig": "agentfly.training.config.train_config",
    "Trajectory": "agentfly.core.trajectory",
    "VLLMPolicy": "agentfly.policies.vllm.policy",
    "Window": "agentfly.agents.memory",
    "check": "agentfly.evaluation.preflight",
    "evaluate": "agentfly.rollouts.run",
    "group_reward": "agentfly.agents.group_reward",
    "rescore": "agentfly.evaluation.rescoring",
    "mcp_tools": "agentfly.agents.mcp_tools",
    "reward": "agentfly.agents.reward",
    "run": "agentfly.rollouts.run",
    "tests_pass": "agentfly.agents.grading.tests_pass",
    "tool": "agentfly.agents.tool_decorator",
    "train": "agentfly.training.train",
    "trajectory_text": "agentfly.viewing.trajectory_text",
    "train_async": "agentfly.training.train",
    "weighted": "agentfly.agents.weighted_reward",
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
