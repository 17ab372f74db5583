"""A program's request to the model, independent of the API, and the sampling parameters of a rollout."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agentfly.core.errors import ConfigError
from agentfly.core.messages import Message, images_of, text_of
from agentfly.formats.chat.chat_format import ToolDefinitions
from agentfly.gateway.limits import RequestError

_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=True, separators=(",", ":"))


@dataclass(frozen=True)
class ModelRequest:
    """What a program asks of the model.

    Attributes:
        conversation: what the model is to answer.
        tools: the tools it may call.
        sampling: the parameters of sampling that the program has named, by their names in OpenAI's API.
        max_tokens: the most tokens of the answer.
        stops: texts that end the answer; what is sampled behind the first of them counts as not sampled.
        may_call: whether calls in the answer are read as such.
        max_calls: how many calls the program takes at a time; None for any number.
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
        """For each number of its first messages, from 0 on, a hash of these and the tools.

        What client libraries change in messages does not count: see `same_message`. In an answer with calls, the calls
        count alone, because some libraries drop what was said beside them.
        """
        begun = hash(_CANONICAL.encode(_plain(list(self.tools))))
        return (begun, *extend_hashes(begun, self.conversation))

    @cached_property
    def size(self) -> int:
        """How many bytes its conversation takes, about."""
        return size_of(self.conversation)


def extend_hashes(begun: int, messages: Sequence[Message]) -> Iterator[int]:
    """The hashes of a conversation, given by its hash, with each of some further messages at its end."""
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant":
            calls = message.get("tool_calls")
            said = _CANONICAL.encode(_plain(calls_of(message))) if calls else text_of(content).strip()
            begun = hash((begun, "assistant", said))
        elif isinstance(content, str):
            begun = hash((begun, message["role"], content))
        else:
            parts = (part["text"] if part["type"] == "text" else part["image"] for part in content)
            begun = hash((begun, message["role"], *parts))
        yield begun


def size_of(messages: Sequence[Message]) -> int:
    """How many bytes messages take, about."""
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
    """Whether a message that a program shows is a known one. Names and ids do not count: libraries change them."""
    if known["role"] != shown["role"]:
        return False
    if known["role"] != "assistant":
        return known["content"] == shown["content"]
    calls = "tool_calls" in known or "tool_calls" in shown
    if calls and calls_of(known) != calls_of(shown):
        return False
    said, repeated = text_of(known["content"]).strip(), text_of(shown["content"]).strip()
    return said == repeated or (calls and not repeated)  # some libraries drop what was said beside a call


def calls_of(message: Message) -> list[tuple[Any, Any]]:
    """The names and the arguments of a message's calls."""
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]


def _plain(value: Any) -> Any:
    """A value in which numbers count by what they are: ``1.0`` as ``1``, which other languages make of it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
"""Parameters that no policy of the gateway has, and the values with which they change nothing."""

HONORED_PARAMETERS = ("temperature", "top_p", "top_k", "seed")
"""Parameters that a program can be followed in."""

_VALUES_TOLD = 8

_GREEDY_BELOW = 1e-4  # dividing by less leaves the range of numbers


@dataclass(frozen=True)
class EffectiveSampling:
    """How one answer is sampled.

    Attributes:
        temperature, top_p, top_k, seed: see `agentfly.policies.policy.SamplingParams`.
        replaced: what the program asked for and did not get, by parameter.
        untrainable_reason: why the answer cannot be trained on; empty where it can.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int | None = None
    replaced: Mapping[str, Any] | None = None
    untrainable_reason: str = ""


class OverriddenParameters:
    """What a program has asked of sampling and did not get, over all answers on the record."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, None]] = {}

    def add(self, sampling: EffectiveSampling) -> None:
        """Another answer."""
        for name, value in (sampling.replaced or {}).items():
            values = self._values.setdefault(name, {})
            if len(values) < _VALUES_TOLD:
                values[f"{value!r:.40}"] = None

    def told(self, used: RolloutSampling) -> list[str]:
        """The same in words, with what was used instead."""
        return [
            f"The program asked for {name}={' or '.join(values)}; sampled was with {used}."
            for name, values in sorted(self._values.items())
        ]


@dataclass(frozen=True)
class RolloutSampling:
    """How the model samples in a rollout.

    Training takes each token's log-prob for that of the policy itself at one temperature. So by default the program's
    temperature, cuts, seed and penalties are replaced by what stands here, and the record notes it. With
    ``honor_request`` they are followed, as evaluations may want it, and a rollout in which an answer was sampled in
    any other way than this is kept out of training (`agentfly.core.trajectory.Trajectory.untrainable_reason`).

    Attributes:
        temperature: divides the logits; 0 takes the most likely token, which cannot be trained on.
        top_p, top_k: cut off unlikely tokens. A cut distribution cannot be trained on.
        honor_request: whether a program's parameters take the place of these.

    Raises:
        ConfigError: a parameter cannot be.
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
        """How an answer is sampled for which a program asks for certain parameters.

        Args:
            asked: what the program has said, by parameter; those that it has not named are not in it.

        Raises:
            RequestError: the program is to be followed, and a parameter cannot be.
        """
        own: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "seed": None}
        wanted = {
            name: value for name, value in asked.items() if name in NEUTRAL_VALUES and value not in NEUTRAL_VALUES[name]
        }
        if self.honor_request:
            for name, value in wanted.items():
                raise RequestError(
                    f"{name}: {value!r:.100} cannot be done here; leave it out.",
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
        """Why what is sampled in a certain way cannot be trained on."""
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
