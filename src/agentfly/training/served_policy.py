"""ServedPolicy: a model that is trained in this process and sampled by servers of vLLM beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Self

from transformers import PreTrainedModel

from agentfly.events import EventStream, WeightsHandedOver
from agentfly.images import PlacedImage
from agentfly.policies.embedded.adapters import has_adapters, merged_weights, write_adapters
from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.policies.policy import Generation, SamplingParams
from agentfly.policies.vllm.policy import VLLMPolicy
from agentfly.policies.vllm.reference import model_reference
from agentfly.training.learning.adapters import adapters_disabled


class ServedPolicy:
    """Samples from servers, whose weights follow those of a model in this process.

    Adapters are handed over as they are to servers that were started with room for them, and merged to others.

    The servers go on sampling while the model learns. When `exclusive` is left and the weights have changed, and before
    the first update too, they are handed to the servers and proved to have arrived; what is sampled from then on has
    the new version. What becomes of generations that the hand-over finds is for ``in_flight`` of `VLLMPolicy` to say.

    Args:
        model: the model that learns: the one that the servers were started with, or a later state of it.
        servers: the policy that samples. It is entered and left with this one.
        events: where each hand-over is told.
    """

    def __init__(self, model: PreTrainedModel, servers: VLLMPolicy, *, events: EventStream | None = None) -> None:
        self._model = model
        self._servers = servers
        self._events = events or EventStream()
        self._has_base = False
        self._lock = asyncio.Lock()
        self._due: int | None = servers.version  # also before the first update: it proves that both have one model

    # --- the policy's protocol ----------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> HFTokenizer:
        """The tokenizer of the model."""
        return self._servers.tokenizer

    @property
    def context_length(self) -> int:
        """The most tokens, prompt and sampled together, that a generation can hold."""
        return self._servers.context_length

    @property
    def max_concurrent_generations(self) -> int | None:
        """How many sequences the servers sample at a time, where that is known."""
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

    def forget(self, rollout_id: str) -> None:
        """The rollout has ended."""
        self._servers.forget(rollout_id)

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
    async def exclusive(self) -> AsyncIterator[PreTrainedModel]:
        """Have the model to oneself, to change its weights. The servers sample with the old ones until the end.

        Raises:
            WeightUpdateError, PolicyUnavailable: the servers could not be given the new weights.
        """
        async with self._lock:
            yield self._model
            if self._due is not None:
                await self._hand_over(self._due)

    def weights_updated(self, version: int | None = None) -> None:
        """The weights have changed: hand them over when `exclusive` is left.

        The version becomes ``version``, or one more than it was.
        """
        self._due = (self.version if self._due is None else self._due) + 1 if version is None else version

    async def _hand_over(self, version: int) -> None:
        model, reference = self._model, model_reference(self._model)
        if has_adapters(model) and self._servers.takes_adapters:
            await self._give_base()
            made = await self._servers.update_adapter(
                partial(write_adapters, model), reference=reference, version=version
            )
        else:
            made = await self._servers.update_weights(merged_weights(model), reference=reference, version=version)
        self._due = None
        self._events.emit(WeightsHandedOver(version=version, distance=made.distance, paused_s=made.paused_s))

    async def _give_base(self) -> None:
        """Have servers that got other weights before, from another run, serve what the adapters are put on."""
        if not self._has_base and self._servers.version > 0:
            with adapters_disabled(self._model):
                reference = model_reference(self._model)
                await self._servers.update_weights(merged_weights(self._model), reference=reference)
        self._has_base = True
