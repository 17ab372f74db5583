"""Trackers: what each receives, none stops or slows a run; with the real packages, offline."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.reward import reward
from agentfly.contexts.context import Context
from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.core.events import EvaluationFinished, EventStream, StepFinished
from agentfly.core.installation import install_command
from agentfly.core.run_directory import RunDirectory
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.trackers import TRACKERS, TrackedRun, Tracker, tracker
from agentfly.training.trackers.tracker import track_run
from agentfly.training.train import train

CONFIG = {"model": "tiny", "steps": 2, "kl": {"coefficient": 0.1}, "long": "x" * 1000}


class Notebook:
    """A tracker that keeps everything in memory."""

    def __init__(self) -> None:
        self.run: TrackedRun | None = None
        self.told: list[tuple[int, dict[str, float]]] = []
        self.histograms: list[dict[str, list[float]]] = []
        self.threads: set[int] = set()
        self.finished = False

    def start(self, run: TrackedRun) -> str:
        self.run = run
        return run.id or "known as 7"

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        self.threads.add(threading.get_ident())
        self.told.append((step, dict(metrics)))
        self.histograms.append({name: list(values) for name, values in histograms.items()})

    def finish(self) -> None:
        self.finished = True


class Broken(Notebook):
    """A tracker without a network connection."""

    def __init__(self, *methods: str) -> None:
        super().__init__()
        for method in methods:
            setattr(self, method, self._fail)

    def _fail(self, *_: Any) -> str:
        raise ConnectionError("no route to host")


async def follow(run: RunDirectory, steps: int = 2, first: int = 1, **trackers: Tracker) -> None:
    """Emit the events of a run with this number of steps and a final evaluation to trackers."""
    events = EventStream()
    async with track_run(trackers, run, events, project="depot", config=CONFIG):
        for step in range(first, first + steps):
            metrics = {"reward/mean": step / 10, "policy/entropy": float("nan")}
            events.emit(StepFinished(step=step, metrics=metrics, histograms={"seconds": [1.0, 2.0, 9.0], "none": []}))
        events.emit(EvaluationFinished(step=first + steps - 1, metrics={"success/mean": 0.5}))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "my-run").ensure()


# --- what a tracker is told -------------------------------------------------------------------------------------------


async def test_a_tracker_gets_every_step_and_evaluation_on_its_own_thread(run: RunDirectory) -> None:
    notebook = Notebook()
    await follow(run, mine=notebook)
    assert notebook.told == [
        (1, {"train/reward/mean": 0.1}),
        (2, {"train/reward/mean": 0.2}),
        (2, {"eval/success/mean": 0.5}),
    ]
    assert notebook.histograms == [*[{"train/seconds": [1.0, 2.0, 9.0]}] * 2, {}]
    assert notebook.finished
    assert notebook.run == TrackedRun("depot", "my-run", run.path / "mine", CONFIG)
    assert threading.get_ident() not in notebook.threads


async def test_a_resumed_run_continues_the_same_run_of_each_tracker(run: RunDirectory) -> None:
    await follow(run, mine=Notebook(), gone=Broken("start"))
    again, new = Notebook(), Notebook()
    await follow(run, mine=again, new=new)
    assert again.run is not None
    assert new.run is not None
    assert (again.run.id, new.run.id) == ("known as 7", "")
    assert json.loads(run.trackers_file.read_text()) == {"mine": "known as 7", "new": "known as 7"}


@pytest.mark.parametrize(
    ("methods", "expected_text"),
    [
        (["start"], "could not start, and receives nothing"),
        (["log"], "has missed metrics"),
        (["finish"], "has not ended in good order"),
        (["log", "finish"], "has missed metrics"),
    ],
)
async def test_a_failing_tracker_is_reported_once_and_does_not_affect_the_others(
    run: RunDirectory, caplog: pytest.LogCaptureFixture, methods: list[str], expected_text: str
) -> None:
    notebook = Notebook()
    await follow(run, broken=Broken(*methods), mine=notebook)
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"The tracker broken {expected_text}: ConnectionError: no route to host." in message
    assert len(notebook.told) == 3


async def test_a_hanging_tracker_delays_no_step_and_the_end_only_briefly(
    run: RunDirectory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "FLUSH_TIMEOUT_S", 0.1)
    free = threading.Event()
    hanging, notebook = Notebook(), Notebook()
    hanging.log = lambda *_: free.wait(60)  # type: ignore[assignment, method-assign]
    async with asyncio.timeout(30):
        await follow(run, steps=100, hanging=hanging, mine=notebook)
    assert len(notebook.told) == 101
    (message,) = [record.getMessage() for record in caplog.records]
    assert "The tracker hanging did not store the last metrics" in message
    free.set()


# --- the settings -----------------------------------------------------------------------------------------------------


def test_an_unknown_tracker_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"no tracker 'wanb'.*wandb"):
        TrainConfig(trackers=("wanb",))


@pytest.mark.parametrize(("name", "extra"), [("tensorboard", "train"), ("wandb", "wandb"), ("mlflow", "mlflow")])
def test_a_tracker_without_its_package_names_the_package_to_install(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PrerequisiteError, match=re.escape(install_command(extra))):
        TRACKERS[name]()


@reward
def later(context: Context) -> float:
    return float(context.attempt)


@pytest.mark.slow
def test_a_registered_tracker_follows_a_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Notebook] = []

    def mine() -> Notebook:
        made.append(Notebook())
        return made[-1]

    monkeypatch.setattr(TRACKERS, "_known", dict(TRACKERS._known))
    TRACKERS.register("mine", mine)
    agent = Agent(model="tiny", max_turns=1, max_tokens_per_turn=6)
    settings: dict[str, Any] = {
        "tasks_per_step": 2,
        "attempts": 2,
        "trackers": ("mine",),
        "project": "depot",
        "progress": False,
    }
    train(agent, ["one", "two"], later, run_dir=tmp_path / "run", steps=1, eval_tasks=["three"], **settings)
    train(
        agent, ["one", "two"], later, run_dir=tmp_path / "run", steps=2, eval_tasks=["three"], resume=True, **settings
    )
    first, second = made
    assert [step for step, _ in first.told] == [0, 1, 1]
    assert [step for step, _ in second.told] == [2, 2]
    assert first.run is not None
    assert second.run is not None
    assert (first.run.id, second.run.id) == ("", "known as 7")
    assert (first.run.project, first.run.config["model"], first.run.config["attempts"]) == ("depot", "tiny", 2)
    kept = RunDirectory(tmp_path / "run").metrics()[0].values
    assert first.told[1][1] == {f"train/{name}": value for name, value in kept.items()}
    assert 0 <= kept["tokens/drifted_fraction"] <= 1
    assert kept["tokens/faults"] == 0
    assert not RunDirectory(tmp_path / "run").tensorboard.exists()


# --- the real packages ------------------------------------------------------------------------------------------------


async def test_tensorboard_reads_the_charts(run: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    await follow(run, tensorboard=TRACKERS["tensorboard"]())
    await follow(run, first=3, tensorboard=TRACKERS["tensorboard"]())
    charts = EventAccumulator(str(run.tensorboard))
    charts.Reload()
    assert set(charts.Tags()["scalars"]) == {"train/reward/mean", "eval/success/mean"}
    histogram = charts.Histograms("train/seconds")[-1]
    assert (histogram.step, histogram.histogram_value.num, histogram.histogram_value.max) == (4, 3.0, 9.0)
    points = charts.Scalars("train/reward/mean")
    assert [(point.step, round(point.value, 6)) for point in points] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 0.4),
    ]


@pytest.mark.slow
async def test_wandb_stores_a_run_offline_and_resumes_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb", reason="needs wandb: pip install 'agentfly-rl[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    await follow(run, wandb=TRACKERS["wandb"]())
    await asyncio.sleep(1.1)  # it names its directories by the second
    await follow(run, first=3, wandb=TRACKERS["wandb"]())
    assert [record.getMessage() for record in caplog.records if record.name.startswith("agentfly")] == []
    identity = json.loads(run.trackers_file.read_text())["wandb"]
    one, two = sorted((run.path / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))
    for kept in (one, two):
        async with asyncio.timeout(30):
            while b"eval/success/mean" not in kept.read_bytes():  # noqa: ASYNC110  (its own process writes)
                await asyncio.sleep(0.02)
        assert b"train/reward/mean" in kept.read_bytes()
        assert b"depot" in kept.read_bytes()


@pytest.mark.slow
def test_wandb_without_an_account_reports_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb: pip install 'agentfly-rl[wandb]'")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(PrerequisiteError, match=r"wandb login.*WANDB_MODE=offline"):
        TRACKERS["wandb"]()


@pytest.mark.slow
async def test_mlflow_stores_a_run_in_its_database_and_resumes_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow: pip install 'agentfly-rl[mlflow]'")
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(tracker, "FLUSH_TIMEOUT_S", 90.0)  # it makes its tables first
    await follow(run, mlflow=TRACKERS["mlflow"]())
    await follow(run, first=3, mlflow=TRACKERS["mlflow"]())
    assert [record.getMessage() for record in caplog.records if record.name.startswith("agentfly")] == []
    client = MlflowClient()
    experiment = client.get_experiment_by_name("depot")
    assert experiment is not None
    (kept,) = client.search_runs([experiment.experiment_id])
    assert kept.info.run_name == "my-run"
    assert kept.info.status == "FINISHED"
    assert kept.data.params["kl.coefficient"] == "0.1"
    points = client.get_metric_history(kept.info.run_id, "train/reward/mean")
    assert sorted((point.step, point.value) for point in points) == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]


@pytest.mark.slow
async def test_trackio_stores_a_run_locally_and_resumes_it(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="needs trackio: pip install 'agentfly-rl[trackio]'")
    from trackio.sqlite_storage import SQLiteStorage

    await follow(run, trackio=TRACKERS["trackio"]())
    await follow(run, first=3, trackio=TRACKERS["trackio"]())
    assert [record.getMessage() for record in caplog.records if record.name.startswith("agentfly")] == []
    assert SQLiteStorage.get_runs("depot") == ["my-run"]
    logs = SQLiteStorage.get_logs("depot", "my-run")
    points = [(log["step"], log["train/reward/mean"]) for log in logs if "train/reward/mean" in log]
    assert sorted(points) == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
