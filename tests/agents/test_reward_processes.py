"""Rewards in separate processes: they end on time and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentfly as af
from agentfly.agents.reward import Reward, reward
from agentfly.agents.reward_result import RewardResult
from agentfly.agents.weighted_reward import weighted
from agentfly.contexts.context import Context
from agentfly.core.errors import ResourceDied, RewardDefinitionError, RewardError, UsageError
from agentfly.core.task import Task
from agentfly.core.trajectory import Failure, Trajectory, Turn
from agentfly.resources.engine.engine import ResourceEngine


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ResourceEngine]:
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    async with ResourceEngine() as engine:
        yield engine
    await asyncio.sleep(0)


@pytest.fixture
def score(engine: ResourceEngine) -> Callable[..., Any]:
    """Score a rollout whose task has the given fields."""
    numbers = iter(range(1000))

    async def scored(one: Reward, response: str = "", **fields: Any) -> Any:
        turn = Turn(0, 0, 0, 1, response, ended_by_model=True)
        trajectory = Trajectory(f"rollout-{next(numbers)}", "group", Task("?", fields), turns=[turn])
        context = Context(trajectory, engine)
        try:
            return await one.score(trajectory, context)
        finally:
            await context.close()

    return scored


@reward(process=True, timeout_s=20, workers=1)
def misbehaving(how: str) -> Any:
    if how == "alarm":
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(1)
        return float(threading.current_thread() is threading.main_thread())
    if how == "raise":
        return int("many")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "unpicklable":
        return threading.Lock()
    if how == "own type":

        class Own(dict):
            """Travels by value only."""

        return Own(reward=0.5)
    return {"reward": os.getpid(), "metric": 1}


@reward(process=True, timeout_s=1, workers=2)
def slow_or_not(how: str) -> float:
    while how == "loop":
        pass
    return 1.0 if how == "good" else float(9**9**9**9)


@pytest.mark.slow
async def test_hangs_end_on_time_and_those_behind_them_are_scored(score: Callable[..., Any]) -> None:
    hangs = [score(slow_or_not, how=how) for how in ("loop", "power", "loop", "power", "loop")]
    good = [score(slow_or_not, how="good") for _ in range(10)]
    outcomes = await asyncio.gather(*hangs, *good, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [RewardError] * 5 + [RewardResult] * 10
    assert "'slow_or_not' gave no score within 1 s" in str(outcomes[0])
    assert not [thread for thread in threading.enumerate() if "slow_or_not" in thread.name]


@pytest.mark.slow
async def test_a_process_that_is_replaced_after_a_hang_is_told_in_the_words_of_the_reward(
    score: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RewardError, match="The reward 'slow_or_not' gave no score within 1 s"):
        await score(slow_or_not, how="loop")
    assert (await score(slow_or_not, how="good")).reward == 1.0
    assert "the reward 'slow_or_not' gave no score within 1 s" in caplog.text
    assert "call_timeout_s" not in caplog.text


@pytest.mark.slow
async def test_whatever_a_reward_does_in_its_process_the_next_score_is_sound(score: Callable[..., Any]) -> None:
    sound = await score(misbehaving, how="sound")
    assert sound.metrics == {"metric": 1.0}
    assert sound.reward != os.getpid()
    assert (await score(misbehaving, how="alarm")).reward == 1.0
    await asyncio.sleep(1.2)  # in which the alarm would end the process
    assert await score(misbehaving, how="sound") == sound, "the process serves again, its alarm taken back"

    assert (await score(misbehaving, how="own type")).reward == 0.5

    with pytest.raises(RewardError, match="'misbehaving' failed with ValueError: invalid literal") as raised:
        await score(misbehaving, how="raise")
    failure = Failure.of(raised.value)
    assert 'return int("many")' in failure.traceback
    assert failure.location.startswith(__file__)

    with pytest.raises(UsageError, match=r"the result.* is a _thread\.lock"):
        await score(misbehaving, how="unpicklable")
    with pytest.raises(ResourceDied, match=r"reward:misbehaving ended during score\(\): it was ended by SIGKILL"):
        await score(misbehaving, how="die")
    assert (await score(misbehaving, how="sound")).reward not in (sound.reward, os.getpid())


@reward(process=True, timeout_s=60, workers=1, env={"LEVEL": "3"})
def surroundings() -> RewardResult:
    keys = sum("KEY" in name for name in os.environ)
    return RewardResult(float(os.environ["LEVEL"]), {"keys": keys, "files": len(list(Path.cwd().iterdir()))})


async def test_a_process_of_a_reward_has_no_key_and_no_directory_of_this_one(
    score: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    result = await score(surroundings)
    assert (result.reward, result.metrics) == (3.0, {"keys": 0.0, "files": 0.0})


@pytest.mark.slow
async def test_a_reward_of_each_turn_runs_there_too_with_what_it_refers_to(score: Callable[..., Any]) -> None:
    bonus = 0.5

    @reward(process=True, timeout_s=20, per_turn=True)
    def rated(turn: Turn, trajectory: Trajectory) -> float:
        return bonus + len(turn.text) + len(trajectory.turns)

    assert (await score(rated, "four")).turn_rewards == [5.5]


@pytest.mark.slow
async def test_memory_that_a_reward_takes_without_end_ends_its_process(score: Callable[..., Any]) -> None:
    @reward(process=True, timeout_s=30, memory="300MiB")
    def greedy() -> float:
        return float(len([bytes(range(200)) * 100_000 for _ in range(1_000)]))

    with pytest.raises(ResourceDied, match="reward:greedy ran out of its limit of 300MiB"):
        await score(greedy)


async def test_what_keeps_a_reward_from_its_process_is_named_with_its_path(score: Callable[..., Any]) -> None:
    guard = {"lock": threading.Lock()}

    @reward(process=True, timeout_s=1, name="guarded")
    def guarded() -> float:
        with guard["lock"]:
            return 1.0

    with pytest.raises(UsageError, match=r"guarded, variable 'guard'\['lock'\] is a _thread.lock"):
        await score(guarded)


async def test_a_reward_that_cannot_travel_is_refused_before_anything_is_sampled() -> None:
    client = threading.Lock()

    @reward(process=True, timeout_s=1)
    def locked() -> float:
        return float(client.locked())

    sampled: list[int] = []
    policy = af.ScriptedPolicy(lambda prompt, turn: sampled.append(turn) or "hello")  # type: ignore[func-returns-value]
    with pytest.raises(af.AgentFlyError, match=r"locked, variable 'client' is a _thread\.lock"):
        await af.run(af.Agent(model="scripted"), ["go"], reward=weighted({locked: 1.0}), policy=policy)
    assert sampled == []


def plain() -> float:
    return 1.0


def asking(context: Context) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "settings", "cure"),
    [
        (plain, {"process": True}, "Add timeout_s"),
        (asking, {"process": True, "timeout_s": 1}, "asks for the context"),
        (plain, {"workers": 2}, "process=True is not set"),
        (plain, {"memory": "1GiB"}, "process=True is not set"),
        (plain, {"env": {"KEY": "1"}}, "process=True is not set"),
        (plain, {"process": True, "timeout_s": 1, "env": {"KEY": 1}}, "pair of texts"),
        (plain, {"process": True, "timeout_s": 1, "workers": 0}, "workers=0, memory=0: write a whole number"),
        (plain, {"process": True, "timeout_s": 1, "memory": "much"}, "memory='much': that is not a size"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(function: Any, settings: dict[str, Any], cure: str) -> None:
    with pytest.raises(RewardDefinitionError, match=cure):
        reward(**settings)(function)


PROGRAM = """
import asyncio, os
import agentfly as af

@af.reward(process=True, timeout_s=600, workers=1, env={"STARTED": os.path.abspath("started")})
def hanging() -> float:
    print(os.getpid(), file=open(os.environ["STARTED"], "w"), flush=True)
    while True:
        pass

asyncio.run(af.run(af.Agent(model="scripted"), ["go"], reward=hanging, policy=af.ScriptedPolicy(["done"])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_hanging_reward_when_its_program_ends(tmp_path: Path, sent: signal.Signals) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    program = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "AGENTFLY_STATE_DIR": str(tmp_path / "state")},
        stderr=subprocess.DEVNULL,
    )
    started = tmp_path / "started"
    _wait_until(lambda: started.exists() and started.read_text().strip() != "", 30)
    worker = psutil.Process(int(started.read_text()))
    program.send_signal(sent)
    program.wait(timeout=30)
    _wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 10)


def _wait_until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
