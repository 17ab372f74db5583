"""weighted: one reward made of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.agents.reward import Reward
from agentfly.agents.reward import reward as make_reward
from agentfly.agents.reward_result import RewardResult, sum_known
from agentfly.contexts.context import Context
from agentfly.core.async_tasks import gather_or_raise
from agentfly.core.errors import RewardDefinitionError
from agentfly.core.json_values import score_of
from agentfly.core.task import Task
from agentfly.core.trajectory import Trajectory
from agentfly.resources.spec import ResourceSpec


def weighted(parts: Mapping[Reward, float], *, name: str | None = None) -> Reward:
    """Make one reward from the weighted sum of several: ``weighted({correct: 1.0, short: 0.1})``.

    The parts are computed concurrently, each with its own ``timeout_s``. The metrics have each part's score under its
    name, and its metrics under ``name/metric``. ``success`` keeps its name and comes from the first part that has it.
    Turn rewards are summed in the same way, over the parts that have them. If a part fails, the trajectory is unscored
    with that part's failure.

    Args:
        parts: a mapping from rewards to weights.
        name: the name of the sum; by default made from the parts' names.

    Raises:
        RewardDefinitionError: there are no parts, a part is not a reward, two have the same name, or a weight is not a
            number.
    """
    if not isinstance(parts, Mapping) or not parts:
        raise RewardDefinitionError(
            "weighted() takes rewards with their weights, for instance weighted({correct: 1.0, short: 0.1})."
        )
    names: set[str] = set()
    for part, weight in parts.items():
        _require_part(part, weight)
        if part.name in names:
            raise RewardDefinitionError(
                f"weighted(): two parts are called {part.name!r}, so their metrics would have the same name. Name one "
                "of them: @reward(name=…)."
            )
        names.add(part.name)
    total = _WeightedSum(tuple(parts.items()))
    name = name or " + ".join(f"{weight:g} {part.name}" for part, weight in parts.items())
    return make_reward(name=name, resources=total.resources_for)(total)


@dataclass(frozen=True)
class _WeightedSum:
    parts: tuple[tuple[Reward, float], ...]

    async def __call__(self, trajectory: Trajectory, context: Context) -> RewardResult:
        return self._sum(await gather_or_raise(part.score(trajectory, context) for part, _ in self.parts))

    @property
    def task_fields(self) -> tuple[str, ...]:
        return tuple(name for part, _ in self.parts for name in part.task_fields)

    def resources_for(self, task: Task) -> Sequence[ResourceSpec[Any]]:
        return tuple(dict.fromkeys(spec for part, _ in self.parts for spec in part.resources_for(task)))

    def _sum(self, results: Sequence[RewardResult]) -> RewardResult:
        metrics: dict[str, float] = {}
        products: list[float | None] = []
        turns: list[list[float | None]] = []
        for (part, weight), result in zip(self.parts, results, strict=True):
            assert result.reward is not None
            products.append(weight * result.reward)
            metrics[part.name] = result.reward
            for metric, value in result.metrics.items():
                metrics.setdefault(metric if metric == "success" else f"{part.name}/{metric}", value)
            if result.turn_rewards is not None:
                turns.append([None if one is None else weight * one for one in result.turn_rewards])
        turn_rewards = [sum_known(of_turn) for of_turn in zip(*turns, strict=True)] if turns else None
        return RewardResult(sum_known(products), metrics, turn_rewards)


def _require_part(part: object, weight: object) -> None:
    if not isinstance(part, Reward):
        raise RewardDefinitionError(
            f"weighted(): {part!r} is no reward of one trajectory. Put @reward above a function; for a sum with a "
            "group reward write @group_reward(after=…), whose function sees the scores so far."
        )
    if score_of(weight) is None or isinstance(weight, bool):
        raise RewardDefinitionError(f"weighted(): the weight of {part.name!r} is {weight!r}, which is no number.")
