"""The journal: finished work is found again, however its process ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import group_reward
from agentfly.agents.reward import reward
from agentfly.core.errors import ConfigError, ResourceStartError
from agentfly.core.task import Task
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.runner import Runner
from agentfly.training.curriculum import TaskOrder
from agentfly.training.journal import Journal
from agentfly.training.rollout_queue import RolloutQueue

TASKS = [Task(f"task {number}", {"number": number}, id=f"t{number}") for number in range(6)]


@reward
async def number_of(number: int) -> float:
    return number


class Policy(ScriptedPolicy):
    """Counts the calls of each rollout. Rollouts in ``broken`` fail, and rollouts in ``stuck`` do not end."""

    def __init__(self, broken: Collection[str] = (), stuck: Collection[str] = ()) -> None:
        super().__init__(["fine"])
        self.asked: Counter[str] = Counter()
        self.broken = broken
        self.stuck = stuck

    async def generate(self, prompt_ids: Any, sampling: Any, *, rollout_id: str, images: Any = ()) -> Any:
        self.asked[rollout_id] += 1
        if rollout_id in self.broken:
            raise ResourceStartError("no disk space")
        if rollout_id in self.stuck:
            await asyncio.sleep(1000)
        return await super().generate(prompt_ids, sampling, rollout_id=rollout_id, images=images)


async def fed(
    path: Path,
    policy: Policy,
    take: Collection[int],
    *,
    tasks: list[Task] = TASKS,
    score: Any = number_of,
    **settings: Any,
) -> list[list[float | None]]:
    """Begin groups 2 to 5, take some, and leave: the rewards of those that were taken."""
    journal = Journal(path / "journal")
    agent = Agent(model="scripted")
    async with journal.opened(), policy, Runner(agent, policy=policy, reward=score) as runner:
        feed = RolloutQueue(runner, TaskOrder(tasks, 0), journal, attempts=2, temperature=1.0, first=2, **settings)
        async with feed:
            feed.allow_until(6)
            return [[one.reward for one in (await feed.take(number)).trajectories] for number in take]


async def test_groups_come_in_the_order_of_the_tasks_whichever_end_first(tmp_path: Path) -> None:
    order = TaskOrder(TASKS, 0).take(2, 4)
    rewards = await fed(tmp_path, Policy(), [2, 3, 4, 5])
    assert rewards == [[task["number"]] * 2 for task in order]


async def test_finished_rollouts_are_not_run_again_and_unfinished_ones_are(tmp_path: Path) -> None:
    first = Policy(stuck={"train-4.1", "train-5.0"})
    await fed(tmp_path, first, [2, 3])
    second = Policy()
    await fed(tmp_path, second, [2, 3, 4, 5])
    assert set(second.asked) == {"train-4.1", "train-5.0"}


async def test_infrastructure_failures_are_run_again(tmp_path: Path) -> None:
    await fed(tmp_path, Policy(broken={"train-3.1"}), [2, 3, 4, 5])
    again = Policy()
    assert (await fed(tmp_path, again, [3]))[0][1] is not None
    assert set(again.asked) == {"train-3.1"}
    third = Policy()
    await fed(tmp_path, third, [2, 3, 4, 5])
    assert not third.asked


async def test_a_line_truncated_by_a_crash_is_ignored(tmp_path: Path) -> None:
    await fed(tmp_path, Policy(), [2, 3, 4, 5])
    file = tmp_path / "journal" / "train-3.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1][:50])
    again = Policy()
    await fed(tmp_path, again, [2, 3, 4, 5])
    assert len(again.asked) == 1
    assert file.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("line", [b"{}\n", b"[]\n", b"\0\0\0\0\n", b"no rollout\n", b'{"attempt": 1\n'])
async def test_a_line_that_is_not_a_rollout_is_named_and_kept(tmp_path: Path, line: bytes) -> None:
    await fed(tmp_path, Policy(), [2, 3, 4, 5])
    file = tmp_path / "journal" / "train-3.jsonl"
    whole = file.read_bytes()
    file.write_bytes(line + whole)
    with pytest.raises(ConfigError, match=r"train-3\.jsonl, line 1 is not a stored rollout .* Remove that line"):
        await fed(tmp_path, Policy(), [2, 3])
    assert file.read_bytes() == line + whole
    file.write_bytes(whole)
    again = Policy()
    await fed(tmp_path, again, [2, 3, 4, 5])
    assert not again.asked


async def test_groups_that_were_not_scored_yet_are_scored_without_being_run_again(tmp_path: Path) -> None:
    calls = []

    @group_reward
    async def both(responses: list[str], number: int) -> list[float]:
        """The same for both."""
        calls.append(number)
        if len(calls) == 1:
            await asyncio.sleep(1000)
        return [float(number)] * 2

    feeding = asyncio.create_task(fed(tmp_path, Policy(), [2, 3, 4, 5], score=both))
    journal = tmp_path / "journal"
    while sum(file.read_bytes().count(b'"scored": true') for file in journal.glob("train-*.jsonl")) < 6:  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # until the three other groups are written
    feeding.cancel()
    await asyncio.wait([feeding])
    again = Policy()
    rewards = await fed(tmp_path, again, [2, 3, 4, 5], score=both)
    assert rewards == [[task["number"]] * 2 for task in TaskOrder(TASKS, 0).take(2, 4)]
    assert not again.asked
    assert len(calls) == 5


async def test_greedy_rollouts_are_kept_besides(tmp_path: Path) -> None:
    await fed(tmp_path, Policy(), [2, 3, 4, 5], greedy=True)
    assert {path.name for path in (tmp_path / "journal").glob("greedy-*")} == {f"greedy-{n}.jsonl" for n in range(2, 6)}
    again = Policy()
    await fed(tmp_path, again, [2, 3, 4, 5], greedy=True)
    assert not again.asked


async def test_a_task_that_has_changed_under_its_id_is_refused(tmp_path: Path) -> None:
    await fed(tmp_path, Policy(), [2])
    changed = [Task("another", task.fields, id=task.id) for task in TASKS]
    with pytest.raises(ConfigError, match="has changed"):
        await fed(tmp_path, Policy(), [2], tasks=changed)


async def test_one_process_at_a_time_trains_in_a_directory(tmp_path: Path) -> None:
    async with Journal(tmp_path / "journal").opened():
        with pytest.raises(ConfigError, match="Another process"):
            async with Journal(tmp_path / "journal").opened():
                pass
    assert not (tmp_path / "journal").exists()
