"""Metrics of a batch of trajectories, under the names that the field uses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from agentfly.core.trajectory import FinishReason, ToolRecord, Trajectory, Turn
from agentfly.resources.engine.usage import Occupancy
from agentfly.rollouts.agent_loop import INVALID_CALL_KINDS

METRIC_NAMES = (
    "rollouts",
    "turns/mean",
    "tool_calls/mean",
    "tool_errors/rate",
    "invalid_calls/rate",
    "truncated/rate",
    "unscored",
    "failures/infrastructure",
    "response_length/mean",
    "sequences/mean",
    "sequence_breaks/mean",
    "reward/mean",
    "reward/std",
    "success/mean",
    "usage/prompt_tokens",
    "usage/sampled_tokens",
)
"""The metrics of `summarize` with fixed names."""

METRIC_PREFIXES = ("reward_metrics/", "tool_errors/", "failures/", "finish/", "rollout_seconds/", "resource_seconds/")
"""Prefixes of the other names, which go on with a component of the reward, a cause, a reason or a part of the time."""


def is_success(trajectory: Trajectory) -> bool | None:
    """Return whether a trajectory solved its task: its ``success`` metric, else its reward, is at least 1.

    Return None if it is unscored.
    """
    if trajectory.reward is None:
        return None
    return trajectory.metrics.get("success", trajectory.reward) >= 1.0


def summarize(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return means and counts over trajectories. Every value is finite.

    Means of reward and success are over scored trajectories without an infrastructure failure; they are left out if
    there are none. Other means are over all trajectories that were neither cancelled nor failed for reasons of
    infrastructure.

    * ``truncated/rate``: share of trajectories in which a token limit cut something off.
    * ``sequences/mean``: token sequences per trajectory. Under the chain strategy each conversation has one, subagents
      included, and one more for each break.
    * ``sequence_breaks/mean``: sequences beyond the first of each conversation.
    * ``invalid_calls/rate``: share of the tool calls that could not be executed at all.
    * ``failures/…``: infrastructure and reward failures by cause; ``tool_errors/…``: tool errors by type;
      ``finish/…``: all trajectories by finish reason.
    * ``usage/…``: tokens that all turns read and sampled, failed rollouts included. ``usage/unknown_turns`` counts
      turns whose endpoint reported no numbers, if there are any.

    Lengths and sequences are left out if text came without token ids.
    """
    sound = [t for t in trajectories if not t.infrastructure_failed and t.finish_reason is not FinishReason.CANCELLED]
    scored = [t for t in sound if t.reward is not None]
    results = [result for t in sound for turn in t.turns for result in turn.tool_results]
    rewards = [t.reward for t in scored if t.reward is not None]
    metrics = {
        "rollouts": float(len(trajectories)),
        "turns/mean": _mean(float(len(t.turns)) for t in sound),
        "tool_calls/mean": len(results) / len(sound) if sound else 0.0,
        "tool_errors/rate": _mean(float(result.failure is not None) for result in results),
        "invalid_calls/rate": _mean(float(_invalid(result)) for result in results),
        "truncated/rate": _mean(float(_truncated(t)) for t in sound),
        "unscored": float(sum(t.reward is None for t in trajectories)),
        "failures/infrastructure": float(sum(t.infrastructure_failed for t in trajectories)),
    }
    if any(t.sequences for t in sound) or not any(t.turns for t in sound):
        metrics["response_length/mean"] = _mean(float(_sampled(t)) for t in sound)
        metrics["sequences/mean"] = _mean(float(len(t.sequences)) for t in sound)
        metrics["sequence_breaks/mean"] = _mean(float(_breaks(t)) for t in sound)
    if scored:
        metrics["reward/mean"] = _mean(rewards)
        metrics["reward/std"] = _std(rewards)
        metrics["success/mean"] = _mean(float(bool(is_success(t))) for t in scored)
    metrics |= _usage([turn for t in trajectories for turn in t.turns])
    for name in sorted({name for t in scored for name in t.metrics} - {"success"}):
        metrics[f"reward_metrics/{name}"] = _mean(t.metrics[name] for t in scored if name in t.metrics)
    for kind, count in sorted(Counter(r.failure.kind for r in results if r.failure is not None).items()):
        metrics[f"tool_errors/{kind}"] = float(count)
    for cause, count in sorted(_causes(trajectories).items()):
        metrics[f"failures/{cause}"] = float(count)
    for reason, count in sorted(
        Counter(t.finish_reason.value for t in trajectories if t.finish_reason is not None).items()
    ):
        metrics[f"finish/{reason}"] = float(count)
    for part in ("generation", "tools", "waiting", "reward", "total"):
        metrics[f"rollout_seconds/{part}"] = _mean(t.seconds.get(part, 0.0) for t in trajectories)
    return metrics


def occupancy_metrics(before: Mapping[str, Occupancy], after: Mapping[str, Occupancy]) -> dict[str, float]:
    """Return how a batch used its resources between two readings of `ResourceEngine.occupancy`.

    The values are seconds summed over the instances of each spec's label: ``alive``, the part of it that was ``held``
    by rollouts, and the part of that which was ``busy`` running something. For a pool that is held much and busy
    little, ``idle="freeze"`` saves processor time. More capacity, not faster tools, then makes the run faster.
    """
    metrics = {}
    for label, total in sorted(after.items()):
        used = total - before.get(label, Occupancy())
        if used.held_seconds > 0:
            metrics[f"resource_seconds/{label}/alive"] = used.alive_seconds
            metrics[f"resource_seconds/{label}/held"] = used.held_seconds
            metrics[f"resource_seconds/{label}/busy"] = used.busy_seconds
    return metrics


def _causes(trajectories: Sequence[Trajectory]) -> Counter[str]:
    failures = [failure for t in trajectories for failure in (t.failure, t.reward_failure) if failure is not None]
    return Counter(f"{failure.boundary}/{failure.kind}" for failure in failures)


def _usage(turns: Sequence[Turn]) -> dict[str, float]:
    known = [turn for turn in turns if turn.prompt_tokens is not None and turn.sampled_tokens is not None]
    usage = {
        "usage/prompt_tokens": float(sum(turn.prompt_tokens or 0 for turn in known)),
        "usage/sampled_tokens": float(sum(turn.sampled_tokens or 0 for turn in known)),
    }
    return usage if len(known) == len(turns) else usage | {"usage/unknown_turns": float(len(turns) - len(known))}


def _invalid(result: ToolRecord) -> bool:
    return result.failure is not None and result.failure.kind in INVALID_CALL_KINDS


def _breaks(trajectory: Trajectory) -> int:
    begun = {(turn.conversation, turn.sequence) for turn in trajectory.turns if turn.sequence >= 0}
    return len(begun) - len({conversation for conversation, _ in begun})


def _truncated(trajectory: Trajectory) -> bool:
    return trajectory.finish_reason is FinishReason.LENGTH or any(
        sequence.truncated for sequence in trajectory.sequences
    )


def _sampled(trajectory: Trajectory) -> int:
    return sum(sequence.sampled_count for sequence in trajectory.sequences)


def _mean(values: Iterable[float]) -> float:
    numbers = [value for value in values if math.isfinite(value)]
    return math.fsum(numbers) / len(numbers) if numbers else 0.0


def _std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
