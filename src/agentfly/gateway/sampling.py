"""RolloutSampling: how the model samples in a rollout, whatever the program asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentfly.errors import ConfigError
from agentfly.gateway.refusal import Refusal

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
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

FOLLOWED = ("temperature", "top_p", "top_k", "seed")
"""Parameters that a program can be followed in."""

_VALUES_TOLD = 8

_GREEDY_BELOW = 1e-4  # dividing by less leaves the range of numbers


@dataclass(frozen=True)
class Sampling:
    """How one answer is sampled.

    Attributes:
        temperature, top_p, top_k, seed: see `agentfly.policies.policy.SamplingParams`.
        replaced: what the program asked for and did not get, by parameter.
        untrainable: why the answer cannot be trained on; empty where it can.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int | None = None
    replaced: Mapping[str, Any] | None = None
    untrainable: str = ""


class ReplacedParameters:
    """What a program has asked of sampling and did not get, over all answers on the record."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, None]] = {}

    def add(self, sampling: Sampling) -> None:
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
    ``follow_program`` they are followed, as evaluations may want it, and a rollout in which an answer was sampled in
    any other way than this is kept out of training (`agentfly.trajectory.Trajectory.untrainable`).

    Attributes:
        temperature: divides the logits; 0 takes the most likely token, which cannot be trained on.
        top_p, top_k: cut off unlikely tokens. A cut distribution cannot be trained on.
        follow_program: whether a program's parameters take the place of these.

    Raises:
        ConfigError: a parameter cannot be.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    follow_program: bool = False

    def __post_init__(self) -> None:
        for name, holds, wanted in (
            ("temperature", _is_number(self.temperature) and self.temperature >= 0, "a finite number of at least 0"),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("top_k", type(self.top_k) is int and 0 <= self.top_k < 2**31, "a whole number of at least 0"),
            ("follow_program", isinstance(self.follow_program, bool), "true or false"),
        ):
            if not holds:
                raise ConfigError(f"RolloutSampling({name}={getattr(self, name)!r}): it must be {wanted}.")

    def of(self, asked: Mapping[str, Any]) -> Sampling:
        """How an answer is sampled for which a program asks for certain parameters.

        Args:
            asked: what the program has said, by parameter; those that it has not named are not in it.

        Raises:
            Refusal: the program is to be followed, and a parameter cannot be.
        """
        own: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "seed": None}
        wanted = {name: value for name, value in asked.items() if name in NEUTRAL and value not in NEUTRAL[name]}
        if self.follow_program:
            for name, value in wanted.items():
                raise Refusal(
                    f"{name}: {value!r:.100} cannot be done here; leave it out.",
                    code="unsupported_parameter",
                    param=name,
                )
            followed = own | {name: value for name, value in asked.items() if name in FOLLOWED}
            return Sampling(**_within_range(followed), untrainable=self._untrainable(followed))
        wanted |= {name: value for name, value in asked.items() if name in FOLLOWED and value != own[name]}
        return Sampling(**_within_range(own), replaced=wanted or None, untrainable=self._untrainable(own))

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
