"""A program's request to the model, independent of the API, and the sampling parameters of a rollout."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agentfly.core.errors import ConfigError
from agentfly.core.json_values import canonical_json
from agentfly.core.messages import Message, images_of, text_of
from agentfly.formats.chat.chat_format import ToolDefinitions
from agentfly.gateway.limits import RequestError


@dataclass(frozen=True)
class ModelRequest:
    """A program's request to the model.

    Attributes:
        conversation: the messages to answer.
        tools: the tools that the model may call.
        sampling: the sampling parameters that the program has set, by their names in OpenAI's API.
        max_tokens: maximum number of tokens in the answer.
        stops: stop strings. Tokens after the first one are discarded.
        may_call: whether tool calls in the answer are parsed.
        max_calls: maximum number of tool calls in the answer; None for any number.
    """

    conversation: Sequence[Message]
    tools: ToolDefinitions = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = sys.maxsize
    stops: Sequence[str] = ()
    may_call: bool = True
    max_calls: int | None = None

    @cached_property
    def hashes(self) -> tuple[int, ...]:
        """Hashes of the tools with the first 0, 1, 2, … messages.

        Changes that client libraries make to messages do not count; see `same_message`. Of an answer with calls, only
        the calls count, because some libraries drop the text beside them.
        """
        begun = hash(canonical_json(list(self.tools)))
        return (begun, *extend_hashes(begun, self.conversation))

    @cached_property
    def size(self) -> int:
        """Approximate memory of the conversation in bytes."""
        return size_of(self.conversation)


def extend_hashes(begun: int, messages: Sequence[Message]) -> Iterator[int]:
    """Yield the hash of a conversation, of which ``begun`` is the hash so far, after each further message."""
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant":
            calls = message.get("tool_calls")
            answer = canonical_json(calls_of(message)) if calls else text_of(content).strip()
            begun = hash((begun, "assistant", answer))
        elif isinstance(content, str):
            begun = hash((begun, message["role"], content))
        else:
            parts = (part["text"] if part["type"] == "text" else part["image"] for part in content)
            begun = hash((begun, message["role"], *parts))
        yield begun


def size_of(messages: Sequence[Message]) -> int:
    """Return the approximate memory of messages in bytes."""
    size = 0
    for message in messages:
        content = message["content"]
        size += 200
        if isinstance(content, str):
            size += len(content)
        else:
            size += len(text_of(content)) + sum(len(image.data) for image in images_of(content))
        if "reasoning_content" in message:
            size += len(message["reasoning_content"])
        for call in message.get("tool_calls") or ():
            size += 200 + 2 * len(str(call["function"]["arguments"]))
    return size


def same_message(known: Message, shown: Message) -> bool:
    """Return whether a message of a program equals a known one. Names and ids do not count: libraries change them."""
    if known["role"] != shown["role"]:
        return False
    if known["role"] != "assistant":
        return known["content"] == shown["content"]
    calls = "tool_calls" in known or "tool_calls" in shown
    if calls and calls_of(known) != calls_of(shown):
        return False
    original, repeated = text_of(known["content"]).strip(), text_of(shown["content"]).strip()
    return original == repeated or (calls and not repeated)  # some libraries drop the text beside a call


def calls_of(message: Message) -> list[tuple[Any, Any]]:
    """Return the names and arguments of a message's calls."""
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]


NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "top_a": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "best_of": (1,),
}
"""Parameters that the gateway does not support, and the values with which they change nothing."""

HONORED_PARAMETERS = ("temperature", "top_p", "top_k", "seed")
"""Parameters that `RolloutSampling.honor_request` takes from programs."""

_MAX_NOTED_VALUES = 8

_GREEDY_BELOW = 1e-4  # logits divided by less could overflow


@dataclass(frozen=True)
class EffectiveSampling:
    """How one answer is sampled.

    Attributes:
        temperature, top_p, top_k, seed: see `agentfly.policies.policy.SamplingParams`.
        replaced: the values that the program requested and did not get, by parameter.
        untrainable_reason: why the answer cannot be trained on; empty if it can.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int | None = None
    replaced: Mapping[str, Any] | None = None
    untrainable_reason: str = ""


class OverriddenParameters:
    """The sampling parameters that a program requested and did not get, over all recorded answers."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, None]] = {}

    def add(self, sampling: EffectiveSampling) -> None:
        """Add the parameters of an answer."""
        for name, value in (sampling.replaced or {}).items():
            values = self._values.setdefault(name, {})
            if len(values) < _MAX_NOTED_VALUES:
                values[f"{value!r:.40}"] = None

    def notes(self, used: RolloutSampling) -> list[str]:
        """Return a note for each parameter, with the sampling that was used instead."""
        return [
            f"The program asked for {name}={' or '.join(values)}; the model sampled with {used}."
            for name, values in sorted(self._values.items())
        ]


@dataclass(frozen=True)
class RolloutSampling:
    """How the model samples in a rollout.

    Training assumes that each token's log-prob is the policy's own at one temperature. So by default these settings
    replace the program's temperature, cuts, seed and penalties, and the trajectory notes it. With ``honor_request`` the
    program's parameters are used, for instance in evaluations. A rollout with an answer that was sampled differently is
    then left out of training (`agentfly.core.trajectory.Trajectory.untrainable_reason`).

    Attributes:
        temperature: divides the logits; 0 takes the most likely token, which cannot be trained on.
        top_p, top_k: cut off unlikely tokens. A cut distribution cannot be trained on.
        honor_request: whether a program's parameters replace these.

    Raises:
        ConfigError: a parameter is out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    honor_request: bool = False

    def __post_init__(self) -> None:
        for name, holds, wanted in (
            ("temperature", _is_number(self.temperature) and self.temperature >= 0, "a finite number of at least 0"),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("top_k", type(self.top_k) is int and 0 <= self.top_k < 2**31, "a whole number of at least 0"),
            ("honor_request", isinstance(self.honor_request, bool), "true or false"),
        ):
            if not holds:
                raise ConfigError(f"RolloutSampling({name}={getattr(self, name)!r}): it must be {wanted}.")

    def resolve(self, asked: Mapping[str, Any]) -> EffectiveSampling:
        """Return how an answer is sampled, given the parameters that the program requests.

        Args:
            asked: the requested parameters by name.

        Raises:
            RequestError: ``honor_request`` is set, and a parameter is not supported.
        """
        own: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "seed": None}
        wanted = {
            name: value for name, value in asked.items() if name in NEUTRAL_VALUES and value not in NEUTRAL_VALUES[name]
        }
        if self.honor_request:
            for name, value in wanted.items():
                raise RequestError(
                    f"{name}: {value!r:.100} is not supported; leave it out.",
                    code="unsupported_parameter",
                    param=name,
                )
            followed = own | {name: value for name, value in asked.items() if name in HONORED_PARAMETERS}
            return EffectiveSampling(**_within_range(followed), untrainable_reason=self._untrainable(followed))
        wanted |= {name: value for name, value in asked.items() if name in HONORED_PARAMETERS and value != own[name]}
        return EffectiveSampling(
            **_within_range(own), replaced=wanted or None, untrainable_reason=self._untrainable(own)
        )

    def __str__(self) -> str:
        cuts = [f"top_p={self.top_p:g}"] * (self.top_p < 1) + [f"top_k={self.top_k}"] * (self.top_k > 0)
        return ", ".join([f"temperature={self.temperature:g}", *cuts])

    def _untrainable(self, used: Mapping[str, Any]) -> str:
        """Return why answers sampled with these parameters cannot be trained on; empty if they can."""
        found = [
            f"{name}={used[name]!r}"
            for name, unfit in (
                ("temperature", used["temperature"] == 0 or used["temperature"] != self.temperature),
                ("top_p", used["top_p"] < 1),
                ("top_k", used["top_k"] > 0),
                ("seed", used["seed"] is not None),
            )
            if unfit
        ]
        return f"sampled with {', '.join(found)}" if found else ""


def _within_range(used: Mapping[str, Any]) -> dict[str, Any]:
    return {**used, "temperature": 0.0 if used["temperature"] < _GREEDY_BELOW else float(used["temperature"])}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
