"""Likely mistakes in calls of everything public."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentfly as af
from agentfly.core.errors import Boundary
from agentfly.core.messages import PlacedImage
from agentfly.core.task import to_tasks
from agentfly.core.tokens import TokenSequence
from agentfly.core.trajectory import Failure, FinishReason, Trajectory, Turn
from agentfly.evaluation.scores import EvaluationComparison, EvaluationScores
from agentfly.policies.policy import Generation, SamplingParams
from agentfly.rollouts import run as runs
from agentfly.training.learning.batches import ModelScores
from agentfly.training.rows import rows_from_trajectories
from agentfly.training.trainer import TrainResult

AGENT = af.Agent(model="scripted")


def policy(text: str = "hi") -> af.ScriptedPolicy:
    return af.ScriptedPolicy([text])


@af.reward
def long_enough(response: str) -> float:
    return float(len(response) > 1)


def plain(response: str) -> float:
    return 1.0


def rolled_out(**settings: Any) -> Callable[[], Any]:
    return lambda: asyncio.run(af.run(AGENT, ["a"], **{"policy": policy(), **settings}))


def evaluated(**settings: Any) -> Callable[[], Any]:
    return lambda: asyncio.run(af.evaluate(AGENT, ["a"], **{"policy": policy(), **settings}))


def checked(**settings: Any) -> Callable[[], Any]:
    return lambda: asyncio.run(af.check(AGENT, ["a"], **settings))


def trained(*values: Any, **settings: Any) -> Callable[[], Any]:
    return lambda: af.train(*values or (AGENT, ["a"], long_enough), progress=False, **settings)


def rescored(*values: Any, **settings: Any) -> Callable[[], Any]:
    return lambda: asyncio.run(af.rescore(*values, **settings))


async def streamed(tasks: Any, **settings: Any) -> list[Trajectory]:
    async with af.Runner(AGENT, policy=policy()) as runner:
        return [trajectory async for trajectory in runner.stream(tasks, **settings)]


def made(name: str, *values: Any, **settings: Any) -> Callable[[], Any]:
    return lambda: getattr(af, name)(*values, **settings)


RESULT = runs.RunResult([Trajectory("r", "g", af.Task("a"))], {})
[TRAJECTORY] = RESULT.trajectories

MISTAKES: dict[str, list[tuple[Callable[[], Any], str]]] = {
    "Agent": [
        (made("Agent", "tiny"), r"write each field by its name"),
        (made("Agent", model=None), r"must be the name of a model"),
        (made("Agent", model=policy()), r"A policy is given to the run"),
        (made("Agent", model="m", chat_format=5), r"chat_format=5"),
        (made("Agent", model="m", temperature=-1), r"temperature=-1\): it must be a finite number of at least 0"),
        (made("Agent", model="m", temperature="1"), r"without quotes"),
        (made("Agent", model="m", max_turns=None), r"max_turns=None\): it must be a whole number of at least 1"),
        (made("Agent", model="m", max_turns=1.5), r"max_turns=1.5"),
        (made("Agent", model="m", top_p=math.nan), r"top_p=nan"),
    ],
    "ContainerSpec": [(made("ContainerSpec", "python"), "write each field by its name")],
    "EnvironmentSpec": [(made("EnvironmentSpec", factory="chess"), "'module:name'")],
    "Gateway": [
        (made("Gateway", "tiny"), "it needs a policy"),
        (made("Gateway", policy(), port="80"), r"port='80'"),
        (made("Gateway", policy(), limits=5), "GatewayLimits"),
        (made("Gateway", policy(), sampling=0.5), "RolloutSampling"),
        (made("Gateway", policy(), max_tokens="5"), "without quotes"),
        (made("Gateway", policy(), history="forget"), "'keep' or 'rewrite'"),
        (made("Gateway", policy(), on_finish=5), "on_finish=5"),
        (made("Gateway", policy(), key=5), "visible ASCII"),
        (made("Gateway", policy(), host=5), "host=5"),
    ],
    "GatewayLimits": [(made("GatewayLimits", max_calls="5"), "max_calls='5'")],
    "Image": [
        (made("Image", "cat.png"), r"Image\.of"),
        (made("Image", b"x", 5), "media_type=5"),
        (lambda: af.Image.from_url(5), "data URL"),  # type: ignore[arg-type]
    ],
    "MCPServerSpec": [(made("MCPServerSpec", command="npx x"), "one text a word")],
    "ModelAPISpec": [(made("ModelAPISpec", base_url="localhost", model="m"), "no address")],
    "ModelServerSpec": [(made("ModelServerSpec", "tiny"), "write each field by its name")],
    "OpenAIPolicy": [
        (made("OpenAIPolicy"), r"needs the base of an endpoint\. Write OpenAIPolicy\('http"),
        (made("OpenAIPolicy", model="m"), "needs the base of an endpoint"),
        (made("OpenAIPolicy", base_url=5), "not 5"),
        (made("OpenAIPolicy", "gpt-5", "m"), "no address"),
        (made("OpenAIPolicy", "http://localhost/v1", omit="seed"), "write a list"),
    ],
    "ResourceEngine": [
        (made("ResourceEngine", budget=5), "of the type Budget"),
        (made("ResourceEngine", events=print), "of the type EventStream"),
        (made("ResourceEngine", max_concurrent_starts="5"), "whole number"),
    ],
    "RolloutSampling": [(made("RolloutSampling", temperature=-1), "temperature=-1")],
    "Runner": [
        (made("Runner", "tiny"), "not an Agent"),
        (made("Runner", AGENT, engine=5), "must be a ResourceEngine"),
        (made("Runner", AGENT, events=print), "EventStream"),
        (made("Runner", AGENT, strategy=5), "no such strategy"),
        (made("Runner", AGENT, subagent_policies=[policy()]), "by the models of the subagents"),
        (made("Runner", AGENT, max_concurrent_rollouts="5"), "without quotes"),
        (made("Runner", AGENT, max_failure_rate=2), "a number from 0 to 1"),
        (lambda: asyncio.run(streamed(5)), "tasks is an int, which holds no tasks"),
        (lambda: asyncio.run(streamed([5])), "5 is no task"),
        (lambda: asyncio.run(streamed(iter([5]))), "5 is no task"),
        (lambda: asyncio.run(streamed("nowhere.jsonl")), r"nowhere\.jsonl"),
        (lambda: asyncio.run(streamed(["a"], atempts=2)), "Did you mean 'attempts'"),
        (lambda: asyncio.run(streamed(["a"], attempts="2")), r"attempts='2'\): it must be a whole number"),
    ],
    "ScriptedPolicy": [(made("ScriptedPolicy", ["a"], context_length="5"), "context_length='5'")],
    "SummaryFolding": [
        (made("SummaryFolding", after_turns=3, keep_turns=None), "keep_turns=None"),
        (made("SummaryFolding", after_turns=3, instruction=5), "it must be a text"),
        (made("SummaryFolding", after_turns=3, summarise=5), "it must be a function"),
    ],
    "Task": [
        (made("Task", "a", fields=5), "a mapping of names to values"),
        (made("Task", "a", fields=["b"]), "a mapping of names to values"),
        (made("Task", "a", id=[5]), "has the id"),
        (lambda: af.Task.from_row(5), "no row"),  # type: ignore[arg-type]
    ],
    "ToolResult": [(made("ToolResult", "a", reward="1"), "finite number")],
    "TrainConfig": [(made("TrainConfig", stps=5), "Did you mean 'steps'"), (made("TrainConfig", steps=0), "steps=0")],
    "VLLMPolicy": [
        (made("VLLMPolicy", "tiny"), r"Write VLLMPolicy\(af\.ModelServerSpec\(model='tiny'"),
        (made("VLLMPolicy", "http://localhost/v1"), r"Write VLLMPolicy\(urls="),
        (made("VLLMPolicy", 5), "takes a ModelServerSpec"),
        (made("VLLMPolicy", urls=5, model="tiny"), "urls=5"),
        (made("VLLMPolicy", af.ModelServerSpec(model="tiny"), servers="2"), "without quotes"),
    ],
    "Window": [(made("Window", "4"), r"Window\(turns='4'\)")],
    "check": [
        (lambda: asyncio.run(af.check("tiny", ["a"])), "not an Agent"),  # type: ignore[arg-type]
        (checked(reward=plain), "not a reward"),
        (checked(policy="tiny"), "a policy is an object"),
        (checked(polcy=policy()), "Did you mean 'policy'"),
        (checked(engine=5), "must be a ResourceEngine"),
        (checked(strategy="chian"), "no such strategy"),
        (checked(limit_s="5"), "limit_s='5'"),
    ],
    "evaluate": [
        (evaluated(temperature=-1), r"evaluate\(temperature=-1\)"),
        (evaluated(temperature="0"), "without quotes"),
        (evaluated(attempts="2"), r"evaluate\(attempts='2'\)"),
    ],
    "group_reward": [(made("group_reward", 5), "not a function")],
    "mcp_tools": [
        (made("mcp_tools", "server"), "takes the spec of a server"),
        (made("mcp_tools", af.MCPServerSpec(command=("x",)), only="a"), "a list of names"),
        (made("mcp_tools", af.MCPServerSpec(command=("x",)), timeout_s="5"), "without quotes"),
    ],
    "rescore": [
        (rescored(RESULT, long_enough), r"was given a RunResult\. Write result\.trajectories\."),
        (rescored("runs/1", long_enough), "load_trajectories"),
        (rescored(TRAJECTORY, long_enough), r"\[trajectory\]"),
        (rescored([TRAJECTORY], plain), "not a reward"),
        (rescored([5], long_enough), "an int is among"),
        (rescored([TRAJECTORY], long_enough, max_concurrent_scores=0), "max_concurrent_scores=0"),
    ],
    "reward": [(made("reward", 5), "not a function"), (lambda: af.reward(name=5)(plain), "name=5")],  # type: ignore[call-overload]
    "run": [
        (lambda: asyncio.run(af.run("tiny", ["a"])), "not an Agent"),  # type: ignore[arg-type]
        (lambda: asyncio.run(af.run(AGENT, None)), "holds no tasks"),
        (rolled_out(attempts="2"), r"run\(attempts='2'\): it must be a whole number of at least 1, without quotes"),
        (rolled_out(attempts=True), "attempts=True"),
        (rolled_out(priority="high"), "priority='high'"),
        (rolled_out(step=-1), "step=-1"),
        (rolled_out(kind="../x"), "'rollout'"),
        (rolled_out(label=5), "label=5"),
        (rolled_out(run_dir=5), "path of a directory"),
        (rolled_out(sampling={"temperature": 0}), "a function that changes"),
        (rolled_out(sampling=lambda params: 0.5), "not SamplingParams"),
        (rolled_out(sampling=lambda params: replace(params, temperature=-1)), "temperature=-1"),
        (rolled_out(engine="docker"), "must be a ResourceEngine"),
        (rolled_out(max_failure_rate=math.nan), "max_failure_rate=nan"),
    ],
    "tests_pass": [
        (lambda: asyncio.run(af.tests_pass(None, "box", paths=["a"], tests={}, names=["b"])), "write the container"),  # type: ignore[arg-type]
    ],
    "tool": [(made("tool", 5), "not a function"), (lambda: af.tool(name=5)(plain), "no name that a model can call")],  # type: ignore[call-overload]
    "train": [
        (trained("tiny", ["a"], long_enough), "not an Agent"),
        (trained(AGENT, 5, long_enough), "holds no tasks"),
        (trained(AGENT, ["a"], plain), "not a reward"),
        (trained(config={"steps": 1}), "TrainConfig"),
        (trained(engine=5), "must be a ResourceEngine"),
        (trained(events=print), "EventStream"),
        (trained(run_dir=5), "path of a directory"),
        (trained(curriculum=5), "not a Curriculum"),
        (trained(policy="tiny"), "a policy is an object"),
        (trained(subagent_policies=5), "by the models of the subagents"),
        (trained(temperature=-1), "temperature=-1"),
        (trained(attempts="many"), "attempts='many'"),
    ],
    "trajectory_text": [
        (made("trajectory_text", RESULT), r"was given a RunResult\. Write result\.trajectories\[0\]\."),
        (made("trajectory_text", [TRAJECTORY]), "was given a list"),
        (made("trajectory_text", TRAJECTORY, max_lines=0), "max_lines=0"),
    ],
    "weighted": [(made("weighted", [long_enough]), "rewards with their weights")],
}
"""By the public names: calls, and what is said of each."""

NOT_CALLED = {
    "AgentFlyError": "an exception",
    "Context": "made for tools",
    "FromTask": "takes nothing",
    "FullHistory": "takes nothing",
    "Past": "made for memories",
    "RewardResult": "read, with a message of its own, where a reward returns it",
    "RunResult": "made by runs",
    "ToolError": "an exception",
    "Trajectory": "made by rollouts",
    "train_async": "as train",
}


@pytest.fixture(autouse=True)
def _own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_likely_mistake_in_a_public_call_is_told_with_its_cure(name):
    for call, told in MISTAKES[name]:
        with pytest.raises(af.AgentFlyError, match=told):
            call()


def test_every_public_callable_is_called_by_mistake():
    public = {name for name in af.__all__ if callable(getattr(af, name))}
    assert public == MISTAKES.keys() | NOT_CALLED.keys()


@pytest.mark.parametrize(
    "given",
    [["a", "b"], [{"prompt": "a"}, "b"], iter([{"prompt": "a"}, af.Task("b")]), ({"prompt": one} for one in "ab")],
)
async def test_a_stream_takes_whatever_a_run_takes_for_tasks(given):
    assert sorted(trajectory.task.prompt for trajectory in await streamed(given)) == ["a", "b"]  # type: ignore[type-var]


async def test_one_task_or_a_file_of_tasks_is_taken_for_tasks(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a"}\n')
    for given in ({"prompt": "a"}, af.Task("a"), tmp_path / "tasks.jsonl", str(tmp_path / "tasks.jsonl")):
        assert [trajectory.task.prompt for trajectory in await streamed(given)] == ["a"]
        assert [task.prompt for task in to_tasks(given)] == ["a"]


# --- what is not scored -----------------------------------------------------------------------------------------------


async def test_a_run_that_scores_nothing_says_so_once_and_in_its_result(caplog):
    runs._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="agentfly"):
        results = [await af.run(AGENT, ["a"], policy=policy()) for _ in range(3)]
        scored = await af.evaluate(AGENT, ["a"], policy=policy(), reward=long_enough)
    assert [record.message for record in caplog.records if "Pass reward=" in record.message] == caplog.messages
    assert len(caplog.messages) == 1
    assert all("no reward was given" in repr(result) for result in results)
    assert scored.note == ""
    assert scored.rewards == [1.0]


async def test_tools_that_give_rewards_need_no_other():
    @af.tool
    def act() -> af.ToolResult:
        """Act."""
        return af.ToolResult("done", reward=0.5, done=True)

    agent = af.Agent(model="scripted", tools=[act])
    called = policy('<tool_call>\n{"name": "act", "arguments": {}}\n</tool_call>')
    result = await af.run(agent, ["a"], policy=called)
    assert (result.rewards, result.note) == ([0.5], "")


# --- what results look like -------------------------------------------------------------------------------------------


def large_trajectory() -> Trajectory:
    sequence = TokenSequence()
    sequence.append_prompt(range(5_000), [PlacedImage(af.Image(b"x" * 5_000), 1, 20)])
    sequence.append_sampled([7] * 5_000, [-0.5] * 5_000, 3)
    task = af.Task("long " * 5_000, {f"field {number}": "x" * 5_000 for number in range(50)})
    failure = Failure(Boundary.TOOL, "ToolCrashed", "m" * 5_000, True, "t" * 5_000)
    turns = [Turn(index, 0, 5_000, 10_000, "y" * 5_000, True) for index in range(1)]
    messages: list[Any] = [{"role": "user", "content": "z" * 5_000}] * 50
    return Trajectory("r", "g", task, 0, messages, turns, [sequence], {}, FinishReason.ANSWERED, failure, 0.25)


def test_whatever_a_result_holds_it_is_shown_in_a_few_lines():
    trajectory = large_trajectory()
    many = [replace(trajectory, attempt=number) for number in range(200)]
    batch = rows_from_trajectories(many)
    board = EvaluationScores.from_trajectories(many)
    steps = {
        step: {f"metric/{number}": 1.0 for number in range(100)} | {"reward/mean": step / 10} for step in range(50)
    }
    trained = TrainResult(
        Path("runs/1"), 50, steps, steps, Path("runs/1/checkpoints/step-000050"), None, "it was enough"
    )
    generation = Generation([5] * 5_000, [-0.5] * 5_000, "stop", 0)
    rows = list(batch.rows)
    shown = [
        trained,
        runs.RunResult(many, steps[0]),
        trajectory,
        trajectory.task,
        trajectory.turns,
        trajectory.sequences,
    ]
    shown += [
        batch,
        rows[0],
        board,
        EvaluationComparison.from_trajectories(many, many),
        generation,
        ModelScores([row.logprobs for row in rows]),  # type: ignore[misc]
    ]
    for one in shown:
        assert len(repr(one)) < 1_500, type(one)
        assert type(one).__name__ in repr(one) or isinstance(one, list)
    assert "reward/mean 0 → 4.9" in repr(trained)
    assert "reward=0.25" in repr(trajectory)


@pytest.mark.parametrize(
    "numbers",
    [
        {"temperature": -1},
        {"temperature": math.inf},
        {"temperature": "1"},
        {"top_p": 0},
        {"top_k": -1},
        {"top_k": 1.5},
        {"max_tokens": 0},
        {"seed": 0.5},
        {"priority": "1"},
    ],
)
def test_sampling_out_of_range_is_refused_where_it_is_written(numbers):
    with pytest.raises(af.AgentFlyError, match=next(iter(numbers))):
        SamplingParams(**numbers)
