"""The bench of environments reports plain numbers."""

from __future__ import annotations

import json
import sys

import pytest

from agentfly.benchmarks.resources.environments import measure_environments


@pytest.mark.slow
def test_the_bench_measures_both_starts_and_leaves_no_trace_in_the_path() -> None:
    path = list(sys.path)
    result = json.loads(json.dumps(measure_environments(rounds=2)))
    assert sys.path == path
    for name in ("first_fork_start_ms", "fork_start_ms", "spawn_start_ms", "call_ms", "release_ms", "start_ratio"):
        assert result[name] > 0
