"""Efficiency of rollouts: measured time compared with the optimum, on workloads of known latencies."""
