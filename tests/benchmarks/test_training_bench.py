"""The bench of training: it trains on exactly the requested rows, and does not compare sides that differ."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from agentfly.core.errors import AgentFlyError, PrerequisiteError
from agentfly.policies.catalog import resolve_model
from benchmarks.training.agentfly_side import measure
from benchmarks.training.measure import TURNS, compare, render, run_side, run_training_bench
from benchmarks.training.workload import SideResult, TrainingWorkload

SMALL = TrainingWorkload(tasks=2, attempts=2, words=4, sampled=5, warmup=1, steps=2)
TRL = Path(__file__).parents[2] / ".venv-trl"


def _own(work: TrainingWorkload) -> SideResult:
    return measure(work.specification(str(resolve_model("tiny")), threads=1))


def _stand_in(directory: Path, prints: str, code: int = 0) -> Path:
    """An environment whose Python prints one line and ignores its arguments."""
    python = directory / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\necho 'no module named trl' >&2\nexit {code}\n")
    python.chmod(0o755)
    return directory


@pytest.mark.slow
def test_each_generation_is_exactly_as_long_as_asked_and_each_turn_but_the_last_calls_the_tool():
    one = _own(SMALL)
    assert one.sampled_tokens == [2 * 2 * 5] * 2
    assert all(seconds > 0 for seconds in (*one.step_seconds, *one.step_cpu_seconds))
    several = _own(replace(SMALL, turns=3, steps=1))
    assert several.sampled_tokens == [3 * 2 * 2 * 5]
    assert several.tokens[0] - several.sampled_tokens[0] > one.tokens[0] - one.sampled_tokens[0]  # answers of the tool


def test_a_missing_environment_is_reported_before_any_measurement(tmp_path):
    with pytest.raises(PrerequisiteError, match="make trl"):
        run_training_bench("tiny", SMALL, trl=tmp_path)
    called = subprocess.run(
        [sys.executable, "-m", "benchmarks.training", "--model", "tiny", "--trl", str(tmp_path)],
        cwd=TRL.parent,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (called.returncode, called.stderr.startswith("error: ")) == (1, True), called.stderr


def test_the_measurements_of_both_sides_are_compared():
    own = SideResult([2.0, 2.0], [4.0, 4.0], [100, 100], [500, 500], 300.0, {})
    other = replace(own, step_seconds=[3.0, 5.0], step_cpu_seconds=[6.0, 6.0], peak_mib=600.0)
    ratios = compare(own, other)
    assert (ratios["speedup"], ratios["speedup_by_cpu"], ratios["memory"]) == (2.0, 1.5, 0.5)
    with pytest.raises(AgentFlyError, match="same tokens"):
        compare(own, replace(other, tokens=[500, 501]))


def test_a_side_reports_its_measurement_or_its_failure_in_the_last_line(tmp_path):
    side = SideResult([1.0], [1.0], [20], [50], 1.0, {"trl": "stand-in"})
    output = f"Training …\n{json.dumps(asdict(side))}"
    assert run_side("trl", [str(_stand_in(tmp_path / "good", output) / "bin" / "python")], {}) == side
    with pytest.raises(AgentFlyError, match="no module named trl"):
        run_side("trl", [str(_stand_in(tmp_path / "bad", output, code=1) / "bin" / "python")], {})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_bench_gives_plain_numbers_and_a_table_of_them():
    result = json.loads(json.dumps(run_training_bench("tiny", replace(SMALL, steps=1))))
    assert result["sides"]["agentfly_turns"]["sampled_tokens"] == [
        TURNS * result["sides"]["agentfly"]["sampled_tokens"][0]
    ]
    console = Console(file=io.StringIO(), width=160)
    console.print(render(result))
    assert f"{result['sides']['agentfly']['peak_mib']:.0f}" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (TRL / "stamp").is_file(), reason="trl is not here: make trl")
def test_trl_trains_on_the_same_tokens():
    result = run_training_bench("tiny", replace(SMALL, steps=1), trl=TRL)
    assert result["sides"]["trl"]["tokens"] == result["sides"]["agentfly"]["tokens"]
    assert result["sides"]["trl"]["versions"]["trl"]
    assert f"{result['speedup']:.2f} times trl's tokens a second" in str(render(result).caption)
