"""Experiment: the agent, tasks, reward and policy that a configuration names, as objects."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agentfly.cli.config_file import EndpointConfig, OracleConfig, RunConfig, VLLMConfig
from agentfly.core.errors import ConfigError, type_of
from agentfly.core.references import load_reference
from agentfly.core.task import Task, to_tasks

if TYPE_CHECKING:
    from agentfly.agents.agent import Agent
    from agentfly.agents.group_reward import AnyReward
    from agentfly.core.events import EventStream
    from agentfly.policies.policy import ChatPolicy, Policy
    from agentfly.policies.scripted import Script
    from agentfly.training.curriculum import Curriculum


@dataclass(frozen=True)
class Experiment:
    """The objects that a configuration names.

    Attributes:
        config: the configuration.
        agent: the agent, with the configuration's model if it has one.
        tasks: the tasks to train on, or to roll out; None if none are named.
        eval_tasks: the held-out tasks; None if none are named.
        reward: the reward; `tool_rewards` if none is named.
        oracle: the turns of a perfect agent, as for `ScriptedPolicy`; None if none is named.
        curriculum: chooses the tasks of a training run; None if none is named.
    """

    config: RunConfig
    agent: Agent
    tasks: list[Task] | None
    eval_tasks: list[Task] | None
    reward: AnyReward
    oracle: Script | Sequence[str] | None
    curriculum: Curriculum | None = None

    @classmethod
    def load(cls, config: RunConfig) -> Experiment:
        """Load the objects that a configuration refers to.

        Raises:
            ConfigError: a reference names nothing, or an object of the wrong type.
        """
        base = Path(config.directory).resolve()
        agent = _with_memory(_agent(config, base), config)
        return cls(
            config=config,
            agent=agent,
            tasks=_tasks(config.tasks, base, "tasks") if config.tasks else None,
            eval_tasks=_tasks(config.eval_tasks, base, "eval_tasks") if config.eval_tasks else None,
            reward=_reward(config.reward, base),
            oracle=_oracle(config.oracle, base, agent) if config.oracle else None,
            curriculum=_curriculum(config.curriculum, base) if config.curriculum else None,
        )

    def required_tasks(self) -> list[Task]:
        """Return the tasks to train on, or to roll out.

        Raises:
            ConfigError: none are named.
        """
        if self.tasks is None:
            raise ConfigError("The configuration names no tasks. Set tasks, to a file or to module:name.")
        return self.tasks

    def check_definitions(self, tasks: Sequence[Task]) -> None:
        """Check that agent, tasks and reward fit together, before anything is loaded or started.

        Raises:
            ConfigError: they do not fit; the message lists all findings.
        """
        from agentfly.evaluation.preflight import check_definitions

        failed = [finding for finding in check_definitions(self.agent, tasks, self.reward) if not finding.ok]
        if failed:
            raise ConfigError("\n".join(f"{finding.subject}: {finding.detail}" for finding in failed))

    def fetch_model(self) -> None:
        """Fetch the agent's model before anything else begins, and report it if that takes a while.

        An endpoint or the oracle needs no model on this machine.

        Raises:
            ConfigError: there is no such model.
            PrerequisiteError: the model cannot be fetched.
        """
        if isinstance(self.config.policy, (EndpointConfig, OracleConfig)):
            return
        from agentfly.policies.catalog import resolve_model

        resolve_model(self.agent.model, report=lambda line: typer.echo(line, err=True))

    @asynccontextmanager
    async def runner_settings(self, events: EventStream) -> AsyncIterator[dict[str, Any]]:
        """Yield the configured settings of `run` and `evaluate`; the policy lives while the block runs."""
        training = self.config.training
        async with self.policy() as policy:
            yield {
                "policy": policy,
                "events": events,
                "strategy": training.strategy,
                "max_concurrent_rollouts": training.max_concurrent_rollouts,
                "max_concurrent_starts": training.max_concurrent_starts,
                "max_failure_rate": training.max_failure_rate,
            }

    @property
    def model_name(self) -> str:
        """The name of the model, as shown to the user."""
        return model_name(self.config) or str(self.agent.model)

    def policy(self) -> Policy | ChatPolicy:
        """Create the configured policy, which the caller enters."""
        if self.config.policy is None:
            from agentfly.policies.load import load_policy

            return load_policy(self.agent.model, **self.config.training.policy_settings)
        settings = self.config.policy.model_dump()
        if isinstance(self.config.policy, OracleConfig):
            return self._oracle_policy()
        if isinstance(self.config.policy, VLLMConfig):
            return self._vllm_policy(settings)
        from agentfly.policies.openai import OpenAIPolicy

        return OpenAIPolicy(settings.pop("base_url"), settings.pop("model"), **settings)

    def training_policy(self) -> Policy | None:
        """Create the servers that sample for a trainer; None if the trainer loads the model in this process.

        If adapters are trained, the servers are started with room for one.
        """
        if not isinstance(self.config.policy, VLLMConfig):
            return None
        settings = self.config.policy.model_dump()
        lora = self.config.training.lora
        if lora is not None:
            settings["server"] = {"adapters": 1, "adapter_rank": lora.rank, **settings["server"]}
        return self._vllm_policy(settings)

    def _oracle_policy(self) -> Policy:
        from agentfly.policies.scripted import ScriptedPolicy

        if self.oracle is None:
            raise ConfigError("policy: oracle needs an oracle, and none is named. Set oracle=my_task.py:oracle.")
        return ScriptedPolicy(self.oracle)

    def _vllm_policy(self, settings: dict[str, Any]) -> Policy:
        from agentfly.policies.vllm.policy import VLLMPolicy
        from agentfly.resources.model_server.spec import ModelServerSpec

        del settings["kind"]
        model, fields = str(self.agent.model), settings.pop("server")
        spec = None if settings["urls"] else ModelServerSpec(model=model, **fields)
        return VLLMPolicy(spec, model=model, **settings)


def model_name(config: RunConfig) -> str | None:
    """Return the name of a configuration's model, as shown to the user; None for the agent's own."""
    asked = config.policy
    if isinstance(asked, OracleConfig):
        return "the oracle"
    if isinstance(asked, EndpointConfig):
        return asked.model or f"the model at {asked.base_url}"
    return config.model


def _agent(config: RunConfig, base: Path) -> Agent:
    from agentfly.agents.agent import Agent
    from agentfly.agents.tool import Tool

    named = load_reference(config.agent, base=base, field="agent")
    model = config.model
    if model is not None and (base / model).is_dir():
        model = str(base / model)
    if isinstance(named, Agent):
        return named if model is None else named.with_model(model)
    if callable(named) and not isinstance(named, Tool):
        made = _call_reference(named, "agent", config.agent, *([] if model is None else [model]))
        if isinstance(made, Agent):
            return made
        named = made
    if isinstance(named, Tool):
        raise ConfigError(
            f"agent: {config.agent} is a tool, not an agent. Name an Agent that has it: Agent(tools=[{named.name}])."
        )
    raise ConfigError(
        f"agent: {config.agent} is {type_of(named)}. It must be an Agent, or a function that takes a model "
        "and returns an Agent."
    )


def _with_memory(agent: Agent, config: RunConfig) -> Agent:
    if config.memory is None:
        return agent
    from agentfly.agents.memory import make_memory

    settings = config.memory.model_dump()
    return dataclasses.replace(agent, memory=make_memory(settings.pop("kind"), settings))


def _tasks(reference: str, base: Path, field: str) -> list[Task]:
    home, _, name = reference.rpartition(":")
    if not home or not name.isidentifier() or (base / reference).is_file():  # a path may hold a colon, too
        return to_tasks(base / reference)
    named = load_reference(reference, base=base, field=field)
    return to_tasks(_call_reference(named, field, reference) if callable(named) else named)


def _reward(reference: str | None, base: Path) -> AnyReward:
    from agentfly.agents.reward import tool_rewards

    if reference is None:
        return tool_rewards
    named = load_reference(reference, base=base, field="reward")
    return require_reward_object(named, reference)


def require_reward_object(named: object, reference: str) -> AnyReward:
    """Return the named object if it is a reward.

    Raises:
        ConfigError: it is not a reward.
    """
    from agentfly.agents.group_reward import AnyReward

    if not isinstance(named, AnyReward):
        raise ConfigError(f"reward: {reference} is {type_of(named)}, not a reward. Put @reward above it.")
    return named


def _curriculum(reference: str, base: Path) -> Curriculum:
    from agentfly.training.curriculum import Curriculum

    named = load_reference(reference, base=base, field="curriculum")
    made = _call_reference(named, "curriculum", reference) if callable(named) else named
    if not isinstance(made, Curriculum):
        raise ConfigError(
            f"curriculum: {reference} is {type_of(made)}. It must be a Curriculum, such as BySuccessRate(), or "
            "what makes one when it is called without arguments."
        )
    return made


def _oracle(reference: str, base: Path, agent: Agent) -> Script | Sequence[str]:
    named = load_reference(reference, base=base, field="oracle")
    if callable(named):
        needed = [one for one in inspect.signature(named).parameters.values() if one.default is one.empty]
        named = _call_reference(named, "oracle", reference, agent.format) if len(needed) == 1 else named
    if callable(named):
        script: Script = named
        return script
    if isinstance(named, (list, tuple)) and all(isinstance(text, str) for text in named):
        return named
    raise ConfigError(
        f"oracle: {reference} is {type_of(named)}. It must be a list of texts, one a turn, a function of the "
        "conversation and the number of the turn that returns a text, or a function of the tool-call format that "
        "returns one of these."
    )


def _call_reference(function: Callable[..., Any], field: str, reference: str, *arguments: Any) -> Any:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        shown = ", ".join(map(repr, arguments))
        raise ConfigError(f"{field}: {reference}({shown}) cannot be called: {error}.") from None
    return function(*arguments)
