"""ALGORITHMS: the algorithms by name."""

from __future__ import annotations

from agentfly.training.advantages.algorithm import Algorithm
from agentfly.training.advantages.gigpo import gigpo
from agentfly.training.advantages.outcome import DR_GRPO, GRPO, OPO, RANKING, REINFORCE, RLOO
from agentfly.training.advantages.token_returns import gae, reinforce_plus_plus, reinforce_plus_plus_baseline, remax
from agentfly.training.registry import Registry

ALGORITHMS: Registry[Algorithm] = Registry("algorithm")
"""Register your own with ``ALGORITHMS.register("mine", Algorithm(estimate))``."""

ALGORITHMS.register("grpo", Algorithm(GRPO, min_attempts=2, judges_groups=True))
ALGORITHMS.register("dr_grpo", Algorithm(DR_GRPO, min_attempts=2, judges_groups=True))
ALGORITHMS.register("rloo", Algorithm(RLOO, min_attempts=2, judges_groups=True))
ALGORITHMS.register("opo", Algorithm(OPO, min_attempts=2, judges_groups=True))
ALGORITHMS.register("ranking", Algorithm(RANKING, min_attempts=2, judges_groups=True))
ALGORITHMS.register("gigpo", Algorithm(gigpo, min_attempts=2, judges_groups=True))
ALGORITHMS.register("reinforce", Algorithm(REINFORCE, judges_groups=True))
ALGORITHMS.register("reinforce_plus_plus", Algorithm(reinforce_plus_plus))
ALGORITHMS.register(
    "reinforce_plus_plus_baseline", Algorithm(reinforce_plus_plus_baseline, min_attempts=2, judges_groups=True)
)
ALGORITHMS.register("remax", Algorithm(remax, needs_greedy=True, judges_groups=True))
ALGORITHMS.register("gae", Algorithm(gae, needs_critic=True))
