from __future__ import annotations

import builtins
import json

from agentfly.events import EvaluationFinished, EventStream, RolloutStarted, StepFinished
from agentfly.viewing.metrics import recorded
from agentfly.viewing.run_directory import RunDirectory, read_json_lines


def emit_a_run(run: RunDirectory) -> None:
    events = EventStream()
    with recorded(run, events):
        events.emit(RolloutStarted(rollout_id="r", group_id="g", task_id="t"))
        events.emit(StepFinished(step=1, metrics={"reward/mean": 0.5, "entropy": float("inf")}))
        events.emit(EvaluationFinished(step=1, metrics={"success/mean": 0.75}))
    events.emit(StepFinished(step=2, metrics={"reward/mean": 0.9}))


def test_a_recorded_run_has_its_metrics_and_every_event_and_nothing_from_after_it(tmp_path):
    run = RunDirectory(tmp_path / "run")
    emit_a_run(run)
    assert [row.step for row in run.metrics()] == [1]
    assert [row.values for row in run.metrics("eval")] == [{"success/mean": 0.75}]
    events = read_json_lines(run.events_file)
    assert [event["event"] for event in events] == ["RolloutStarted", "StepFinished", "EvaluationFinished"]
    assert events[0]["task_id"] == "t"
    for line in run.events_file.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))


def test_events_of_a_resumed_run_follow_those_of_the_killed_one(tmp_path):
    run = RunDirectory(tmp_path / "run")
    emit_a_run(run)
    run.events_file.write_bytes(run.events_file.read_bytes()[:-5])
    emit_a_run(run)
    names = [event["event"] for event in read_json_lines(run.events_file)]
    assert names == ["RolloutStarted", "StepFinished", "RolloutStarted", "StepFinished", "EvaluationFinished"]


def test_tensorboard_reads_the_charts(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunDirectory(tmp_path / "run")
    emit_a_run(run)
    charts = EventAccumulator(str(run.tensorboard))
    charts.Reload()
    assert set(charts.Tags()["tensors"]) == {"train/reward/mean", "eval/success/mean"}
    (point,) = charts.Tensors("train/reward/mean")
    assert (point.step, point.tensor_proto.float_val[0]) == (1, 0.5)


def test_a_run_without_tensorboard_says_so_once_and_keeps_its_metrics(tmp_path, monkeypatch, caplog):
    original = builtins.__import__

    def without_tensorboard(name, *arguments, **keywords):
        if name.startswith("tensorboard"):
            raise ImportError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_tensorboard)
    run = RunDirectory(tmp_path / "run")
    emit_a_run(run)
    assert [record.message for record in caplog.records if "pip install tensorboard" in record.message]
    assert len(caplog.records) == 1
    assert [row.step for row in run.metrics()] == [1]
