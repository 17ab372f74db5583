"""The rollout record: finished rollouts are not run again, however their process ended."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import group_reward
from agentfly.agents.reward import reward
from agentfly.agents.tool_decorator import tool
from agentfly.core.errors import ConfigError, PrerequisiteError, ResourceStartError
from agentfly.core.events import EventStream, RewardFinished
from agentfly.core.run_directory import RunDirectory
from agentfly.core.task import Task
from agentfly.core.trajectory import FinishReason, Trajectory, load_trajectories
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.backlog import AttemptGroup
from agentfly.rollouts.failure_budget import FailureBudgetExceeded
from agentfly.rollouts.rollout_record import RolloutRecord, open_locked
from agentfly.rollouts.run import evaluate, run

TASKS = [Task(f"task {number}", {"number": number}, id=f"t{number}") for number in range(6)]


@reward
def number_of(response: str, number: int) -> float:
    return number


class Policy(ScriptedPolicy):
    """Answers at once, and counts for whom. Rollouts whose id is among ``broken`` fail."""

    def __init__(self, broken=()):
        super().__init__(["fine"])
        self.asked = Counter()  # type: ignore[var-annotated]
        self.broken = broken

    async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
        self.asked[rollout_id] += 1
        if rollout_id in self.broken:
            raise ResourceStartError("no disk space")
        return await super().generate(prompt_ids, sampling, rollout_id=rollout_id, images=images)


async def roll(run_dir, tasks=TASKS, *, policy=None, agent=None, **settings):
    policy = policy or Policy()
    agent = agent or Agent(model="scripted", system_prompt="Be brief.")
    result = await run(agent, tasks, reward=number_of, policy=policy, run_dir=run_dir, **settings)
    return result, policy.asked


def file_of(run_dir):
    return RunDirectory(run_dir).trajectories_file(0, "rollout")


def torn(run_dir, lines, rest=b'{"rollout_id": "torn'):
    """The record as it is when the process is killed while it writes the line after so many."""
    path = file_of(run_dir)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]) + rest)


async def test_a_result_is_shown_in_a_line_however_much_is_in_it(tmp_path):
    result, _ = await roll(tmp_path)
    assert repr(result).startswith(f"RunResult({len(result.trajectories)} trajectories, ")
    assert len(repr(result)) < 120


async def test_trajectories_are_saved_once_each_and_in_order(tmp_path):
    result, _ = await roll(tmp_path / "run", attempts=2, label="r")
    saved = list(load_trajectories(file_of(tmp_path / "run")))
    assert [t.rollout_id for t in saved] == [f"r-{number}.{attempt}" for number in range(6) for attempt in range(2)]
    assert saved == result.trajectories


@pytest.mark.slow
@pytest.mark.parametrize("rest", [b"", b'{"rollout_id": "torn'])
async def test_what_had_finished_is_not_run_again_and_the_rest_is_named_as_it_would_have_been(tmp_path, rest):
    unbroken, _ = await roll(tmp_path / "run", attempts=2)
    torn(tmp_path / "run", 7, rest)
    resumed, asked = await roll(tmp_path / "run", attempts=2, resume=True)
    assert sum(asked.values()) == 5
    assert [t.rollout_id for t in resumed.trajectories] == [t.rollout_id for t in unbroken.trajectories]
    assert resumed.rewards == unbroken.rewards
    assert [t.rollout_id for t in load_trajectories(file_of(tmp_path / "run"))] == [
        t.rollout_id for t in unbroken.trajectories
    ]
    again, asked = await roll(tmp_path / "run", attempts=2, resume=True)
    assert not asked
    assert again.rewards == unbroken.rewards


async def test_a_resumed_run_may_have_more_tasks_and_attempts_and_another_order(tmp_path):
    await roll(tmp_path / "run", TASKS[:3], label="r")
    result, asked = await roll(tmp_path / "run", TASKS[::-1], attempts=2, resume=True)
    assert sum(asked.values()) == 9
    assert [(t.task.id, t.attempt) for t in result.trajectories] == [
        (f"t{number}", attempt) for number in reversed(range(6)) for attempt in range(2)
    ]
    saved = list(load_trajectories(file_of(tmp_path / "run")))
    assert saved == result.trajectories
    assert len({t.rollout_id for t in saved}) == 12


async def test_tasks_of_the_same_id_are_told_apart_by_their_order(tmp_path):
    same = [Task("twice", {"number": 1}, id="same")] * 2
    await roll(tmp_path / "run", same, label="r")
    path = file_of(tmp_path / "run")
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[1])  # the second had finished, the first had not
    _, asked = await roll(tmp_path / "run", same, resume=True)
    assert asked == {"r-0.0": 1}


async def test_what_infrastructure_had_spoiled_is_run_again(tmp_path):
    broken = [f"r-{number}.0" for number in range(5)]
    with pytest.raises(FailureBudgetExceeded):
        await roll(tmp_path / "run", policy=Policy(broken), label="r")
    result, asked = await roll(tmp_path / "run", resume=True)
    assert set(asked) >= set(broken)
    assert not any(t.infrastructure_failed for t in result.trajectories)
    saved = list(load_trajectories(file_of(tmp_path / "run")))
    assert [t.rollout_id for t in saved] == [f"r-{number}.0" for number in range(6)]
    assert not any(t.failure for t in saved)


@tool
def look() -> str:
    """Look around."""
    return "a door"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"agent": Agent(model="scripted", system_prompt="Be long.")}, "the agent's system message has changed"),
        ({"agent": Agent(model="other", system_prompt="Be brief.")}, "the model was 'scripted' and is now 'other'"),
        (
            {"agent": Agent(model="scripted", system_prompt="Be brief.", max_turns=3)},
            "the agent's max_turns was 10 and is now 3",
        ),
        (
            {"sampling": lambda params: replace(params, temperature=0.5)},
            "the sampling's temperature was 1.0 and is now 0.5",
        ),
        ({"strategy": "step"}, "the strategy was 'chain' and is now 'step'"),
        ({"agent": Agent(model="scripted", system_prompt="Be brief.", tools=[look])}, "the agent's tool look is new"),
    ],
)
async def test_rollouts_under_other_settings_are_never_mixed_with_those_that_are_there(tmp_path, change, said):
    await roll(tmp_path / "run")
    before = file_of(tmp_path / "run").read_bytes()
    with pytest.raises(ConfigError, match=said):
        await roll(tmp_path / "run", resume=True, **change)
    assert file_of(tmp_path / "run").read_bytes() == before
    _, asked = await roll(tmp_path / "run", resume=True)
    assert not asked


async def test_a_task_that_is_another_under_the_same_id_is_refused(tmp_path):
    await roll(tmp_path / "run")
    changed = [replace(TASKS[0], prompt="something else"), *TASKS[1:]]
    with pytest.raises(ConfigError, match="the task 't0' has changed"):
        await roll(tmp_path / "run", changed, resume=True)


async def test_what_is_there_is_not_written_over_and_is_not_gone_on_with_by_chance(tmp_path):
    await roll(tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds rollouts"):
        await roll(tmp_path / "run")
    file_of(tmp_path / "run").with_suffix(".settings.json").unlink()
    with pytest.raises(ConfigError, match="settings of its rollouts are not known"):
        await roll(tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match="resume=True needs run_dir"):
        await roll(None, resume=True)


async def test_a_line_that_is_no_trajectory_is_refused_with_its_number(tmp_path):
    await roll(tmp_path / "run")
    torn(tmp_path / "run", 2, b"{}\n")
    with pytest.raises(ConfigError, match="line 3 is not a rollout"):
        await roll(tmp_path / "run", resume=True)


async def test_a_run_that_has_recorded_nothing_leaves_no_directory(tmp_path):
    asked = asyncio.Event()

    class Silent(Policy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            asked.set()
            await asyncio.sleep(1000)

    running = asyncio.create_task(roll(tmp_path / "run", policy=Silent()))
    await asked.wait()
    assert file_of(tmp_path / "run").exists()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not (tmp_path / "run").exists()
    result, _ = await roll(tmp_path / "run", resume=True)  # begins, there being nothing to go on with
    assert len(result.trajectories) == 6


async def test_evaluations_are_recorded_beside_the_rollouts_of_the_same_directory(tmp_path):
    await roll(tmp_path / "run", label="r")
    agent = Agent(model="scripted")
    for _ in range(2):
        await evaluate(
            agent, TASKS, reward=number_of, policy=Policy(), run_dir=tmp_path / "run", step=7, resume=True, attempts=2
        )
    run_directory = RunDirectory(tmp_path / "run")
    assert [step for step, _ in run_directory.trajectory_files("rollout")] == [0]
    assert len(list(load_trajectories(run_directory.trajectories_file(7, "eval")))) == 12


async def test_groups_that_were_scored_are_not_scored_again_and_those_that_were_not_are_once_they_are_whole(tmp_path):
    scored = []

    @group_reward
    def ranked(responses: list[str], number: int) -> list[float]:
        scored.append(number)
        return [float(rank) for rank in range(len(responses))]

    async def rank(**settings):
        policy = Policy()
        result = await run(
            Agent(model="scripted"),
            TASKS[:3],
            reward=ranked,
            attempts=3,
            policy=policy,
            run_dir=tmp_path / "run",
            label="r",
            **settings,
        )
        return result.rewards, set(policy.asked)

    rewards, _ = await rank()
    assert rewards == [0.0, 1.0, 2.0] * 3
    assert sorted(scored) == [0, 1, 2]
    lines = file_of(tmp_path / "run").read_bytes().splitlines(keepends=True)
    assert len(lines) == 9
    unscored = [json.dumps({**json.loads(line), "scored": False, "reward": None}).encode() + b"\n" for line in lines]
    file_of(tmp_path / "run").write_bytes(b"".join([*lines[:3], *unscored[3:5], *unscored[6:]]))
    scored.clear()
    assert await rank(resume=True) == (rewards, {"r-1.2"})
    assert sorted(scored) == [1, 2]
    assert await rank(resume=True) == (rewards, set())
    assert len(scored) == 2


PROGRAM = """
import asyncio, sys
import agentfly as af
from agentfly.policies.scripted import ScriptedPolicy

@af.reward
def length(response: str) -> float:
    with open("ran.txt", "a") as file:
        file.write("one more\\n")
    return float(len(response))

def seconds(rollout_id, turn):
    return 0.002 * (hash(rollout_id) % 7)

async def main():
    agent = af.Agent(model="scripted")
    policy = ScriptedPolicy(lambda prompt, turn: prompt[-60:] * 60, seconds=seconds)
    tasks = [f"task {number}" for number in range(150)]
    result = await af.run(agent, tasks, reward=length, attempts=2, policy=policy, run_dir="run", resume=True,
                          max_concurrent_rollouts=4)
    print(len(result.trajectories), sum(result.rewards))

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_an_unbroken_one(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    environment = {**os.environ, "AGENTFLY_STATE_DIR": str(tmp_path / "state")}

    def start(directory):
        directory.mkdir(exist_ok=True)
        return subprocess.Popen(
            [sys.executable, program], cwd=directory, env=environment, stdout=subprocess.PIPE, text=True
        )

    def lines(directory, name):
        path = Path(directory, name)
        return path.read_bytes().count(b"\n") if path.exists() else 0

    unbroken = start(tmp_path / "unbroken").communicate(timeout=100)[0]
    broken = tmp_path / "broken"
    record = Path("run", "trajectories", "rollout-000000.jsonl")
    for kill_at in (1, 40, 41, 150):
        process = start(broken)
        while lines(broken, record) < kill_at and process.poll() is None:
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert start(broken).communicate(timeout=100)[0] == unbroken
    saved = [json.loads(line) for line in (broken / record).read_text().splitlines()]
    assert len({(one["task"]["id"], one["attempt"]) for one in saved}) == len(saved) == 300
    assert lines(broken, "ran.txt") < 300 + 4 * 30  # run again is only what had been scored and was not yet written


@pytest.mark.parametrize(
    "damage",
    [b"[1]\n", b"5\n", b"\n", b"\xff\xfe\n", b"\0" * 50 + b"\n", b"[" * 100_000 + b"\n"],
    ids=["list", "number", "blank", "bytes", "zeros", "deep"],
)
async def test_a_damaged_line_is_named_wherever_the_file_is_read_and_nothing_is_lost(tmp_path, damage):
    await roll(tmp_path / "run")
    path = file_of(tmp_path / "run")
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = b"".join([*lines[:2], damage, *lines[2:]])
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match="line 3"):
        await roll(tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match="line 3"):
        list(load_trajectories(path))
    assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    "change",
    [{"group_id": "foreign"}, {"group_id": 5}, {"attempt": "0"}, {"reward": "1"}, {"metrics": None}, {"task": None}],
    ids=str,
)
async def test_a_line_of_another_kind_of_rollout_is_named(tmp_path, change):
    await roll(tmp_path / "run")
    path = file_of(tmp_path / "run")
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | change), *rest]) + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        await roll(tmp_path / "run", resume=True)


@pytest.mark.parametrize("damage", ["", '{"about": {"lab', "[]", '{"settings": {}}', '{"about": null, "settings": {}}'])
async def test_damaged_settings_are_said_to_be_so(tmp_path, damage):
    await roll(tmp_path / "run")
    file_of(tmp_path / "run").with_suffix(".settings.json").write_text(damage)
    with pytest.raises(ConfigError, match="damaged"):
        await roll(tmp_path / "run", resume=True)


async def test_two_at_a_time_do_not_record_in_the_same_file(tmp_path):
    await roll(tmp_path / "run", TASKS[:2])
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Waiting(Policy):
        async def generate(self, *args, **settings):
            begun.set()
            await go_on.wait()
            return await super().generate(*args, **settings)

    first = asyncio.ensure_future(roll(tmp_path / "run", TASKS[:4], policy=Waiting(), resume=True))
    await asyncio.wait_for(begun.wait(), 20)
    with pytest.raises(ConfigError, match="Another process"):
        await roll(tmp_path / "run", resume=True)
    go_on.set()
    await first
    assert len(list(load_trajectories(file_of(tmp_path / "run")))) == 4
    await roll(tmp_path / "run", resume=True)
    assert len(list(load_trajectories(file_of(tmp_path / "run")))) == 6


@pytest.mark.parametrize("failing", [False, True], ids=["put in order", "emptied"])
async def test_another_process_gets_the_file_only_once_it_is_in_its_final_place(tmp_path, monkeypatch, failing):
    """Else what it adds would go to a file that is replaced or removed under its hands."""
    path, gone = tmp_path / "rollouts.jsonl", []

    class Watched:
        """The file, of which the lock goes when it is closed."""

        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def close(self):
            inode = os.fstat(self._file.fileno()).st_ino
            gone.append(not path.exists() or path.stat().st_ino != inode)
            self._file.close()

    monkeypatch.setattr("agentfly.rollouts.rollout_record.open_locked", lambda path: Watched(open_locked(path)))
    record = RolloutRecord(path)
    async with record.opened({}, {}):
        for number in (1, 0):
            group = AttemptGroup(f"run-{number}", TASKS[number], 1, 0)
            trajectory = Trajectory(
                f"run-{number}.0", f"run-{number}", TASKS[number], finish_reason=FinishReason.ANSWERED
            )
            if not failing:
                await record.append(group, [trajectory], scored=True)
    assert gone == [True]


async def test_a_run_that_was_stopped_leaves_each_rollout_once(tmp_path):
    first_is_scored = asyncio.Event()

    @group_reward
    async def judged(trajectories, number: int) -> list[float]:
        if number:
            await asyncio.sleep(60)
        return [1.0] * len(trajectories)

    def look(event):
        if isinstance(event, RewardFinished):
            first_is_scored.set()

    events = EventStream()
    settings = {"reward": judged, "attempts": 2, "policy": Policy(), "run_dir": tmp_path / "run", "events": events}
    running = asyncio.ensure_future(run(Agent(model="scripted"), TASKS[:2], **settings))
    path = file_of(tmp_path / "run")
    with events.subscribed(look):
        await asyncio.wait_for(first_is_scored.wait(), 20)
        await asyncio.sleep(0.5)  # in which the two get their second line
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    saved = list(load_trajectories(path))
    assert len(saved) == len({one.rollout_id for one in saved}) == 4
    assert [one.reward for one in saved[:2]] == [1.0, 1.0]


async def test_a_disk_that_becomes_full_is_told_and_leaves_whole_lines_to_go_on_from(tmp_path):
    await roll(tmp_path / "whole", label="r")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_of(tmp_path / "whole").stat().st_size // 2, hard))
    try:
        with pytest.raises(PrerequisiteError, match=r"cannot be recorded in .*rollout-000000\.jsonl: .*--resume"):
            await roll(tmp_path / "full", label="r", max_concurrent_rollouts=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept = [one.rollout_id for one in load_trajectories(file_of(tmp_path / "full"))]
    assert file_of(tmp_path / "full").read_bytes().endswith(b"\n")
    result, asked = await roll(tmp_path / "full", resume=True)
    assert 0 < len(kept) < len(result.trajectories) == len(TASKS)
    assert not asked.keys() & set(kept)


@pytest.mark.parametrize("change", [lambda run: run.rename(run.with_name("moved")), shutil.rmtree])
async def test_a_run_whose_directory_is_moved_or_removed_stops_and_says_so(tmp_path, change):
    async def moving(prompt, turn):
        if "task 2" in prompt:
            while not file_of(tmp_path / "run").stat().st_size:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            change(tmp_path / "run")
        return "fine"

    with pytest.raises(PrerequisiteError, match=r"was moved or removed while rollouts were recorded in it.*--resume"):
        await roll(tmp_path / "run", policy=ScriptedOnly(moving), max_concurrent_rollouts=1)
    if (tmp_path / "moved").exists():
        assert 1 <= len(list(load_trajectories(file_of(tmp_path / "moved")))) <= 2


class ScriptedOnly(ScriptedPolicy):
    asked = ()


@pytest.mark.parametrize("way", ["directory", "link", "file", "name"])
async def test_a_place_that_no_record_can_be_made_at_is_told_before_anything_runs(tmp_path, way):
    run_dir = tmp_path / "run"
    if way == "directory":
        file_of(run_dir).mkdir(parents=True)
    elif way == "link":
        file_of(run_dir).parent.mkdir(parents=True)
        file_of(run_dir).symlink_to(tmp_path / "nowhere" / "file")
    elif way == "file":
        run_dir.write_text("")
        run_dir /= "below"
    else:
        run_dir /= "x" * 300
    policy = Policy()
    with pytest.raises((PrerequisiteError, ConfigError), match=r"[Cc]hoose"):
        await roll(run_dir, policy=policy)
    assert not policy.asked


@pytest.mark.parametrize("resume", [False, True])
async def test_a_run_that_was_killed_before_its_settings_were_saved_begins_again(tmp_path, resume):
    file_of(tmp_path).parent.mkdir(parents=True)
    file_of(tmp_path).touch()  # as after a kill between the two files
    result, _ = await roll(tmp_path, resume=resume)
    assert None not in result.rewards
    assert len(list(load_trajectories(file_of(tmp_path)))) == len(result.trajectories)
