"""Trajectories save to and load from JSON lines without loss."""

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import MISSING, fields

import pytest

from agentfly.core.errors import Boundary, ConfigError, InvalidArguments, ResourceStartError
from agentfly.core.messages import Image, PlacedImage, ToolCall
from agentfly.core.task import Task
from agentfly.core.tokens import TokenSequence
from agentfly.core.trajectory import (
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
        "finish_reason": FinishReason.DONE,
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
        {"finish_reason": FinishReason.FAILED, "failure": Failure.of(ResourceStartError("no disk"))},
        {"turns": [], "sequences": [], "finish_reason": None},
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


@pytest.mark.parametrize("lost", [1, 2, 20, 10**5], ids=["line end", "brace", "some", "much"])
def test_appending_behind_a_line_cut_by_a_crash_costs_that_line_only(tmp_path, caplog, lost):
    file = tmp_path / "t.jsonl"
    save_trajectories([trajectory()], file)
    whole = file.read_bytes()
    save_trajectories([trajectory(rollout_id="cut", messages=[{"role": "user", "content": "x" * 200_000}])], file)
    file.write_bytes(whole + file.read_bytes()[:-lost])
    before = [t.rollout_id for t in load_trajectories(file)]
    assert before == (["run-0.1", "cut"] if lost == 1 else ["run-0.1"])
    save_trajectories([trajectory(rollout_id="b")], file, append=True)
    assert [t.rollout_id for t in load_trajectories(file)] == [*before, "b"]
    assert ("cut by a crash" in caplog.text) == (lost > 1)


@pytest.mark.parametrize("there", [b"my notes", b"[1, 2"])
def test_appending_removes_nothing_that_is_no_record(tmp_path, there):
    file = tmp_path / "t.jsonl"
    file.write_bytes(there)
    save_trajectories([trajectory()], file, append=True)
    assert file.read_bytes().startswith(there + b"\n{")
    with pytest.raises(ConfigError, match="line 1"):
        list(load_trajectories(file))


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
    assert "test_trajectory.py" in failure.location
    assert failure.location.endswith("in test_a_failure_keeps_its_traceback_and_cause")


def full() -> Trajectory:
    """A trajectory in which nothing is as it is by default."""
    image = Image(b"png", "image/png")
    sequence = TokenSequence()
    sequence.append_prompt([1, 7, 7], [PlacedImage(image, 1, 3)])
    sequence.append_sampled([3, 4], [-0.1, -1 / 3], version=[2, 3], raw_logprobs=[-0.2, -0.3])
    sequence.append_observation([5, 6])
    sequence.truncate(6)
    failure = Failure.of(ResourceStartError("half \ud800"))
    shown = [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "image": image}]}]
    call = ToolCall("call_0", "look", None, error="half \ud800")
    record = ToolRecord(call, "seen", -0.5, True, [1], {"moves": 3}, failure, 0.25, (image,))
    turn = Turn(
        index=1, sequence=0, start=3, stop=5, text="text", ended_by_model=True, tool_results=(record,),
        generation_seconds=0.125,
        reasoning="why", content="what", kind="memory", agent="search", conversation="call_0", other_model="other",
        reward=0.5, anchor="anchor", parent_turns=(0,), prompt_tokens=7, sampled_tokens=2,
    )  # fmt: skip
    return Trajectory(
        "r", "g", Task("look", {"answer": 1}), 2, shown, [turn], [sequence.freeze()], {"call_0": shown},  # type: ignore[arg-type, dict-item]
        FinishReason.FAILED, failure, 0.5, failure, {"success": 1.0}, {"total": 1.5},
        "greedy", ["the program asked for more"],
    )  # fmt: skip


def test_every_field_survives(tmp_path):
    saved = full()
    for value in (saved, saved.turns[0], saved.turns[0].tool_results[0], saved.turns[0].tool_results[0].call):
        for one in fields(value):
            default = one.default_factory() if one.default_factory is not MISSING else one.default
            assert getattr(value, one.name) != default, one.name
    save_trajectories([saved], tmp_path / "t.jsonl")
    assert list(load_trajectories(tmp_path / "t.jsonl")) == [saved]


def places(value, path=()):
    """Every place in a value of JSON."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


WRONG = [None, -2, 10**12, "x", [], {}, 1.5, [[1, 2, 3, 4]]]


def test_whatever_is_wrong_in_a_saved_trajectory_it_is_read_as_one_or_refused():
    saved = json.loads(json.dumps(full().to_json()))
    refused = 0
    for *path, last in places(saved):
        for wrong in [*WRONG, MISSING]:
            damaged = inner = copy.deepcopy(saved)
            for key in path:
                inner = inner[key]
            if wrong is MISSING:
                del inner[last]
            else:
                inner[last] = wrong
            try:
                read = Trajectory.from_json(damaged)
            except ConfigError:
                refused += 1
            else:
                assert [read.sequences[turn.sequence] for turn in read.turns if turn.sequence >= 0] or not read.turns
    assert refused > 500


@pytest.mark.parametrize("line", [b"{}", b"[1]", b"{", b'{"prompt": "go"}', b"\xff\xfe", b"[" * 100_000, b""])
def test_a_line_that_is_no_trajectory_is_named(tmp_path, line):
    file = tmp_path / "t.jsonl"
    save_trajectories([trajectory()], file)
    file.write_bytes(file.read_bytes() + line + b"\n")
    with pytest.raises(ConfigError, match=r"t\.jsonl, line 2: (This is no trajectory|It is not JSON)"):
        list(load_trajectories(file))


def test_a_last_line_without_its_end_is_read_where_all_of_it_is_there(tmp_path):
    file = tmp_path / "t.jsonl"
    save_trajectories([trajectory(), trajectory(rollout_id="last")], file)
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    assert [t.rollout_id for t in load_trajectories(file)] == ["run-0.1", "last"]


@pytest.mark.parametrize(
    "changes", [{"reward": 1e31}, {"reward": math.nan}, {"metrics": {"x": None}}, {"metrics": {"x": "1"}}]
)
def test_a_stored_score_that_is_no_number_is_refused(changes):
    with pytest.raises(ConfigError, match="no finite number"):
        Trajectory.from_json(trajectory().to_json() | changes)


def test_a_new_file_of_trajectories_appears_only_once_it_is_complete(tmp_path) -> None:
    def cut() -> Iterator[Trajectory]:
        yield full()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_trajectories(cut(), tmp_path / "new.jsonl")
    assert list(tmp_path.iterdir()) == []
