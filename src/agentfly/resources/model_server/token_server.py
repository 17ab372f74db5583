"""TokenServer: requests to a server that takes and returns token ids, in addition to the OpenAI API.

It speaks vLLM's interface: ``/inference/v1/generate`` (with ``--enable-scale-out``), and the paths that change weights
(with ``VLLM_SERVER_DEV_MODE=1``). A sample is checked to be complete.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentfly.core.errors import APIMalformed, APIRefused, APIUnavailable, ResourceError, UsageError
from agentfly.core.messages import Image
from agentfly.resources.model_api.client import ModelClient
from agentfly.resources.model_api.responses import Json, read_json, read_usage

_NO_LOGPROB = -9999.0  # sent by vLLM for missing values and for minus infinity


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """Ids ``start`` to ``stop`` of a sample came from the weights with this label."""

    version: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TokenSample:
    """A sampled continuation of a prompt.

    Attributes:
        ids: the sampled token ids in order, including the stop id if one was sampled.
        logprobs: log-prob per id under the distribution that it was sampled from, temperature and cuts applied; at
            temperature 0 those at temperature 1.
        finish_reason: ``stop`` if a stop id was sampled, ``length`` if a limit cut it.
        weight_versions: the labels of the weights that the ids came from, in order; empty if the server reports none.
        prompt_ids: the prompt that was continued, if the server was asked to return it.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    prompt_ids: tuple[int, ...] | None = None


def read_sample(answer: Json, prompt_length: int, stop_ids: Sequence[int]) -> TokenSample:
    """Return the sample in a server's answer to ``/inference/v1/generate``.

    Args:
        answer: the answer.
        prompt_length: the number of ids of the prompt.
        stop_ids: the ids that were to end the sample.

    Raises:
        APIUnavailable: the server aborted the sample.
        APIMalformed: ids, log-probs and the server's own count do not agree, or they answer another prompt. Such a
            sample could not be trained on.
    """
    try:
        (choice,) = answer["choices"]
        ids, finish = choice["token_ids"], choice["finish_reason"]
        if finish not in ("stop", "length"):
            raise APIUnavailable(f"The server ended a sample before its time, with {finish!r}.")
        content = choice["logprobs"]["content"]
        named, numbers = [one["token_id"] for one in content], tuple(float(one["logprob"]) for one in content)
        weights = tuple(
            WeightVersionSpan(s["version"], s["start"], s["end"]) for s in choice.get("weight_versions") or ()
        )
    except (LookupError, TypeError, ValueError):
        raise APIMalformed("The server answers without token ids or log-probs, which it was asked for.") from None
    sent = answer.get("prompt_token_ids")
    sample = TokenSample(tuple(ids), numbers, finish, weights, None if sent is None else tuple(sent))
    _check_counts(sample, answer, prompt_length)
    _check_values(sample, named, stop_ids)
    return sample


def _check_counts(sample: TokenSample, answer: Json, prompt_length: int) -> None:
    usage = read_usage(answer)
    if usage is None:
        raise APIMalformed("The server does not say how many tokens it read and sampled.")
    if usage.prompt_tokens != prompt_length:
        raise APIMalformed(
            f"The server continued a prompt of {usage.prompt_tokens} ids that is not the one of {prompt_length} ids "
            "that it was given."
        )
    if not len(sample.ids) == len(sample.logprobs) == usage.completion_tokens:
        raise APIMalformed(
            f"The server counts {usage.completion_tokens} sampled tokens and sends {len(sample.ids)} ids and "
            f"{len(sample.logprobs)} log-probs. Such a sample cannot be trusted."
        )
    edges = [0, *(edge for span in sample.weight_versions for edge in (span.start, span.stop)), len(sample.ids)]
    if sample.weight_versions and (edges[0::2] != edges[1::2] or edges != sorted(edges)):
        raise APIMalformed("The server's account of which weights sampled which ids has gaps.")


def _check_values(sample: TokenSample, named: Sequence[int], stop_ids: Sequence[int]) -> None:
    if list(named) != list(sample.ids) or not sample.ids:
        raise APIMalformed("The server's log-probs are of other ids than it sampled.")
    wrong = [number for number in sample.logprobs if not _NO_LOGPROB < number < 1e-3 or math.isnan(number)]
    if wrong:
        raise APIMalformed(f"The server sends {wrong[0]} for the log-prob of a token that it sampled.")
    if sample.finish_reason == "stop" and sample.ids[-1] not in stop_ids:
        raise APIMalformed("The server says that a stop id ended the sample, and its last id is none.")


def read_logprobs(answer: Json, ids: Sequence[int]) -> tuple[float, ...]:
    """Return the log-prob of each id after the first, from an answer with ``prompt_logprobs``.

    Raises:
        APIMalformed: they are missing.
    """
    try:
        told = answer["prompt_logprobs"]
        numbers = tuple(float(told[place][str(ids[place])]["logprob"]) for place in range(1, len(ids)))
    except (LookupError, TypeError, ValueError):
        raise APIMalformed("The server answers without the log-probs of the prompt, which it was asked for.") from None
    if len(told) != len(ids) or not all(map(math.isfinite, numbers)):
        raise APIMalformed(f"The server sends {len(told)} log-probs for a prompt of {len(ids)} ids, or some are none.")
    return numbers


def read_logprob_of(answer: Json, wanted: int) -> float:
    """Return the log-prob of an id at the position of the sampled token, from an answer with ``logprob_token_ids``.

    Raises:
        APIMalformed: it is missing.
    """
    try:
        (place,) = answer["choices"][0]["logprobs"]["content"]
        (number,) = {float(one["logprob"]) for one in place["top_logprobs"] if one["token_id"] == wanted}
    except (LookupError, TypeError, ValueError):
        raise APIMalformed("The server answers without the log-prob of the id that it was asked for.") from None
    return number


CONTROL_TIMEOUT_S = 30.0
"""Time limit of requests that do not use the model, in seconds."""

LOAD_WEIGHTS = "load_weights_in_place"
"""The worker's method of `agentfly.resources.model_server.programs.agentfly_weights`."""

_MAX_CONCURRENT_SCORING = 8
_PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 1, "ignore_eos": True, "detokenize": False}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model by its server's account: its name in requests, and the most tokens that it holds."""

    name: str
    context_length: int


class TokenServer(ABC):
    """A server that samples token ids: a `ModelServer`, or a running server given by its address."""

    @abstractmethod
    async def request(
        self, method: str, path: str, body: Json | None = None, *, call_timeout_s: float | None = None
    ) -> Json:
        """Make one request and return its answer.

        Args:
            method: ``GET`` or ``POST``.
            path: from the server's root, such as ``/v1/models``.
            body: the body, sent as JSON.
            call_timeout_s: time limit in seconds; None means the limit of a generation.

        Raises:
            ModelAPIError: it refuses or fails; see `agentfly.resources.model_api.client.ModelClient`.
            ResourceDied: the server is gone and will not be started again.
        """

    @property
    @abstractmethod
    def model(self) -> str:
        """The name of the model in requests."""

    # --- sampling and scoring -----------------------------------------------------------------------------------------

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop_ids: Sequence[int] = (),
        seed: int | None = None,
        adapter: str | None = None,
        images: Sequence[Image] = (),
        barred_ids: Sequence[int] = (),
    ) -> TokenSample:
        """Sample a continuation of token ids, as token ids: nothing is decoded or encoded on the way.

        Args:
            prompt_ids: ids of the whole prompt.
            max_tokens: limit on sampled tokens.
            temperature: divides the logits; 0 selects the most likely token.
            top_p: share of probability mass to sample from.
            top_k: number of most likely tokens to sample from; 0 means all.
            stop_ids: ids that end the sample, which alone do: the model's own end of text does not.
            seed: makes the sample repeatable on one server.
            adapter: the name of a loaded adapter to sample with.
            images: the images, with one placeholder each in the prompt. The sample then reports their tokens.
            barred_ids: ids that are not sampled: their probability is multiplied by e to the power of -100.

        Raises:
            APIMalformed: ids, log-probs and counts of the answer do not agree.
            ResourceDied, ModelAPIError: as in `request`.
        """
        sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        sampling |= {"max_tokens": max_tokens, "stop_token_ids": list(stop_ids), "ignore_eos": True}
        sampling |= {"logprobs": 0, "detokenize": False}
        if seed is not None:
            sampling["seed"] = seed
        if barred_ids:
            sampling["logit_bias"] = {str(barred): -100.0 for barred in barred_ids}
        body: dict[str, Any] = {"model": adapter or self.model, "token_ids": list(prompt_ids)}
        if images:
            body |= {
                "content_parts": [{"type": "image_url", "url": image.url} for image in images],
                "return_token_ids": True,
            }
        answer = await self.request("POST", "/inference/v1/generate", body | {"sampling_params": sampling})
        told = answer.get("prompt_token_ids") if images else None
        length = len(told) if isinstance(told, list) else len(prompt_ids)
        return read_sample(answer, length, stop_ids)

    async def prompt_logprobs(self, ids: Sequence[int], *, adapter: str | None = None) -> tuple[float, ...]:
        """Return the log-prob of each id after the first, given those before it, at temperature 1 and without cuts.

        One request scores them all and does not use the prefix cache. There must be room for one more token. vLLM
        cannot score on
        a server with adapters: concurrent requests crash the engine, and adapters of the output layer are ignored
        (vllm-project/vllm issues 16668 and 51594).

        Errors are those of `generate`.
        """
        sampling = {**_PLAIN, "prompt_logprobs": 0}
        answer = await self._ask_for_one(ids, sampling, adapter)
        return read_logprobs(answer, ids)

    async def sampled_logprobs(self, ids: Sequence[int], *, adapter: str | None = None) -> tuple[float, ...]:
        """The same, computed as in sampling: one request per id, which samples a token at its position.

        So it goes the way that samples go, prefix cache and adapters included. It is for few ids.
        """

        few = asyncio.Semaphore(_MAX_CONCURRENT_SCORING)

        async def at(place: int) -> float:
            # vLLM returns the requested number of ids, and the sampled one is always among them.
            wanted = [ids[place], int(ids[place] == 0)]
            sampling = {**_PLAIN, "logprob_token_ids": wanted, "logprobs": len(wanted)}
            async with few:
                return read_logprob_of(await self._ask_for_one(ids[:place], sampling, adapter), ids[place])

        return tuple(await asyncio.gather(*(at(place) for place in range(1, len(ids)))))

    async def _ask_for_one(self, ids: Sequence[int], sampling: Json, adapter: str | None) -> Json:
        body = {"model": adapter or self.model, "token_ids": list(ids), "sampling_params": sampling}
        return await self.request("POST", "/inference/v1/generate", body)

    async def served_model(self) -> ServedModel:
        """Return the first model that the server lists. Errors are those of `request`."""
        answer = await self.request("GET", "/v1/models", call_timeout_s=CONTROL_TIMEOUT_S)
        try:
            first = answer["data"][0]
            return ServedModel(str(first["id"]), int(first["max_model_len"]))
        except (LookupError, TypeError, ValueError):
            raise APIMalformed("The server does not say which model it serves, and how many tokens it holds.") from None

    async def is_well(self) -> bool:
        """Return whether the server reports to be healthy."""
        try:
            await self.request("GET", "/v1/models", call_timeout_s=CONTROL_TIMEOUT_S)
        except ResourceError:
            return False
        return True

    # --- weights ------------------------------------------------------------------------------------------------------

    async def load_weights(self, directory: str | Path | None, *, by: str = LOAD_WEIGHTS) -> None:
        """Replace the served weights by other weights of the same model.

        Pause the server first, so that it does not sample meanwhile. Call `reset_prefix_cache` afterwards, which drops
        keys and values of the old weights. The caller must prove that the server serves the new weights.

        Args:
            directory: the directory of the weights (safetensors files), as seen by the server; None restores those
                that it started with.
            by: the method of the server's worker that does it.

        Raises:
            APIRefused: the worker could not, and why.
            ResourceDied, ModelAPIError: as in `request`.
        """
        where = {} if directory is None else {"weights_path": str(directory)}
        answer = await self.request("POST", "/collective_rpc", {"method": by, "kwargs": where})
        for told in answer.get("results") or ():
            if isinstance(told, dict) and "error" in told:
                raise APIRefused(f"The weights in {directory} could not be loaded: {told['error']}")

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter from a directory. It replaces an adapter with the same name."""
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
        await self.request("POST", "/v1/load_lora_adapter", body, call_timeout_s=CONTROL_TIMEOUT_S)

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter."""
        await self.request("POST", "/v1/unload_lora_adapter", {"lora_name": name}, call_timeout_s=CONTROL_TIMEOUT_S)

    async def set_weight_version(self, label: str) -> None:
        """Set the label of the current weights, which later samples report."""
        await self.request("POST", "/update_weight_version", {"new_version": label}, call_timeout_s=CONTROL_TIMEOUT_S)

    async def weight_version(self) -> str:
        """The label that the weights have."""
        answer = await self.request("GET", "/weight_info", call_timeout_s=CONTROL_TIMEOUT_S)
        return str(answer.get("weight_version"))

    async def pause(self, running: Literal["wait", "keep"], *, call_timeout_s: float) -> None:
        """Stop sampling until `resume`. Running requests end first, or are kept and continue later."""
        await self.request("POST", f"/pause?mode={running}&clear_cache=false", {}, call_timeout_s=call_timeout_s)

    async def resume(self) -> None:
        """End a pause."""
        await self.request("POST", "/resume", {}, call_timeout_s=CONTROL_TIMEOUT_S)

    async def reset_prefix_cache(self, *, running: bool = False) -> None:
        """Empty the prefix cache.

        Args:
            running: whether running or paused requests compute their keys and values again; otherwise none may run.

        Raises:
            APIUnavailable: the cache is still in use.
            ResourceDied, ModelAPIError: as in `request`.
        """
        path = f"/reset_prefix_cache?reset_running_requests={str(running).lower()}"
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                while not (await self.request("POST", path, {}, call_timeout_s=CONTROL_TIMEOUT_S)).get("success"):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)  # aborted requests still hold keys and values for a step
        except TimeoutError:
            raise APIUnavailable(f"The server's prefix cache is still in use after {CONTROL_TIMEOUT_S:g} s.") from None


class RemoteTokenServer(TokenServer):
    """A running server, by a client of it."""

    def __init__(self, client: ModelClient, *, call_timeout_s: float = 600.0) -> None:
        self._client = client
        self._call_timeout_s = call_timeout_s

    @property
    def model(self) -> str:
        """The name of the model in requests.

        Raises:
            UsageError: the client has none.
        """
        if self._client.model is None:
            raise UsageError("This server's model has not been asked for yet.")
        return self._client.model

    async def request(
        self, method: str, path: str, body: Json | None = None, *, call_timeout_s: float | None = None
    ) -> Json:
        """Make one request; see `TokenServer.request`."""
        limit = self._call_timeout_s if call_timeout_s is None else call_timeout_s
        return parse_response(
            await self._client.request(method, server_url(self._client.base_url, path), body, call_timeout_s=limit)
        )

    async def served_model(self) -> ServedModel:
        """Return the first model of the server, which later requests use."""
        found = await super().served_model()
        self._client.model = found.name
        return found

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()


def server_url(base_url: str, path: str) -> str:
    """The address of a path from a server's root."""
    return base_url.removesuffix("/v1") + path


def parse_response(body: bytes) -> Mapping[str, Any]:
    """Return the JSON object of an answer; an empty one if there is none, or only text."""
    return read_json(body) if body.startswith(b"{") else {}
