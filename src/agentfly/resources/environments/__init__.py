"""Simulators.

From the outside in: spec, environment, the homes; and of a process: kept_process, nursery, zygote, keeper, worker.
"""
