"""The policy that a run trains, in use: loaded, entered, or joined to the servers that sample for it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentfly.errors import ConfigError, type_of
from agentfly.events import EventStream, Progress
from agentfly.policies.load import load_policy
from agentfly.policies.policy import Policy
from agentfly.policies.vllm.policy import VLLMPolicy
from agentfly.threads.pool import on_thread_to_its_end
from agentfly.training.served_policy import ServedPolicy
from agentfly.training.trainable_policy import TrainablePolicy

if TYPE_CHECKING:
    from agentfly.training.config.train_config import TrainConfig


async def trained_policy(
    given: Policy | None, model: str | Path, config: TrainConfig, events: EventStream, owned: AsyncExitStack
) -> TrainablePolicy:
    """The policy to train, ready to sample and to learn.

    Args:
        given: what the user gave. One that is in use stays the user's; one that is not is entered here, and left with
            ``owned``. The model of servers is loaded into this process, where it learns.
        model: the agent's model, loaded if nothing was given.
        config: how to load it.
        events: where it is told that something takes a while.
        owned: what is entered here goes onto it.

    Raises:
        ConfigError: the policy's weights cannot be trained.
        PrerequisiteError: the model cannot be had, or servers cannot be started.
    """
    policy = given
    if given is None or isinstance(given, VLLMPolicy):
        events.emit(Progress(what=f"loading {model}"))
        loaded = await on_thread_to_its_end(partial(load_policy, model, **config.policy_settings))
        policy = loaded if given is None else ServedPolicy(loaded.model, given, events=events)
    if not isinstance(policy, TrainablePolicy):
        raise ConfigError(
            f"policy is {type_of(policy)}, which cannot be trained: its weights are not in this process. Give the "
            "agent a model that is loaded here (a name, or a Hugging Face directory), or have vLLM sample from it "
            "(policy: vllm)."
        )
    if not policy.in_use:
        if isinstance(policy, ServedPolicy):
            events.emit(Progress(what="starting vLLM"))
        await owned.enter_async_context(policy)
    return policy
