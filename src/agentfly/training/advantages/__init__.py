"""Advantage estimation: how much better than expected each sampled token turned out.

An estimator is a pure function from `AdvantageInputs` to one array per row, with one value per sampled token. Group
statistics count trajectories, never rows. `ALGORITHMS` maps the names for the setting ``algorithm`` to algorithms.
"""

from __future__ import annotations

from agentfly.core.registry import Registry
from agentfly.training.advantages.algorithm import AdvantageInputs, Advantages, Algorithm, Estimator, Floats
from agentfly.training.advantages.gigpo import gigpo
from agentfly.training.advantages.outcome import DR_GRPO, GRPO, OPO, RANKING, REINFORCE, RLOO
from agentfly.training.advantages.token_returns import gae, reinforce_plus_plus, reinforce_plus_plus_baseline, remax

_NO_STD = {"divide_by_std": "It divides by no standard deviation: leave the setting out."}
_WHITENED = {"divide_by_std": "It always divides, by the standard deviation over the batch: leave the setting out."}
_STEPS = {"discount": "Set step_discount, which weighs what comes one turn later."}
_TOKENS = {"step_discount": "Set discount, which weighs what comes one token later."}


def _group_relative(estimate: Estimator, **more: str) -> Algorithm:
    """Return an algorithm that compares the attempts at a task."""
    return Algorithm(estimate, min_attempts=2, supports_dynamic_sampling=True, unused_setting_hints=more)


ALGORITHMS: Registry[Algorithm] = Registry(
    "algorithm",
    {
        "grpo": _group_relative(GRPO, divide_by_std="Choose algorithm=dr_grpo, which is grpo without dividing."),
        "dr_grpo": _group_relative(DR_GRPO, **_NO_STD),
        "rloo": _group_relative(RLOO, **_NO_STD),
        "opo": _group_relative(OPO, **_NO_STD),
        "ranking": _group_relative(RANKING, **_NO_STD),
        "gigpo": Algorithm(
            gigpo,
            min_attempts=2,
            supports_dynamic_sampling=True,
            uses=("step_discount", "step_weight", "divide_by_std", "anchor_match", "anchor_similarity"),
            unused_setting_hints=_STEPS,
        ),
        "reinforce": Algorithm(REINFORCE, supports_dynamic_sampling=True, unused_setting_hints=_NO_STD),
        "reinforce_plus_plus": Algorithm(
            reinforce_plus_plus, uses=("discount",), unused_setting_hints={**_WHITENED, **_TOKENS}
        ),
        "reinforce_plus_plus_baseline": _group_relative(reinforce_plus_plus_baseline, **_WHITENED),
        "remax": Algorithm(remax, needs_greedy=True, supports_dynamic_sampling=True, unused_setting_hints=_NO_STD),
        "gae": Algorithm(
            gae, needs_critic=True, uses=("discount", "gae_lambda"), unused_setting_hints={**_WHITENED, **_TOKENS}
        ),
    },
    Algorithm,
)
"""The algorithms by name. Add your own: ``ALGORITHMS.register("mine", Algorithm(estimate, uses=("discount",)))``."""

__all__ = ["ALGORITHMS", "AdvantageInputs", "Advantages", "Algorithm", "Estimator", "Floats"]
