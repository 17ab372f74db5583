"""TrainablePolicy: the policy interface of the trainer, and its implementation with vLLM servers as samplers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from transformers import PreTrainedModel

from agentfly.core.errors import ConfigError, type_of
from agentfly.core.events import EventStream, Progress, WeightsSynced
from agentfly.core.messages import PlacedImage
from agentfly.core.threads.pool import run_in_thread_to_completion
from agentfly.policies.embedded.loading import has_adapters, merged_weights, write_adapters
from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.policies.load import load_policy
from agentfly.policies.policy import Generation, Policy, SamplingParams
from agentfly.policies.vllm.policy import VLLMPolicy
from agentfly.policies.vllm.weight_sync import logprobs_of_model
from agentfly.training.learning.trainable_model import adapters_disabled

if TYPE_CHECKING:
    from agentfly.training.config.train_config import TrainConfig


@runtime_checkable
class TrainablePolicy(Policy, Protocol):
    """A policy whose weights are in this process and are updated in place."""

    @property
    def tokenizer(self) -> HFTokenizer:
        """The tokenizer of the model."""
        ...

    @property
    def model(self) -> PreTrainedModel:
        """The model that it samples from."""
        ...

    @property
    def in_use(self) -> bool:
        """Whether it has been entered and not left."""
        ...

    def exclusive_access(self) -> AbstractAsyncContextManager[object]:
        """Allow weight updates in the block. Nothing is sampled from partly updated weights."""
        ...

    def weights_updated(self, version: int | None = None) -> None:
        """Drop everything that was computed with the old weights.

        Call this inside `exclusive_access`. The version becomes ``version``, or increases by one.
        """
        ...


class ServedPolicy:
    """Samples from vLLM servers, which receive the weights of a model in this process.

    The servers continue to sample while the model learns. When `exclusive_access` exits after an update, the servers
    receive the new weights, and they are verified. The first exit does the same to prove that both have one model.
    ``in_flight`` of `VLLMPolicy` decides what happens to running generations. Servers with LoRA slots receive adapters
    as they are; others receive merged weights.

    Args:
        model: the model that learns: the one that the servers were started with, or a later state of it.
        servers: the policy that samples. It is entered and exited with this one.
        events: receives `WeightsSynced`.
    """

    def __init__(self, model: PreTrainedModel, servers: VLLMPolicy, *, events: EventStream | None = None) -> None:
        self._model = model
        self._servers = servers
        self._events = events or EventStream()
        self._has_base = False
        self._lock = asyncio.Lock()
        # Set before the first update too: the first sync proves that both sides have the same model.
        self._pending_version: int | None = servers.version

    # --- the policy's protocol ----------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> HFTokenizer:
        """The tokenizer of the model."""
        return self._servers.tokenizer

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of a generation, prompt included."""
        return self._servers.context_length

    @property
    def max_concurrent_generations(self) -> int | None:
        """The number of sequences that the servers sample at a time; None if unknown."""
        return self._servers.max_concurrent_generations

    @property
    def version(self) -> int:
        """The version of the weights that the servers sample with."""
        return self._servers.version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        rollout_id: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Sample a continuation of ``prompt_ids``; see `VLLMPolicy.generate`."""
        return await self._servers.generate(prompt_ids, sampling, rollout_id=rollout_id, images=images)

    def release_rollout(self, rollout_id: str) -> None:
        """The rollout has ended."""
        self._servers.release_rollout(rollout_id)

    async def __aenter__(self) -> Self:
        await self._servers.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._servers.__aexit__(kind, error, trace)

    @property
    def in_use(self) -> bool:
        """Whether it has been entered and not left."""
        return self._servers.in_use

    # --- training -----------------------------------------------------------------------------------------------------

    @property
    def model(self) -> PreTrainedModel:
        """The model that learns."""
        return self._model

    @asynccontextmanager
    async def exclusive_access(self) -> AsyncIterator[PreTrainedModel]:
        """Allow weight updates in the block. The servers sample with the old weights until it exits.

        Raises:
            WeightUpdateError, PolicyUnavailable: the servers did not accept the new weights.
        """
        async with self._lock:
            yield self._model
            if self._pending_version is not None:
                await self._sync_weights(self._pending_version)

    def weights_updated(self, version: int | None = None) -> None:
        """Send the changed weights to the servers when `exclusive_access` exits.

        The version becomes ``version``, or increases by one.
        """
        self._pending_version = (
            (self.version if self._pending_version is None else self._pending_version) + 1
            if version is None
            else version
        )

    async def _sync_weights(self, version: int) -> None:
        model, reference = self._model, logprobs_of_model(self._model)
        if has_adapters(model) and self._servers.takes_adapters:
            await self._sync_base_weights()
            made = await self._servers.update_adapter(
                partial(write_adapters, model), reference=reference, version=version
            )
        else:
            made = await self._servers.update_weights(merged_weights(model), reference=reference, version=version)
        self._pending_version = None
        self._events.emit(WeightsSynced(version=version, logprob_gap=made.logprob_gap, paused_s=made.paused_s))

    async def _sync_base_weights(self) -> None:
        """Send the base weights to servers that an earlier run has given other weights."""
        if not self._has_base and self._servers.version > 0:
            with adapters_disabled(self._model):
                reference = logprobs_of_model(self._model)
                await self._servers.update_weights(merged_weights(self._model), reference=reference)
        self._has_base = True


async def open_trainable_policy(
    given: Policy | None, model: str | Path, config: TrainConfig, events: EventStream, owned: AsyncExitStack
) -> TrainablePolicy:
    """Return the policy to train, ready to sample and to learn.

    Args:
        given: the user's policy. A policy in use stays open; another is entered here and closed with ``owned``. For a
            `VLLMPolicy`, the model is also loaded into this process, where it learns.
        model: the agent's model, which is loaded if no policy was given.
        config: settings for loading.
        events: receives `Progress`.
        owned: closes what is entered here.

    Raises:
        ConfigError: the policy's weights cannot be trained.
        PrerequisiteError: the model is not available, or the servers cannot be started.
    """
    policy = given
    if given is None or isinstance(given, VLLMPolicy):
        events.emit(Progress(what=f"loading {model}"))
        loaded = await run_in_thread_to_completion(partial(load_policy, model, **config.policy_settings))
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
