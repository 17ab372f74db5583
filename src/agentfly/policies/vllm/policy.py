"""VLLMPolicy: a model served by vLLM, with token ids in and out, and with checked updates of its weights."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from agentfly.core.errors import (
    APIMalformed,
    APIRefused,
    ConfigError,
    PolicyError,
    PolicyUnavailable,
    PromptTooLong,
    ResourceError,
    error_message,
)
from agentfly.core.installation import require_packages
from agentfly.core.messages import PlacedImage
from agentfly.core.numbers import require_durations
from agentfly.core.threads.pool import run_in_thread
from agentfly.policies.catalog import resolve_model
from agentfly.policies.policy import Generation, SamplingParams, unsampleable_ids
from agentfly.policies.vllm.fleet import ADAPTER, ServedWeights, ServerFleet, WeightUpdate
from agentfly.policies.vllm.servers import (
    LeasedPolicyServer,
    PolicyServer,
    RemotePolicyServer,
    check_settings,
    resolve_spec,
)
from agentfly.policies.vllm.weight_sync import (
    LOW_PRECISION,
    PROBE,
    PROBE_TOKENS,
    TOLERANCES,
    AdapterSource,
    TrainerLogprobs,
    WeightCheck,
    WeightSource,
    WeightTransferDirectory,
    logprobs_of_directory,
)
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.model_server.spec import ModelServerSpec
from agentfly.resources.model_server.token_server import LOAD_WEIGHTS, TokenSample

if TYPE_CHECKING:
    from agentfly.policies.hf_tokenizer import HFTokenizer

MAX_SUPPRESSED_IDS = 1024
"""Maximum number of ids that vLLM can suppress. If it samples another id without a token, the rollout fails."""


class VLLMPolicy:
    """A policy whose model is served by one or several vLLM servers.

    All generations of a rollout go to one server, so that its prefix cache holds the earlier turns. A new rollout goes
    to the server with the fewest rollouts. A server that does not answer is no longer used, and its rollouts move to
    others. It is used again once a check shows that it serves the policy's weights. Cancelling a generation ends it on
    the server. A generation whose answer was lost is sampled once more; nothing of the lost answer was used.

    The policy starts the servers with an engine, or uses servers that are already running::

        VLLMPolicy(ModelServerSpec(model="Qwen/Qwen2.5-3B-Instruct", device="gpu"), servers=4)
        VLLMPolicy(urls=["http://a:8000/v1", "http://b:8000/v1"], model="Qwen/Qwen2.5-3B-Instruct")

    Args:
        spec: the servers to start. Only this policy may use them, because it updates their weights.
        servers: number of servers to start.
        engine: the engine that starts them; by default the policy creates one.
        urls: addresses of running servers, instead of ``spec``. They must run with ``--enable-scale-out
            --logprobs-mode processed_logprobs`` and ``VLLM_SERVER_DEV_MODE=1``. Weight updates need the worker
            extension `agentfly.resources.model_server.programs.agentfly_weights`.
        model: the model of these servers, as a directory or a name. Its tokenizer is loaded in this process.
        api_key_env: the environment variable that holds the key of these servers, if they require one.
        in_flight: what an update does with running generations. ``"wait"`` waits for their end. ``"keep"`` continues
            them with the new weights; each token then has the version of the weights that sampled it.
        raw_logprobs: whether log-probs at temperature 1 are also returned where tokens are sampled otherwise. The
            server then scores each such sample once more, which vLLM cannot do on servers with adapters.
        probe_ids: token ids of the probe that updates are checked with; by default the ids of `PROBE`.
        max_logprob_gap: largest mean distance between server and reference, in nats per token, that counts as
            rounding; by default 0.002 where the servers compute in float32, and 0.06 otherwise.
        weight_transfer_dir: directory through which weights go to the servers; by default the system's directory for
            temporary files. It must have the same path on the servers' machine.
        load_method: the method of the servers' workers that loads weights; vLLM's own is ``"reload_weights"``.
        drain_timeout_s: maximum number of seconds that an update waits for running generations.
        server_wait_timeout_s: maximum number of seconds that a generation waits for a usable server.
        call_timeout_s: maximum duration in seconds of one generation, for servers given by ``urls``. A spec has its own
            setting.

    Raises:
        ConfigError: the settings contradict each other, or name no model.
        PrerequisiteError: transformers is not installed, or the model or its tokenizer cannot be loaded.
    """

    def __init__(
        self,
        spec: ModelServerSpec | None = None,
        *,
        servers: int = 1,
        engine: ResourceEngine | None = None,
        urls: Sequence[str] = (),
        model: str | Path | None = None,
        api_key_env: str | None = None,
        in_flight: Literal["wait", "keep"] = "wait",
        raw_logprobs: bool = False,
        probe_ids: Sequence[int] | None = None,
        max_logprob_gap: float | None = None,
        weight_transfer_dir: str | Path | None = None,
        load_method: str = LOAD_WEIGHTS,
        drain_timeout_s: float = 600.0,
        server_wait_timeout_s: float = 600.0,
        call_timeout_s: float = 600.0,
    ) -> None:
        check_settings(spec, servers, urls, model, in_flight, raw_logprobs)
        require_durations(
            "VLLMPolicy",
            drain_timeout_s=drain_timeout_s,
            server_wait_timeout_s=server_wait_timeout_s,
            call_timeout_s=call_timeout_s,
        )
        require_packages("The tokenizer of a served model", "transformers")
        from agentfly.policies.hf_tokenizer import HFTokenizer

        self._model = resolve_model(model or (spec.model if spec is not None else ""))
        self._tokenizer = HFTokenizer.load(self._model)
        self._spec = spec and resolve_spec(spec, self._model, servers)
        self._servers = servers
        self._engine = engine
        self._urls = tuple(urls)
        self._api_key_env = api_key_env
        self._call_timeout_s = call_timeout_s
        self._raw = raw_logprobs
        self._transfer = WeightTransferDirectory(
            self._model, None if weight_transfer_dir is None else Path(weight_transfer_dir)
        )
        self._config: dict[str, Any] = json.loads((self._model / "config.json").read_text(encoding="utf-8"))
        rows = self._config.get("text_config", self._config).get("vocab_size", 0)
        self._never_sampled = unsampleable_ids(self._tokenizer, rows)
        self._context_length = 0
        probe = tuple(probe_ids if probe_ids is not None else self._tokenizer.encode_text(PROBE)[:PROBE_TOKENS])
        self._make_fleet = partial(
            ServerFleet,
            proof=WeightCheck(probe, self._default_tolerance() if max_logprob_gap is None else max_logprob_gap),
            running=in_flight,
            load_method=load_method,
            drain_timeout_s=drain_timeout_s,
            server_wait_timeout_s=server_wait_timeout_s,
        )
        self._fleet: ServerFleet | None = None
        self._version = 0
        self._owned = AsyncExitStack()

    # --- the policy's protocol ----------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> HFTokenizer:
        """The tokenizer of the model."""
        return self._tokenizer

    @property
    def context_length(self) -> int:
        """Maximum number of tokens in a generation, prompt included. It is known once the policy is entered."""
        self._require_entered()
        return self._context_length

    @property
    def version(self) -> int:
        """The number of updates of the weights so far."""
        return self._version

    @property
    def max_concurrent_generations(self) -> int | None:
        """Number of sequences that all servers together sample at a time; None if the spec does not set it."""
        spec = self._spec
        return None if spec is None or spec.max_num_seqs is None else spec.max_num_seqs * self._servers

    @property
    def in_use(self) -> bool:
        """Whether it has been entered and not left."""
        return self._fleet is not None

    @property
    def takes_images(self) -> bool:
        """Whether the model sees images."""
        return self._tokenizer.vision is not None

    @property
    def takes_adapters(self) -> bool:
        """Whether the policy starts its servers with room for adapters. False for servers given by ``urls``."""
        return self._spec is not None and self._spec.adapters > 0

    @property
    def loads(self) -> dict[str, int]:
        """Number of rollouts of each server."""
        return self._require_entered().routes.loads

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        rollout_id: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Sample a continuation of ``prompt_ids``; see `agentfly.policies.policy.Policy.generate`.

        Log-probs are those under the distribution that was sampled from; at temperature 0 they are those at
        temperature 1 without cuts. Ids without a token are suppressed (see `MAX_SUPPRESSED_IDS`).

        Raises:
            PromptTooLong: the prompt leaves no room for one token; nothing was sent.
            ConfigError: images are given to a model that takes none.
            WeightUpdateError: the last update of the weights failed.
            PolicyUnavailable: servers died, or did not answer in time.
            PolicyError: the server refused the request, or its answer is not valid.
        """
        fleet = self._require_entered()
        self._check_prompt(prompt_ids, images)
        failure = "no server is left"
        for _ in range(len(fleet.members) + 1):
            member = await fleet.server_for(rollout_id)
            try:
                sample = await self._sample(member, prompt_ids, sampling, images)
                version = await fleet.versions(sample)
                if version is not None:
                    raw = await self._raw_logprobs(member, prompt_ids, sample, sampling, version, images)
                    return Generation(sample.ids, sample.logprobs, sample.finish_reason, version, raw)
                failure = f"{member.name} does not have the weights of this policy"
            except (APIMalformed, APIRefused) as error:
                raise PolicyError(f"{member.name}: {error_message(error)}") from error
            except ResourceError as error:
                failure = error_message(error)
            fleet.mark_unavailable(member, failure)
        raise PolicyUnavailable(f"No server sampled: {failure}")

    def release_rollout(self, rollout_id: str) -> None:
        """Make room for another rollout on the server of a rollout that has ended."""
        if self._fleet is not None:
            self._fleet.routes.release_rollout(rollout_id)

    async def __aenter__(self) -> Self:
        if self._fleet is not None:
            raise PolicyError("The policy is already in use: it can be entered once at a time.")
        async with AsyncExitStack() as stack:
            stack.callback(self._transfer.close)
            fleet = self._make_fleet(await self._members(stack))
            stack.push_async_callback(fleet.close)
            await fleet.start()
            self._owned = stack.pop_all()
        self._context_length = min(member.context_length for member in fleet.members)
        self._fleet = fleet
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fleet, self._version = None, 0
        await self._owned.aclose()

    # --- weights ------------------------------------------------------------------------------------------------------

    async def update_weights(
        self, source: WeightSource, *, reference: TrainerLogprobs | None = None, version: int | None = None
    ) -> WeightUpdate:
        """Load other weights of the same model into all servers, and check that they serve them. An adapter is removed.

        Args:
            source: a directory with safetensors files, or an iterator over names and tensors. A directory must stay
                until the next update: a server that restarts loads it again.
            reference: log-probs by the trainer's model, to compare with. By default the weights are loaded from the
                directory in this process. The reference is called once, while generations still run.
            version: the version of the new weights; by default the next number.

        Raises:
            ConfigError: the directory has no weights.
            PolicyUnavailable: no server is usable, or running generations did not end in time. The weights are
            unchanged. WeightUpdateError: a server could not be updated. Nothing is sampled until an update succeeds.
            WeightMismatch: a server does not serve the new weights, by the check. The consequence is the same.
        """
        fleet = self._require_entered()
        directory = await run_in_thread(self._transfer.write_weights, source)
        weights = replace(fleet.weights, directory=directory, adapter=None)
        return await self._update(fleet, weights, reference, version)

    async def update_adapter(
        self, source: AdapterSource, *, reference: TrainerLogprobs | None = None, version: int | None = None
    ) -> WeightUpdate:
        """Load a LoRA adapter into all servers, in place of the previous one, and check that they sample with it.

        Args:
            source: the directory of an adapter in peft's format, which must stay until the next update; or a function
                that saves an adapter into the directory that it is given.
            reference, version: see `update_weights`. The default reference needs peft.

        Raises:
            UsageError: the spec has no ``adapters``.
            ConfigError, PolicyUnavailable, WeightUpdateError, WeightMismatch: see `update_weights`.
        """
        fleet = self._require_entered()
        path = await run_in_thread(self._transfer.write_adapter, source)
        return await self._update(fleet, replace(fleet.weights, adapter=path), reference, version)

    async def _update(
        self, fleet: ServerFleet, weights: ServedWeights, reference: TrainerLogprobs | None, version: int | None
    ) -> WeightUpdate:
        weights = replace(weights, version=fleet.weights.version + 1 if version is None else version)
        reference = reference or logprobs_of_directory(self._model, weights.directory, weights.adapter)
        made = await fleet.update(weights, reference)
        self._version = made.version
        await run_in_thread(self._transfer.keep_only, weights.directory, weights.adapter)
        return made

    # --- parts --------------------------------------------------------------------------------------------------------

    async def _members(self, stack: AsyncExitStack) -> list[PolicyServer]:
        if self._spec is None:
            return [RemotePolicyServer(url, self._api_key_env, self._call_timeout_s) for url in self._urls]
        engine = self._engine
        if engine is None:
            engine = await stack.enter_async_context(ResourceEngine())
        name = uuid.uuid4().hex[:6]
        return [
            LeasedPolicyServer(f"{self._spec.label}, server {number} of policy {name}", self._spec, engine)
            for number in range(self._servers)
        ]

    async def _sample(
        self, member: PolicyServer, prompt_ids: Sequence[int], sampling: SamplingParams, images: Sequence[PlacedImage]
    ) -> TokenSample:
        greedy = sampling.temperature == 0
        sample = await member.server.sample(
            _collapse_placeholders(prompt_ids, images, self._placeholder),
            max_tokens=min(sampling.max_tokens, self._context_length - len(prompt_ids)),
            temperature=sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else sampling.top_k,
            stop_ids=sampling.stop_ids,
            seed=sampling.seed,
            adapter=self._adapter,
            images=[placed.image for placed in images],
            barred_ids=self._barred(sampling),
        )
        if images and sample.prompt_ids != tuple(prompt_ids):
            raise APIMalformed(
                "The server puts other placeholders for the images into the prompt than the chat format does."
            )
        return sample

    async def _raw_logprobs(
        self,
        member: PolicyServer,
        prompt_ids: Sequence[int],
        sample: TokenSample,
        sampling: SamplingParams,
        version: int | tuple[int, ...],
        images: Sequence[PlacedImage],
    ) -> Sequence[float] | None:
        """Return log-probs at temperature 1 without cuts; None if they are not requested or not available."""
        plain = sampling.temperature == 0 or (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, 0)
        if plain and set(sampling.suppressed_ids) <= set(self._never_sampled):
            return sample.logprobs
        whole = [*prompt_ids, *sample.ids]
        if not self._raw or images or len(whole) >= self._context_length or version != self._version:
            return None
        numbers = await member.server.prompt_logprobs(whole, adapter=self._adapter)
        return numbers[-len(sample.ids) :] if version == self._version else None

    def _barred(self, sampling: SamplingParams) -> Sequence[int]:
        """Return the ids to suppress: the requested ones, and as many ids without a token as vLLM accepts."""
        return tuple(dict.fromkeys([*sampling.suppressed_ids, *self._never_sampled]))[:MAX_SUPPRESSED_IDS]

    @property
    def _placeholder(self) -> int | None:
        vision = self._tokenizer.vision
        return self._tokenizer.control_tokens[vision.placeholder] if vision is not None else None

    @property
    def _adapter(self) -> str | None:
        return ADAPTER if self._require_entered().weights.adapter is not None else None

    def _check_prompt(self, prompt_ids: Sequence[int], images: Sequence[PlacedImage]) -> None:
        if len(prompt_ids) >= self._context_length:
            raise PromptTooLong(
                f"The prompt has {len(prompt_ids)} tokens and the servers hold {self._context_length}, prompt and "
                "sampled together: no room is left. Shorten it, or start them with a longer context_length."
            )
        if not prompt_ids:
            raise PolicyError("The prompt is empty: there is nothing to continue.")
        if images and not self.takes_images:
            raise ConfigError(f"The conversation has images, and the model in {self._model} sees none.")

    def _default_tolerance(self) -> float:
        asked = self._spec.dtype if self._spec is not None else "auto"
        own = self._config.get("dtype", self._config.get("torch_dtype"))
        return TOLERANCES.get(str(own) if asked == "auto" else asked, LOW_PRECISION)

    def _require_entered(self) -> ServerFleet:
        if self._fleet is None:
            raise PolicyError("The policy is not in use yet. Use it inside `async with policy:`.")
        return self._fleet


def _collapse_placeholders(ids: Sequence[int], images: Sequence[PlacedImage], placeholder: int | None) -> list[int]:
    """Return ids with one placeholder for each image. vLLM expects one, and inserts the number that the image needs."""
    collapsed: list[int] = []
    done = 0
    for placed in sorted(images, key=lambda placed: placed.start):
        assert placeholder is not None
        collapsed += [*ids[done : placed.start], placeholder]
        done = placed.stop
    return [*collapsed, *ids[done:]]
