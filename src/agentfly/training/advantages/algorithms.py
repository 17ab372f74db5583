"""ALGORITHMS: the algorithms by name."""

from __future__ import annotations

from agentfly.training.advantages.algorithm import Algorithm
from agentfly.training.advantages.outcome import by_group, dr_grpo, grpo, reinforce, rloo
from agentfly.training.registry import Registry

ALGORITHMS: Registry[Algorithm] = Registry("algorithm")
"""Register your own with ``ALGORITHMS.register("mine", Algorithm(estimate))``."""

ALGORITHMS.register("grpo", Algorithm(by_group(grpo), min_attempts=2))
ALGORITHMS.register("dr_grpo", Algorithm(by_group(dr_grpo), min_attempts=2))
ALGORITHMS.register("rloo", Algorithm(by_group(rloo), min_attempts=2))
ALGORITHMS.register("reinforce", Algorithm(by_group(reinforce)))
