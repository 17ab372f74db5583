"""EmbeddedPolicy: a transformers model in this process, sampled in a running batch and shared with training."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from transformers import PreTrainedModel

from agentfly.core.errors import ConfigError, PolicyError, PromptTooLong
from agentfly.core.messages import PlacedImage
from agentfly.policies.catalog import resolve_model
from agentfly.policies.embedded.continuous_batching import ContinuousBatch, GenerationRequest, SamplerThread
from agentfly.policies.embedded.loading import choose_device, choose_dtype, choose_threads, load_model
from agentfly.policies.embedded.sampling import OutputLayer, suppress_ids
from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.policies.policy import Generation, SamplingParams, unsampleable_ids


class EmbeddedPolicy:
    """A policy whose model is loaded in this process.

    Generations join and leave one running batch at any token. Keys and values of a rollout's earlier turns are kept
    until the rollout is released. A prefix that a prompt shares with any cached sequence is copied instead of computed.
    The weights are those of ``model``. A trainer updates them in place inside `exclusive_access`, so nothing is
    synchronised. Ids without a token of the tokenizer are suppressed for the model, in sampling and in scoring.

    Sampling is repeatable. The random numbers of a generation depend only on the policy's seed, the rollout's id and
    the number of its turn, not on concurrent rollouts. The last bit of a token's logits can still depend on the batch
    that it is computed in, which rarely changes a sampled token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: HFTokenizer,
        *,
        max_concurrent_generations: int = 64,
        max_cached_sequences: int | None = None,
        max_context_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        """Use a loaded model.

        Args:
            model: a causal language model whose attention can be chosen (see `packed_attention`).
            tokenizer: its tokenizer.
            max_concurrent_generations: maximum number of generations in the running batch; others wait in order.
            max_cached_sequences: maximum number of sequences whose keys and values are in memory, running ones
                included; by default twice ``max_concurrent_generations``. Each takes memory for up to twice its tokens.
            max_context_tokens: maximum number of tokens in a sequence, prompt and sampled; by default the model's own.
            seed: seed of all random numbers of the policy.

        Raises:
            ConfigError: a limit is out of its range.
        """
        longest = int(model.config.max_position_embeddings)
        resident = 2 * max_concurrent_generations if max_cached_sequences is None else max_cached_sequences
        if max_concurrent_generations < 1 or resident < max_concurrent_generations:
            raise ConfigError(
                f"max_concurrent_generations is {max_concurrent_generations} and max_cached_sequences {resident}; they "
                "must be at least 1, and max_cached_sequences no less than max_concurrent_generations."
            )
        if max_context_tokens is not None and not 2 <= max_context_tokens <= longest:
            raise ConfigError(f"max_context_tokens is {max_context_tokens}; this model can hold 2 to {longest} tokens.")
        suppress_ids(model, unsampleable_ids(tokenizer, OutputLayer(model).rows))
        self.model = model
        self._tokenizer = tokenizer
        self._context_length = max_context_tokens or longest
        self.max_concurrent_generations = max_concurrent_generations
        self._max_cached_sequences = resident
        self._seed = seed
        self._version = 0
        self._turns: Counter[str] = Counter()
        self._exclusive = asyncio.Lock()
        self._sampler: SamplerThread | None = None

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_concurrent_generations: int = 64,
        max_cached_sequences: int | None = None,
        max_context_tokens: int | None = None,
        threads: int | None = None,
        seed: int = 0,
    ) -> Self:
        """Load a model by name. It takes seconds, or minutes if the model must be fetched first.

        Args:
            name: a name of the catalogue, a local directory, or a Hugging Face id (see `catalog.resolve_model`).
            device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:N``.
            dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto`` (see `loading.choose_dtype`).
            threads: CPU threads to compute on; by default see `loading.choose_threads`.
            max_concurrent_generations, max_cached_sequences, max_context_tokens, seed: see the class.

        Raises:
            PrerequisiteError: the model cannot be fetched, or the machine lacks something.
            ConfigError: a setting is out of its range, or the kind of model is not supported.
        """
        path = resolve_model(name)
        chosen = choose_device(device)
        model = load_model(path, chosen, choose_dtype(dtype, chosen))
        if chosen.type == "cpu":
            torch.set_num_threads(threads or choose_threads(model.num_parameters()))
        return cls(
            model,
            HFTokenizer.load(path),
            max_concurrent_generations=max_concurrent_generations,
            max_cached_sequences=max_cached_sequences,
            max_context_tokens=max_context_tokens,
            seed=seed,
        )

    @property
    def tokenizer(self) -> HFTokenizer:
        """The tokenizer of the model."""
        return self._tokenizer

    @property
    def context_length(self) -> int:
        """Maximum number of tokens in a generation, prompt and sampled tokens together."""
        return self._context_length

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    @property
    def version(self) -> int:
        """The number of updates of the weights so far."""
        return self._version

    @property
    def in_use(self) -> bool:
        """Whether it has been entered and not left."""
        return self._sampler is not None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        rollout_id: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Sample a continuation of ``prompt_ids``; see `agentfly.policies.policy.Policy.generate`.

        Log-probs are float32, under the distribution that was sampled from; at temperature 0 they are those at
        temperature 1 without cuts.

        Raises:
            PromptTooLong: the prompt leaves no room for one token.
            PolicyError: the generation failed, the policy is not entered, or images are given, which it does not take.
        """
        if images:
            raise PolicyError(
                "The embedded policy does not support images, and this conversation holds some. Use a policy that "
                "takes images, or leave them out."
            )
        sampler = self._require_open()
        self._check_prompt(prompt_ids)
        turn = self._turns[rollout_id]
        self._turns[rollout_id] += 1
        seed = sampling.seed if sampling.seed is not None else f"{self._seed}/{rollout_id}/{turn}"
        request = GenerationRequest(rollout_id, array("i", prompt_ids), sampling, random.Random(seed))
        await sampler.generate(request)
        assert request.finish_reason is not None
        return Generation(request.ids, request.logprobs, request.finish_reason, request.version, request.raw_logprobs)

    def release_rollout(self, rollout_id: str) -> None:
        """Allow the keys and values of a finished rollout to be evicted."""
        self._turns.pop(rollout_id, None)
        if self._sampler is not None:
            self._sampler.enqueue(lambda batch: batch.forget(rollout_id))

    @asynccontextmanager
    async def exclusive_access(self) -> AsyncIterator[PreTrainedModel]:
        """Use the model alone: wait until no generation runs, and keep new ones waiting until the block ends.

        A trainer updates the weights in a thread inside the block, and calls `weights_updated` before it ends.
        """
        async with self._exclusive:
            sampler = self._sampler
            try:
                if sampler is not None:
                    await sampler.pause()
                yield self.model
            finally:
                self.model.eval()  # type: ignore[no-untyped-call]
                if sampler is not None:
                    sampler.resume()

    def weights_updated(self, version: int | None = None) -> None:
        """Drop all keys and values after an update of the weights. Call it inside `exclusive_access`.

        The version becomes ``version``, as when a run is resumed, or increases by one.
        """
        self._version = new = self._version + 1 if version is None else version
        if self._sampler is not None:
            self._sampler.enqueue(lambda batch: batch.invalidate_cache(new))

    async def __aenter__(self) -> Self:
        if self._sampler is not None:
            raise PolicyError("The policy is already in use: it can be entered once at a time.")
        batch = ContinuousBatch(
            self.model,
            max_concurrent=self.max_concurrent_generations,
            max_cached_sequences=self._max_cached_sequences,
            context_length=self._context_length,
            version=self._version,
        )
        self._sampler = SamplerThread(batch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            await sampler.close()

    def _require_open(self) -> SamplerThread:
        if self._sampler is None:
            raise PolicyError("The policy is not in use yet. Generate inside `async with policy:`.")
        return self._sampler

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        if len(prompt_ids) >= self._context_length:
            raise PromptTooLong(
                f"The prompt has {len(prompt_ids)} tokens and the policy holds {self._context_length}, prompt and "
                "sampled together: no room is left. Shorten the prompt, or load the model with more max_context_tokens."
            )
        if not prompt_ids:
            raise PolicyError("The prompt is empty: there is nothing to continue.")
        vocabulary = int(self.model.config.vocab_size)
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
            raise PolicyError(
                f"The prompt holds token ids outside 0 to {vocabulary - 1}. Was it made with another model's tokenizer?"
            )
