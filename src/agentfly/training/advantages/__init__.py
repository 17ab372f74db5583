"""Advantages: how much better than expected each sampled token turned out.

An estimator of advantages is a pure function from the evidence about a batch to one array a row, with one value for
each sampled token of the row. `ALGORITHMS` holds them by name, and the configuration's ``algorithm`` chooses one.
They count trajectories, never rows.
"""

from agentfly.training.advantages.algorithm import Advantages, Algorithm, Estimator, Evidence, Floats
from agentfly.training.advantages.algorithms import ALGORITHMS

__all__ = ["ALGORITHMS", "Advantages", "Algorithm", "Estimator", "Evidence", "Floats"]
