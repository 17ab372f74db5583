"""The bench of resources gives plain numbers, and a table of them."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from agentfly.benchmarks import resources, sandboxes
from agentfly.errors import PrerequisiteError


@pytest.mark.slow
def test_the_bench_measures_the_engine_and_says_why_sandboxes_are_missing(monkeypatch):
    def missing():
        raise PrerequisiteError("no user namespaces")

    monkeypatch.setattr(sandboxes, "measure_sandboxes", missing)
    result = json.loads(json.dumps(resources.run_resources_bench()))
    assert set(result["engine"]["per_operation_us"]) == {"1", "10", "100", "1000", "10000"}
    assert all(us > 0 for us in result["engine"]["per_operation_us"].values())
    console = Console(record=True, width=100)
    console.print(resources.render(result))
    text = console.export_text()
    assert f"{result['engine']['warm_us']:.1f} µs" in text
    assert "no user namespaces" in text
