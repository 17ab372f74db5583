"""The bench of sampling reports plain numbers and a table of them."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from agentfly.benchmarks.sampling import SamplingWorkload, render, run_sampling_bench


@pytest.mark.slow
def test_the_bench_compares_many_rollouts_with_one_and_with_a_static_batch():
    result = json.loads(json.dumps(run_sampling_bench("tiny", SamplingWorkload(4, 2, prompt=8, sampled=8, answer=4))))
    assert all(speed > 0 for speed in result["tokens_per_second"].values())
    console = Console(file=io.StringIO(), width=120)
    console.print(render(result))
    assert f"{result['speedup']:.2f}" in console.file.getvalue()  # type: ignore[attr-defined]
