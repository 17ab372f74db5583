"""Trajectories save to and load from JSON lines without loss."""

import pytest

from agentfly.errors import Boundary, InvalidArguments, ResourceStartError
from agentfly.messages import ToolCall
from agentfly.task import Task
from agentfly.tokens import TokenSequence
from agentfly.trajectory import (
    Failure,
    FinishReason,
    ToolRecord,
    Trajectory,
    Turn,
    load_trajectories,
    save_trajectories,
)


def trajectory(**changes) -> Trajectory:
    sequence = TokenSequence()
    sequence.append_prompt([1, 2])
    sequence.append_sampled([3, 4], [-0.1, -1 / 3], version=2)
    call = ToolCall("call_0", "look", {"where": "«là» 🦉"})
    broken = ToolCall("call_1", "look", None, error="not JSON")
    results = (
        ToolRecord(call, "an owl\n", 0.5, True, {"at": [1, 2]}, {"moves": 3}, seconds=0.25),
        ToolRecord(broken, "Error: not JSON", failure=Failure.of(InvalidArguments("not JSON"))),
    )
    values = {
        "rollout_id": "run-0.1",
        "group_id": "run-0",
        "attempt": 1,
        "task": Task([{"role": "user", "content": "look"}], {"answer": ["owl", 1.5, None]}),
        "messages": [{"role": "user", "content": "look"}],
        "turns": [Turn(0, 0, 2, 4, "text", True, results, 0.125)],
        "sequences": [sequence.freeze()],
        "finish": FinishReason.DONE,
        "reward": 1 / 3,
        "metrics": {"success": 1.0},
        "seconds": {"total": 1.5},
    }
    return Trajectory(**{**values, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reward": None, "reward_failure": Failure.of(ValueError("judge"), Boundary.REWARD)},
        {"finish": FinishReason.FAILED, "failure": Failure.of(ResourceStartError("no disk"))},
        {"turns": [], "sequences": [], "finish": None},
    ],
)
def test_a_trajectory_survives_json_lines_without_loss(tmp_path, changes):
    saved = [trajectory(**changes), trajectory(rollout_id="other")]
    save_trajectories(saved, tmp_path / "t.jsonl")
    assert list(load_trajectories(tmp_path / "t.jsonl")) == saved


def test_text_that_utf8_cannot_hold_survives_too(tmp_path):
    saved = [trajectory(messages=[{"role": "user", "content": "half \ud800 pair"}])]
    save_trajectories(saved, tmp_path / "t.jsonl")
    assert list(load_trajectories(tmp_path / "t.jsonl")) == saved


def test_appending_keeps_what_was_there(tmp_path):
    save_trajectories([trajectory()], tmp_path / "t.jsonl")
    save_trajectories([trajectory(rollout_id="b")], tmp_path / "t.jsonl", append=True)
    assert [t.rollout_id for t in load_trajectories(tmp_path / "t.jsonl")] == ["run-0.1", "b"]


def test_a_last_line_cut_by_a_crash_is_left_out(tmp_path):
    file = tmp_path / "t.jsonl"
    save_trajectories([trajectory(), trajectory(rollout_id="cut")], file)
    file.write_bytes(file.read_bytes()[:-20])
    assert [t.rollout_id for t in load_trajectories(file)] == ["run-0.1"]


def test_what_infrastructure_spoiled_is_not_trainable():
    assert trajectory().trainable
    assert not trajectory(failure=Failure.of(ResourceStartError("no disk"))).trainable
    assert not trajectory(reward=None, reward_failure=Failure.of(ValueError("judge"), Boundary.REWARD)).trainable
    assert not trajectory(reward=None).trainable
    assert trajectory(failure=Failure.of(InvalidArguments("bad"))).trainable


def test_a_failure_keeps_its_traceback_and_cause():
    try:
        try:
            raise OSError("disk full")
        except OSError as cause:
            raise ResourceStartError("no start") from cause
    except ResourceStartError as error:
        failure = Failure.of(error)
    assert failure.boundary is Boundary.RESOURCE
    assert not failure.by_policy
    assert "disk full" in failure.traceback
    assert "test_trajectory.py" in failure.place
    assert failure.place.endswith("in test_a_failure_keeps_its_traceback_and_cause")
