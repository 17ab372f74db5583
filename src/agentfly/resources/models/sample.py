"""Sample: what a server sampled, as token ids, and checked to be all that it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from agentfly.errors import APIMalformed, APIUnavailable

if TYPE_CHECKING:
    from agentfly.resources.apis.completion import Completion


@dataclass(frozen=True, slots=True)
class Sample:
    """A continuation of a prompt.

    Attributes:
        ids: the sampled token ids, in order; the stop id included if one was sampled.
        logprobs: per id, its log-prob under the distribution it was sampled from, temperature and cuts applied.
        finish: ``stop`` if a stop id was sampled, ``length`` if a limit cut it.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]


def read_sample(completion: Completion, prompt: Sequence[int]) -> Sample:
    """A sample from a server's answer to a prompt of token ids.

    Raises:
        APIUnavailable: the server gave the sample up before its end.
        APIMalformed: ids, log-probs and the server's own count do not agree, or they answer another prompt. Such a
            sample could not be trained on.
    """
    ids, logprobs, usage = completion.token_ids, completion.token_logprobs, completion.usage
    if completion.finish_reason not in ("stop", "length"):
        raise APIUnavailable(f"The server ended a sample before its time, with {completion.finish_reason!r}.")
    if ids is None or logprobs is None or usage is None or completion.prompt_token_ids is None:
        raise APIMalformed("The server answers without token ids, log-probs or usage, all of which it was asked for.")
    if completion.prompt_token_ids != tuple(prompt):
        raise APIMalformed(
            f"The server continued a prompt of {len(completion.prompt_token_ids)} ids that is not the one of "
            f"{len(prompt)} ids that it was given."
        )
    numbers = tuple(logprob for logprob in logprobs if logprob is not None)
    if not len(ids) == len(numbers) == len(logprobs) == usage.completion_tokens:
        raise APIMalformed(
            f"The server counts {usage.completion_tokens} sampled tokens and sends {len(ids)} ids and {len(numbers)} "
            "log-probs. Such a sample cannot be trusted."
        )
    return Sample(ids, numbers, "stop" if completion.finish_reason == "stop" else "length")
