"""Sample: what a server sampled, as token ids, and checked to be all that it sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentfly.errors import APIMalformed, APIUnavailable
from agentfly.resources.apis.completion import read_usage

Json = Mapping[str, Any]

_NO_LOGPROB = -9999.0  # what vLLM sends where it has none, or minus infinity


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Ids ``start`` to ``stop`` of a sample came from the weights with this label."""

    label: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A continuation of a prompt.

    Attributes:
        ids: the sampled token ids, in order; the stop id included if one was sampled.
        logprobs: per id, its log-prob under the distribution it was sampled from, temperature and cuts applied; at
            temperature 0 those at temperature 1.
        finish: ``stop`` if a stop id was sampled, ``length`` if a limit cut it.
        weights: the labels of the weights that the ids came from, in order; empty if the server tells none.
        prompt_ids: the prompt that was continued, where the server was asked to tell it.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    weights: tuple[WeightSpan, ...] = ()
    prompt_ids: tuple[int, ...] | None = None


def read_sample(answer: Json, prompt_length: int, stop_ids: Sequence[int]) -> Sample:
    """A sample from a server's answer to ``/inference/v1/generate``.

    Args:
        answer: the answer.
        prompt_length: how many ids the prompt had.
        stop_ids: the ids that were to end the sample.

    Raises:
        APIUnavailable: the server gave the sample up before its end.
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
        weights = tuple(WeightSpan(s["version"], s["start"], s["end"]) for s in choice.get("weight_versions") or ())
    except (LookupError, TypeError, ValueError):
        raise APIMalformed("The server answers without token ids or log-probs, which it was asked for.") from None
    sent = answer.get("prompt_token_ids")
    sample = Sample(tuple(ids), numbers, finish, weights, None if sent is None else tuple(sent))
    _check_counts(sample, answer, prompt_length)
    _check_values(sample, named, stop_ids)
    return sample


def _check_counts(sample: Sample, answer: Json, prompt_length: int) -> None:
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
    edges = [0, *(edge for span in sample.weights for edge in (span.start, span.stop)), len(sample.ids)]
    if sample.weights and (edges[0::2] != edges[1::2] or edges != sorted(edges)):
        raise APIMalformed("The server's account of which weights sampled which ids has gaps.")


def _check_values(sample: Sample, named: Sequence[int], stop_ids: Sequence[int]) -> None:
    if list(named) != list(sample.ids) or not sample.ids:
        raise APIMalformed("The server's log-probs are of other ids than it sampled.")
    wrong = [number for number in sample.logprobs if not _NO_LOGPROB < number < 1e-3 or math.isnan(number)]
    if wrong:
        raise APIMalformed(f"The server sends {wrong[0]} for the log-prob of a token that it sampled.")
    if sample.finish == "stop" and sample.ids[-1] not in stop_ids:
        raise APIMalformed("The server says that a stop id ended the sample, and its last id is none.")


def read_logprobs(answer: Json, ids: Sequence[int]) -> tuple[float, ...]:
    """The log-prob of each id but the first given those before it, from an answer with ``prompt_logprobs``.

    Raises:
        APIMalformed: they are not there.
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
    """The log-prob of an id in the place of the one sampled token of an answer with ``logprob_token_ids``.

    Raises:
        APIMalformed: it is not there.
    """
    try:
        (place,) = answer["choices"][0]["logprobs"]["content"]
        (number,) = {float(one["logprob"]) for one in place["top_logprobs"] if one["token_id"] == wanted}
    except (LookupError, TypeError, ValueError):
        raise APIMalformed("The server answers without the log-prob of the id that it was asked for.") from None
    return number
