from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from agentfly.core.errors import PrerequisiteError
from agentfly.core.events import EvaluationFinished, EventStream, RolloutStarted, StepFinished
from agentfly.core.files import read_json_lines
from agentfly.core.run_directory import RunDirectory
from agentfly.viewing.event_log import BackgroundSubscriber, EventWriter, record_events


def emit_a_run(run: RunDirectory) -> None:
    events = EventStream()
    with record_events(run, events):
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


def test_nothing_is_lost_when_a_run_ends_by_an_exception(tmp_path):
    run = RunDirectory(tmp_path / "run")
    events = EventStream()

    def emit_and_fail():
        for number in range(1000):
            events.emit(RolloutStarted(rollout_id=str(number), group_id="g", task_id="t"))
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), record_events(run, events):
        emit_and_fail()
    assert [event["rollout_id"] for event in read_json_lines(run.events_file)] == [str(n) for n in range(1000)]


def test_whoever_emits_an_event_waits_for_no_writer():
    free, seen = threading.Event(), []

    def slow(event):
        assert free.wait(60)
        seen.append(event.step)

    with BackgroundSubscriber([slow]) as queued:
        for step in range(3):
            queued(StepFinished(step=step, metrics={}))
        assert seen == []
        free.set()
    assert seen == [0, 1, 2]


def test_a_failing_writer_is_reported_and_does_not_affect_the_others(caplog):
    seen: list[Any] = []

    def full(event):
        raise OSError("no space left")

    with BackgroundSubscriber([full, seen.append]) as queued:
        for step in range(2):
            queued(StepFinished(step=step, metrics={}))
    assert [event.step for event in seen] == [0, 1]
    assert len(caplog.records) == 1


def test_the_metrics_of_a_step_are_kept_before_anything_else_happens(tmp_path):
    run = RunDirectory(tmp_path / "run")
    events = EventStream()
    with record_events(run, events):
        events.emit(StepFinished(step=1, metrics={"reward/mean": 0.5}))
        assert [row.step for row in run.metrics()] == [1]


def test_a_run_that_cannot_write_metrics_stops_and_reports_how_to_resume(tmp_path):
    run, events, seen = RunDirectory(tmp_path / "run").ensure(), EventStream(), []  # type: ignore[var-annotated]
    run.metrics_file.symlink_to("/dev/full")
    with record_events(run, events), events.subscribed(seen.append):
        for event in (StepFinished(step=3, metrics={"a": 0.5}), EvaluationFinished(step=3, metrics={"a": 0.5})):
            with pytest.raises(PrerequisiteError, match=r"metrics of step 3 cannot be written.*Free some.*--resume"):
                events.emit(event)
        run.metrics_file.unlink()
        events.emit(StepFinished(step=3, metrics={"a": 0.75}))
    assert [row.values for row in run.metrics()] == [{"a": 0.75}]
    assert len(seen) == 3


def test_events_that_cannot_be_written_for_a_while_are_written_later(tmp_path, caplog):
    run = RunDirectory(tmp_path / "run").ensure()
    run.events_file.symlink_to("/dev/full")
    with EventWriter(run) as writer:
        for number in range(2000):
            writer(RolloutStarted(rollout_id=str(number), group_id="g", task_id="t"))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        run.events_file.unlink()
        writer(StepFinished(step=1, metrics={}))
    assert [event["event"] for event in read_json_lines(run.events_file)] == [
        *["RolloutStarted"] * 2000,
        "StepFinished",
    ]
    assert len(caplog.records) == 1


def test_events_that_are_lost_are_counted_and_stop_no_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("agentfly.viewing.event_log._WAITING_BYTES", 2**12)
    run, events = RunDirectory(tmp_path / "run").ensure(), EventStream()
    run.events_file.symlink_to("/dev/full")
    with record_events(run, events):
        for number in range(2000):
            events.emit(RolloutStarted(rollout_id=str(number), group_id="g", task_id="t"))
    assert "2000 events of the run are lost" in caplog.text
    assert len(caplog.records) == 2


def test_events_of_a_resumed_run_follow_those_of_the_killed_one(tmp_path):
    run = RunDirectory(tmp_path / "run")
    emit_a_run(run)
    run.events_file.write_bytes(run.events_file.read_bytes()[:-5])
    emit_a_run(run)
    names = [event["event"] for event in read_json_lines(run.events_file)]
    assert names == ["RolloutStarted", "StepFinished", "RolloutStarted", "StepFinished", "EvaluationFinished"]
