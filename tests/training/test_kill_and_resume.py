"""A training process that is killed, at any moment, goes on from its last checkpoint as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentfly.run_directory import RunDirectory
from agentfly.training.checkpoints import Checkpoints
from agentfly.trajectory import load_trajectories

PROGRAM = """
import sys
import agentfly

@agentfly.reward
def later(context: agentfly.Context) -> float:
    "The later attempt is the better one, whatever it says: every batch has something to teach."
    return context.attempt / 2

agentfly.train(
    agentfly.Agent(model="tiny", max_turns=1, max_tokens_per_turn=6),
    [f"Say something about {number}." for number in range(10)],
    later,
    eval_tasks=["And now?"],
    run_dir=sys.argv[1],
    resume=True,
    steps=int(sys.argv[2]),
    tasks_per_step=2,
    attempts=3,
    learning_rate=3e-3,
    checkpoint_every_steps=2,
    dtype="float32",
    threads=1,
    max_concurrent_generations=1,  # in a batch, the last bits of logits depend on who is in it
)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def start(path: Path, steps: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(path), str(steps)], stderr=subprocess.PIPE)


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    """Return when a file has that many lines."""
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        time.sleep(0.01)


def comparable(run: RunDirectory) -> list[dict[str, float]]:
    timed = ("time/", "rollout_seconds/")
    return [
        {name: value for name, value in row.values.items() if not name.startswith(timed)}
        for kind in ("train", "eval")
        for row in run.metrics(kind)  # type: ignore[arg-type]
    ]


def test_a_run_killed_at_random_points_ends_as_one_that_never_was(tmp_path: Path) -> None:
    whole, broken = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "broken")
    assert start(whole.path, 8).wait() == 0
    draw = random.Random(5)
    for _ in range(3):
        process = start(broken.path, 8)
        done = broken.metrics_file.read_bytes().count(b"\n") if broken.metrics_file.exists() else 0
        wait_for_lines(broken.metrics_file, max(1, done - 1 + draw.randint(0, 2)), process)
        time.sleep(draw.random() * 0.2)
        process.kill()
        process.communicate()
    assert start(broken.path, 8).wait() == 0
    assert all(row.values["policy/updates"] for row in whole.metrics())
    for resumed, unbroken in zip(comparable(broken), comparable(whole), strict=True):
        assert resumed == pytest.approx(unbroken, rel=1e-4, abs=1e-5)
    trained = [
        [[trajectory.task.id for trajectory in load_trajectories(path)] for _, path in run.trajectory_files()]
        for run in (whole, broken)
    ]
    assert trained[0] == trained[1]


def test_sigterm_ends_a_run_in_good_order_and_its_checkpoint_stands(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    process = start(run.path, 1000)
    wait_for_lines(run.metrics_file, 4, process)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert Checkpoints(run.checkpoints, keep=2).latest() is not None
