"""RewardResult: a score with metrics and turn rewards, parsed from the return value of a reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from agentfly.core.errors import RewardDefinitionError
from agentfly.core.json_values import score_of
from agentfly.core.truncation import MAX_ECHO_CHARS, truncate_middle

_CURE = (
    "Return a float (finite, up to 1e30), a RewardResult, or a dict with the key 'reward'; raise an exception if there "
    "is no score."
)


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A score and further numbers that explain it.

    Attributes:
        reward: the score; by default the sum of ``turn_rewards``.
        metrics: further numbers by name. They are averaged over a batch and shown, but never trained on.
        turn_rewards: a reward for each of `Trajectory.turns`; None for a turn without one.
    """

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Sequence[float | None] | None = None


def parse_reward_result(value: Any, name: str, turns: int) -> RewardResult:
    """Parse and validate the return value of a reward. The result's ``reward`` is a finite float.

    Args:
        value: the return value.
        name: the reward's name, for messages.
        turns: number of turns in the trajectory.

    Raises:
        RewardDefinitionError: the value is not a score, or does not have one turn reward for each turn.
    """
    given = _as_result(value, name)
    turn_rewards = None if given.turn_rewards is None else _each_turn(given.turn_rewards, name, turns)
    reward: Any = given.reward
    if reward is None and turn_rewards is not None:
        reward = sum_known(turn_rewards)
    score = score_of(reward)
    if score is None:
        found = "None" if reward is None else f"{type(reward).__name__} {_echo(reward)}"
        raise RewardDefinitionError(f"The reward {name!r} returned {found}, which is not a score. {_CURE}")
    return RewardResult(score, _metrics(given.metrics, name), turn_rewards)


def sum_known(rewards: Sequence[float | None]) -> float | None:
    """Return the sum of the rewards that are not None; None if there are none."""
    known = [reward for reward in rewards if reward is not None]
    return math.fsum(known) if known else None


def _as_result(value: Any, name: str) -> RewardResult:
    if isinstance(value, RewardResult):
        return value
    if not isinstance(value, Mapping):
        return RewardResult(value)
    if "reward" not in value and "turn_rewards" not in value:
        raise RewardDefinitionError(
            f"The reward {name!r} returned a dict without the key 'reward', only {sorted(map(str, value))}. {_CURE}"
        )
    metrics = {key: number for key, number in value.items() if key not in ("reward", "turn_rewards")}
    return RewardResult(value.get("reward"), metrics, value.get("turn_rewards"))


def _metrics(metrics: Mapping[str, Any], name: str) -> dict[str, float]:
    read = {str(key): score_of(number) for key, number in metrics.items()}
    for key, number in metrics.items():
        if read[str(key)] is None:
            raise RewardDefinitionError(
                f"The reward {name!r} returned the metric {key!r} as {_echo(number)}, which is no finite number up to "
                "1e30. Leave it out where it has no value."
            )
    return {key: number for key, number in read.items() if number is not None}


def _each_turn(rewards: Any, name: str, turns: int) -> tuple[float | None, ...]:
    rewards = as_list(rewards)
    if rewards is None or len(rewards) != turns:
        found = "no list" if rewards is None else f"{len(rewards)} of them"
        raise RewardDefinitionError(
            f"The reward {name!r} returned turn_rewards for a trajectory of {turns} turns, and this is {found}. "
            "Give one for each of trajectory.turns, None where there is none."
        )
    read = [None if reward is None else score_of(reward) for reward in rewards]
    for number, reward in enumerate(rewards):
        if reward is not None and read[number] is None:
            raise RewardDefinitionError(
                f"The reward {name!r} returned {_echo(reward)} as the reward of turn "
                f"{number}, which is no finite number up to 1e30. Give None where there is none."
            )
    return tuple(read)


def as_list(value: Any) -> list[Any] | None:
    """Return the items of a list, tuple or array; None for other types, including unordered ones such as sets."""
    if isinstance(value, (str, bytes, Mapping, Set)) or not (hasattr(value, "__len__") and hasattr(value, "__iter__")):
        return None
    return list(value)


def _echo(value: object) -> str:
    """Return a truncated repr of a value for messages, even if its ``__repr__`` raises."""
    try:
        return truncate_middle(repr(value), MAX_ECHO_CHARS // 8)
    except Exception as error:
        return f"(it cannot be shown: {type(error).__name__})"
