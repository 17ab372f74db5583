"""Models that are loaded concurrently do not affect each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from agentfly.policies.load import load_policy


def test_threads_that_load_models_at_the_same_time_each_have_a_whole_one() -> None:
    with ThreadPoolExecutor(4) as threads:
        policies = list(threads.map(load_policy, ["tiny"] * 4))
    assert all(weight.device.type != "meta" for policy in policies for weight in policy.model.parameters())
