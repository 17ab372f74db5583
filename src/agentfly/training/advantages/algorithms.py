"""ALGORITHMS: the algorithms by name."""

from __future__ import annotations

from agentfly.training.advantages.algorithm import Algorithm, Estimator
from agentfly.training.advantages.gigpo import gigpo
from agentfly.training.advantages.outcome import DR_GRPO, GRPO, OPO, RANKING, REINFORCE, RLOO
from agentfly.training.advantages.token_returns import gae, reinforce_plus_plus, reinforce_plus_plus_baseline, remax
from agentfly.training.registry import Registry

ALGORITHMS: Registry[Algorithm] = Registry("algorithm", Algorithm)
"""Register your own with ``ALGORITHMS.register("mine", Algorithm(estimate, uses=("discount",)))``."""

_NO_STD = {"divide_by_std": "It divides by no standard deviation: leave the setting out."}
_WHITENED = {"divide_by_std": "It always divides, by the standard deviation over the batch: leave the setting out."}
_STEPS = {"discount": "Set step_discount, which weighs what comes one turn later."}
_TOKENS = {"step_discount": "Set discount, which weighs what comes one token later."}


def _comparing(estimate: Estimator, **more: str) -> Algorithm:
    """An algorithm that compares the attempts at a task."""
    return Algorithm(estimate, min_attempts=2, judges_groups=True, instead=more)


ALGORITHMS.register("grpo", _comparing(GRPO, divide_by_std="Choose algorithm=dr_grpo, which is grpo without dividing."))
ALGORITHMS.register("dr_grpo", _comparing(DR_GRPO, **_NO_STD))
ALGORITHMS.register("rloo", _comparing(RLOO, **_NO_STD))
ALGORITHMS.register("opo", _comparing(OPO, **_NO_STD))
ALGORITHMS.register("ranking", _comparing(RANKING, **_NO_STD))
ALGORITHMS.register(
    "gigpo",
    Algorithm(
        gigpo,
        min_attempts=2,
        judges_groups=True,
        uses=("step_discount", "step_weight", "divide_by_std", "anchor_match", "anchor_similarity"),
        instead=_STEPS,
    ),
)
ALGORITHMS.register("reinforce", Algorithm(REINFORCE, judges_groups=True, instead=_NO_STD))
ALGORITHMS.register(
    "reinforce_plus_plus", Algorithm(reinforce_plus_plus, uses=("discount",), instead={**_WHITENED, **_TOKENS})
)
ALGORITHMS.register("reinforce_plus_plus_baseline", _comparing(reinforce_plus_plus_baseline, **_WHITENED))
ALGORITHMS.register("remax", Algorithm(remax, needs_greedy=True, judges_groups=True, instead=_NO_STD))
ALGORITHMS.register(
    "gae", Algorithm(gae, needs_critic=True, uses=("discount", "gae_lambda"), instead={**_WHITENED, **_TOKENS})
)
