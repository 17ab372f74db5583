"""A training process that is killed at any moment resumes with the same result, and repeats no finished work."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfly.core.run_directory import RunDirectory
from agentfly.core.trajectory import load_trajectories
from agentfly.training.checkpoints import Checkpoints

PROGRAM = """
import asyncio, json, os, signal, sys, threading
import agentfly
import agentfly.training.train
import tensorboard.summary
from agentfly.core.events import EventStream
from agentfly.policies.embedded.policy import EmbeddedPolicy

def loaded(kind):
    return kind.load("tiny", dtype="float32", threads=1, max_concurrent_generations=1 if kind is Exact else 64)

class Exact(EmbeddedPolicy):
    "One generation at a time, computed anew: with whom, and after whom, one is computed shows in a logit's last bit."
    async def generate(self, *arguments, **settings):
        async with self.one:
            generation = await super().generate(*arguments, **settings)
            async with self.exclusive_access():
                self.weights_updated(self.version)
        return generation

    async def __aenter__(self):
        self.one = asyncio.Lock()
        return await super().__aenter__()

loaded(EmbeddedPolicy)  # which imports what is slow to import

class Killer:
    "Kills this process a moment after some event."
    def __init__(self, events, seconds):
        self.left, self.seconds = events, seconds
    def __call__(self, event):
        self.left -= 1
        if self.left == 0:
            threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

def life(path, settings):
    log = open(path + ".log", "a")

    @agentfly.reward
    async def later(context: agentfly.Context) -> float:
        "Later attempts get higher rewards, so that every batch has a learning signal."
        log.write(context.rollout_id + "\\n")
        log.flush()
        return context.attempt / 2

    policy = loaded(Exact if settings.pop("exact", False) else EmbeddedPolicy)
    events = EventStream()
    with events.subscribed(Killer(settings.pop("events", 0), settings.pop("seconds", 0))):
        agentfly.train(
            agentfly.Agent(model="tiny", max_turns=1, max_tokens_per_turn=6),
            [f"Say something about {number}." for number in range(10)],
            later,
            eval_tasks=["And now?", "And then?"],
            run_dir=path,
            resume=True,
            tasks_per_step=2,
            attempts=3,
            learning_rate=3e-3,
            checkpoint_every_steps=3,
            eval_every_steps=2,
            progress=False,
            events=events,
            policy=policy,
            **settings,
        )

for line in sys.stdin:  # each life is a process of its own, forked once all is imported
    child = os.fork()
    if not child:
        try:
            life(*json.loads(line))
            os._exit(0)
        except SystemExit as error:
            os._exit(error.code)
        except BaseException:
            import traceback
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""

STEPS = 8
ALONE = {"exact": True}
AHEAD = {"max_staleness": 2}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Lives:
    """Runs training processes, one after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, path: Path, **settings: Any) -> int:
        """Begin a process, and return its id."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(path), {"steps": STEPS, **settings}]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def end(self) -> int:
        """Wait for the end of the started process, and return its status."""
        assert self._process.stdout is not None
        return os.waitstatus_to_exitcode(int(self._process.stdout.readline()))

    def live(self, path: Path, **settings: Any) -> int:
        """A whole life."""
        self.begin(path, **settings)
        return self.end()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    made = Lives()
    yield made
    made.close()


def comparable(run: RunDirectory) -> list[tuple[int, dict[str, float]]]:
    timed = ("time/", "rollout_seconds/", "concurrency/")
    return [
        (row.step, {name: value for name, value in row.values.items() if not name.startswith(timed)})
        for kind in ("train", "eval")
        for row in run.metrics(kind)
    ]


def output(run: RunDirectory) -> Counter[tuple[str, int]]:
    """How often each step and evaluation is among the metrics."""
    lines = map(json.loads, run.metrics_file.read_text().splitlines())
    return Counter((line["kind"], line["step"]) for line in lines)


def on_file(run: RunDirectory) -> set[str]:
    """Return the training rollouts that are completely stored."""
    files = [*run.journal.glob("train-*.jsonl"), *(path for _, path in run.trajectory_files())]
    return {trajectory.rollout_id for path in files for trajectory in load_trajectories(path)}


def evaluated(run: RunDirectory) -> int:
    """Return the evaluation rollouts that are completely stored."""
    return sum(len(list(load_trajectories(path))) for _, path in run.trajectory_files("eval"))


def rolled_out(path: Path) -> list[str]:
    log = path.with_name(f"{path.name}.log")
    return log.read_text().splitlines() if log.exists() else []


def trained(run: RunDirectory) -> list[tuple[int, str, str]]:
    return [
        (step, trajectory.rollout_id, trajectory.task.id)
        for step, path in run.trajectory_files()
        for trajectory in load_trajectories(path)
    ]


def broken(lives: Lives, path: Path, seed: int, kills: int, **settings: Any) -> RunDirectory:
    """A run is killed at random points and resumed. Finished rollouts are never run again."""
    run, draw, killed, known = RunDirectory(path), random.Random(seed), 0, 0
    while True:
        kept, kept_evaluations = on_file(run), evaluated(run)
        killing = {"events": draw.randint(15, 75), "seconds": draw.random() * 0.03} if killed < kills else {}
        status = lives.live(path, **killing, **settings)
        assert status in (0, -signal.SIGKILL)
        made = rolled_out(path)[known:]
        known += len(made)
        assert not kept & set(made)
        assert evaluated(run) >= kept_evaluations  # none of which is forgotten
        if status == 0:
            break
        killed += 1
    assert killed >= 3
    return run


def test_a_run_killed_at_random_points_ends_as_one_that_never_was_to_the_last_bit(lives: Lives, tmp_path: Path) -> None:
    whole = RunDirectory(tmp_path / "whole")
    assert lives.live(whole.path, **ALONE) == 0
    run = broken(lives, tmp_path / "broken", seed=5, kills=6, **ALONE)
    assert trained(run) == trained(whole)
    assert all(row.values["policy/updates"] for row in whole.metrics())
    assert comparable(run) == comparable(whole)
    assert set(output(run).values()) == {1}
    weights = [Checkpoints(one.checkpoints, keep=2).latest_valid() / "model.safetensors" for one in (run, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not any(run.journal.glob("*"))


def test_a_run_killed_while_rollouts_run_ahead_trains_each_task_once_and_in_the_same_order(
    lives: Lives, tmp_path: Path
) -> None:
    whole = RunDirectory(tmp_path / "whole")
    assert lives.live(whole.path, **AHEAD) == 0
    run = broken(lives, tmp_path / "broken", seed=6, kills=6, **AHEAD)
    assert trained(run) == trained(whole)
    tasks = [task for _, _, task in trained(run)]
    assert set(Counter(tasks[: 10 * 3]).values()) == {3}  # an epoch: three attempts at each of ten tasks
    assert [step for step, _ in comparable(run)] == [step for step, _ in comparable(whole)]
    assert set(output(run).values()) == {1}
    for row in run.metrics():
        assert row.values["policy/staleness_max"] <= 2
        assert row.values["rows"] == 6
    assert not any(run.journal.glob("*"))


def test_sigterm_ends_a_run_cleanly_and_keeps_its_checkpoint(lives: Lives, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    process = lives.begin(run.path, steps=1000)
    while not run.metrics_file.exists() or run.metrics_file.read_bytes().count(b"\n") < 6:
        os.kill(process, 0)
        time.sleep(0.01)
    os.kill(process, signal.SIGTERM)
    assert lives.end() == 128 + signal.SIGTERM
    assert Checkpoints(run.checkpoints, keep=2).latest_valid() is not None
