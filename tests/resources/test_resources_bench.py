"""The bench of resources reports plain numbers and tables; its optimum for pools is a true one."""

from __future__ import annotations

import io
import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from agentfly.benchmarks.resources import container_engines, run, sandboxes
from agentfly.benchmarks.resources import engine as occupancy
from agentfly.benchmarks.resources.engine import PoolWorkload, best_seconds, measure_occupancy
from agentfly.core import signals
from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.resources.containers.runtime_directory import runtime_directory
from agentfly.resources.containers.spec import ContainerSpec
from benchmarks.sandbox_episodes import measure_episodes, private_engine

SMALL = PoolWorkload(rollouts=6, longest_wait=0.02, tools=(0.01, 0.01), generations=(0.01,))


@pytest.mark.slow
def test_the_bench_measures_the_engine_and_says_why_a_backend_is_missing(monkeypatch):
    def missing():
        raise PrerequisiteError("no user namespaces")

    monkeypatch.setattr(sandboxes, "measure_bubblewrap", missing)
    monkeypatch.setattr(occupancy, "measure_occupancy", lambda: measure_occupancy(SMALL, [2]))
    parts = ["engine", "occupancy", "bubblewrap", "docker"]
    result = json.loads(json.dumps(run.run_resources_bench(parts)))
    assert list(result) == parts
    assert set(result["engine"]["per_operation_us"]) == {"1", "10", "100", "1000", "10000"}
    assert all(us > 0 for us in result["engine"]["per_operation_us"].values())
    text = rendered(result)
    assert f"{result['engine']['warm_us']:.1f} µs" in text
    assert "no user namespaces" in text
    assert "Add --image" in text


def test_a_part_that_there_is_not_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"'dokcer'.*docker, podman"):
        run.run_resources_bench(["dokcer"])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["docker", "podman"])
def test_an_engine_of_its_own_is_measured_beside_its_program(name, monkeypatch):
    archive = Path(__file__).parents[2] / ".test-images" / "rootfs.tar"
    if not archive.exists():
        pytest.skip("There is no image. Make one: python scripts/make_test_image.py")
    monkeypatch.delenv(container_engines.ENGINES[name], raising=False)
    try:
        with private_engine(name, archive) as image:
            measured = container_engines.measure_engine_backend(name, image, rounds=1, commands=2, count=2)
            spec = ContainerSpec(image=image, backend=name, memory="512MiB")
            assert signals.run_until_signal(measure_episodes(spec)) == {}  # the image has no repositories
    except PrerequisiteError as error:
        pytest.skip(str(error))
    assert {"cold_start_over_bare_cold_start", "session_run_over_bare_session_run"} <= measured.keys()
    assert container_engines.ENGINES[name] not in os.environ


@pytest.mark.slow
@pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))
def test_a_backend_is_measured_against_the_bare_program_and_nothing_is_left():
    measured = sandboxes.measure_bubblewrap(rounds=1, commands=2, count=2)
    compared = [name.split("_over_") for name in measured if "_over_" in name]
    assert {ours for ours, _ in compared} == {"cold_start", "release", "session_run", "session_program", "process_run"}
    for ours, bare in compared:
        ratio = measured[f"{ours}_ms"] / measured[f"{bare}_ms"]
        assert measured[f"{ours}_over_{bare}"] == pytest.approx(ratio, rel=0.05)
    assert measured["many"]["count"] == 2
    assert measured["many"]["idle_mib"] > 0
    assert [path for path in runtime_directory().iterdir() if path.name.startswith(f"bench-{os.getpid()}")] == []
    pools = {"8": {"best_s": 1.0, "measured_s": 1.1, "semaphore_s": 1.0, "occupancy": 0.909}}
    engine = {"warm_us": 1.0, "cycle_us": 1.0, "per_operation_us": {}, "growth": 1.0}
    occupied = {"target": 0.95, "rollouts": 256, "pools": pools}
    text = rendered({"engine": engine, "occupancy": occupied, "bubblewrap": measured})
    assert "90.9%" in text
    assert "Other work on the machine changes these figures" in text
    assert "one operation with 10,000 owners, over one with 10 (target: at most 2)" in text
    assert f"{measured['session_run_ms']:.3f} ms" in text


@pytest.mark.slow
def test_work_over_a_pool_takes_no_less_than_the_optimum():
    measured = measure_occupancy(SMALL, [1, 3])
    assert list(measured["pools"]) == ["1", "3"]
    for row in measured["pools"].values():
        assert row["measured_s"] >= row["best_s"]
        assert 0 < row["occupancy"] <= 1


@settings(max_examples=60, deadline=None)
@given(waits=st.lists(st.integers(0, 12), min_size=1, max_size=5), held=st.integers(1, 5), capacity=st.integers(1, 3))
def test_the_optimum_is_the_best_of_all_orders_in_which_instances_can_be_given(waits, held, capacity):
    def takes(order):
        free_from = [0] * capacity
        for wait in order:
            first = free_from.index(min(free_from))
            free_from[first] = max(wait, free_from[first]) + held
        return max(free_from)

    assert best_seconds(waits, held, capacity) == min(map(takes, itertools.permutations(waits)))


def rendered(result):
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(run.render(result))
    return console.export_text()
