"""The rollout loop: turns, limits, finish reasons, and failures that end one rollout only."""

import asyncio
import json

import numpy as np
import pytest
import torch

from agentfly.agents.agent import Agent
from agentfly.agents.memory import SummaryFolding
from agentfly.agents.reward import reward
from agentfly.agents.reward_result import RewardResult
from agentfly.agents.tool_decorator import tool
from agentfly.agents.tool_result import ToolResult
from agentfly.contexts.context import Context
from agentfly.core.errors import Boundary, ResourceStartError, ToolError
from agentfly.core.task import Task
from agentfly.core.tokens import Origin
from agentfly.core.trajectory import FinishReason, Trajectory
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.policy import Generation
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.run import run
from agentfly.training.rows import rows_from_trajectories

END = 257


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


@tool
def fail(how: str) -> str:
    """Fail in a given way.

    Args:
        how: which error.
    """
    if how == "tool":
        raise ToolError("the shelf is out of reach")
    if how == "infrastructure":
        raise ResourceStartError("no disk space")
    raise ZeroDivisionError("division by zero")


@tool
async def finish() -> ToolResult:
    """Say that the task is done."""
    return ToolResult("bye", reward=0.25, done=True)


def call(name, **arguments):
    return HermesFormat().write(name, arguments)


def agent(**settings):
    return Agent(model="scripted", tools=[add, fail, finish], **settings)


async def play(script, prompt="go", *, reward=None, settings=None, **runner):
    """The trajectory of one scripted rollout."""
    policy = ScriptedPolicy(script, limited=True)
    result = await run(agent(**(settings or {})), [prompt], reward=reward, policy=policy, **runner)
    [trajectory] = result.trajectories
    return trajectory


async def test_a_tool_answers_and_the_next_turn_continues_the_same_ids():
    trajectory = await play([call("add", a=2, b=3), "It is 5."])
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert trajectory.response == "It is 5."
    assert [m["role"] for m in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert trajectory.turns[0].tool_results[0].observation == "5"
    [sequence] = trajectory.sequences
    assert [span.origin for span in sequence.spans] == [
        Origin.PROMPT,
        Origin.SAMPLED,
        Origin.OBSERVATION,
        Origin.SAMPLED,
    ]
    for turn in trajectory.turns:
        ids = sequence.ids[turn.start : turn.stop]
        assert ids[-1] == END
        assert bytes(ids.tolist()[:-1]).decode() == turn.text


async def test_every_prompt_sent_starts_with_the_last_one_and_what_was_sampled_after_it():
    class Recording(ScriptedPolicy):
        sent = []

        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            generation = await super().generate(prompt_ids, sampling, rollout_id=rollout_id)
            self.sent.append((list(prompt_ids), list(generation.ids)))
            return generation

    policy = Recording([call("add", a=1, b=1), call("add", a=2, b=2), "done"])
    await run(agent(), ["go"], policy=policy)
    assert len(policy.sent) == 3
    for (prompt, sampled), (following, _) in zip(policy.sent, policy.sent[1:], strict=False):
        assert following[: len(prompt) + len(sampled)] == prompt + sampled


async def test_parallel_calls_run_at_the_same_time_and_answer_in_order():
    meeting = asyncio.Barrier(3)

    @tool
    async def meet(who: str) -> str:
        """Wait for the other calls of this turn.

        Args:
            who: who is waiting.
        """
        await meeting.wait()
        return who

    script = ["".join(call("meet", who=who) for who in "abc"), "done"]
    result = await run(Agent(model="scripted", tools=[meet]), ["go"], policy=ScriptedPolicy(script))
    records = result.trajectories[0].turns[0].tool_results
    assert [record.observation for record in records] == ["a", "b", "c"]
    assert len({record.call.id for record in records}) == 3


async def test_an_unknown_tool_becomes_an_observation_that_lists_the_tools():
    trajectory = await play([call("solve"), call("add", a=1, b=2), "3"])
    observation = trajectory.turns[0].tool_results[0].observation
    assert "solve" in observation
    assert "add" in observation
    assert trajectory.finish_reason is FinishReason.ANSWERED


async def test_too_many_invalid_calls_in_a_row_end_the_rollout_and_the_reward_can_see_it():
    @reward
    def seen(trajectory) -> float:
        return float(trajectory.finish_reason is FinishReason.INVALID_CALLS)

    trajectory = await play(
        [call("solve")] * 6, reward=seen, settings={"max_consecutive_invalid_calls": 4, "max_turns": 10}
    )
    assert len(trajectory.turns) == 4
    assert trajectory.reward == 1.0


async def test_too_many_invalid_calls_in_a_row_count_also_where_a_valid_one_follows_in_their_turn():
    script = [call("solve") + call("add", a=1) + call("add", a=1, b=2), "end"]
    trajectory = await play(script, settings={"max_consecutive_invalid_calls": 2})
    assert trajectory.finish_reason is FinishReason.INVALID_CALLS
    assert [record.observation for record in trajectory.turns[0].tool_results][-1] == "3"


async def test_a_valid_call_starts_the_count_of_invalid_ones_anew():
    script = [call("solve"), call("add", a=1, b=2), call("solve"), "end"]
    trajectory = await play(script, settings={"max_consecutive_invalid_calls": 2})
    assert trajectory.finish_reason is FinishReason.ANSWERED


@pytest.mark.parametrize(("how", "said"), [("tool", "out of reach"), ("code", "ZeroDivisionError")])
async def test_an_error_in_a_tool_becomes_its_observation_and_the_rollout_goes_on(how, said):
    trajectory = await play([call("fail", how=how), "sorry"])
    record = trajectory.turns[0].tool_results[0]
    assert said in record.observation
    assert record.failure.by_policy
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert not trajectory.infrastructure_failed


async def test_infrastructure_failing_in_a_tool_ends_the_rollout_unscored():
    @reward
    def generous() -> float:
        return 1.0

    sound = call("add", a=1, b=1)
    script = lambda prompt, turn: call("fail", how="infrastructure") if "broken" in prompt else [sound, "2"][turn]  # noqa: E731
    result = await run(agent(), ["broken", "sound"], reward=generous, policy=ScriptedPolicy(script))
    broken, fine = result.trajectories
    assert broken.finish_reason is FinishReason.FAILED
    assert broken.failure.boundary is Boundary.RESOURCE
    assert "no disk space" in broken.failure.traceback
    assert broken.reward is None
    assert not broken.trainable
    assert fine.reward == 1.0
    assert result.metrics["reward/mean"] == 1.0
    assert result.metrics["failures/infrastructure"] == 1.0


async def test_a_call_cut_by_the_token_limit_is_not_executed():
    ran = []

    @tool
    def write(text: str) -> str:
        """Write a text.

        Args:
            text: the text.
        """
        ran.append(text)
        return "written"

    full = call("write", text="# Title")
    for max_tokens in (len(full) - 15, len(full)):
        cut = Agent(model="scripted", tools=[write], max_tokens_per_turn=max_tokens)
        result = await run(cut, ["go"], policy=ScriptedPolicy([full], limited=True))
        assert result.trajectories[0].finish_reason is FinishReason.LENGTH
        assert not result.trajectories[0].turns[0].ended_by_model
    assert ran == []


async def test_a_tool_that_says_done_ends_the_rollout_and_its_reward_is_the_score_without_another():
    trajectory = await play([call("finish")])
    assert trajectory.finish_reason is FinishReason.DONE
    assert trajectory.reward == 0.25


@pytest.mark.parametrize(
    ("settings", "reason", "turns"),
    [({"max_turns": 2}, FinishReason.MAX_TURNS, 2), ({"max_tool_calls": 3}, FinishReason.MAX_TOOL_CALLS, 4)],
)
async def test_limits_on_turns_and_calls_end_the_rollout(settings, reason, turns):
    trajectory = await play([call("add", a=1, b=1)] * 9, settings=settings)
    assert trajectory.finish_reason is reason
    assert len(trajectory.turns) == turns


async def test_the_last_call_that_is_allowed_can_still_be_answered_in_words():
    trajectory = await play([call("add", a=1, b=1), "It is 2."], settings={"max_tool_calls": 1})
    assert (trajectory.finish_reason, trajectory.response) == (FinishReason.ANSWERED, "It is 2.")


async def test_a_finished_rollout_ends_with_what_was_sampled():
    trajectory = await play([call("finish")])
    [sequence] = trajectory.sequences
    assert sequence.origins[-1] == Origin.SAMPLED
    assert not sequence.truncated


async def test_calls_beyond_the_limit_of_one_turn_are_answered_but_not_executed():
    trajectory = await play([call("add", a=1, b=1) * 3], settings={"max_tool_calls": 2})
    assert [r.observation for r in trajectory.turns[0].tool_results[:2]] == ["2", "2"]
    assert "not executed" in trajectory.turns[0].tool_results[2].observation


async def test_a_policy_that_would_end_the_process_fails_the_rollout_that_asked_it():
    def script(prompt, turn):
        if "leave" in prompt:
            raise SystemExit(3)
        return "done"

    result = await run(
        Agent(model="scripted"), ["stay", "leave", "stay"], policy=ScriptedPolicy(script), max_failure_rate=1.0
    )
    assert [one.finish_reason for one in result.trajectories] == ["answered", "failed", "answered"]
    assert result.trajectories[1].failure.kind == "SystemExit"


async def test_a_tool_that_takes_no_notice_of_the_end_of_time_does_not_prolong_the_rollout():
    @tool
    async def stubborn() -> str:  # type: ignore[return]
        """Sleep, whatever comes."""
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return "awake"

    agent = Agent(model="scripted", tools=[stubborn], max_wall_seconds=0.05)
    policy = ScriptedPolicy([call("stubborn"), call("stubborn"), "done"])
    result = await run(agent, ["go"], policy=policy)
    (trajectory,) = result.trajectories
    assert trajectory.finish_reason is FinishReason.WALL_TIME
    assert [record.observation for record in trajectory.turns[-1].tool_results] == ["awake"]
    assert len(trajectory.turns) == 1


async def test_a_rollout_that_takes_too_long_ends_for_wall_time_and_is_scored():
    @tool
    async def sleep() -> str:
        """Sleep for a long time."""
        await asyncio.sleep(60)
        return "late"

    @reward
    def constant() -> float:
        return 0.5

    slow = Agent(model="scripted", tools=[sleep], max_wall_seconds=0.05)
    result = await run(slow, ["go"], reward=constant, policy=ScriptedPolicy([call("sleep")]))
    [trajectory] = result.trajectories
    assert trajectory.finish_reason is FinishReason.WALL_TIME
    assert trajectory.reward == 0.5


async def test_an_answer_that_leaves_no_room_ends_as_length_and_nothing_more_is_sent():
    policy = ScriptedPolicy([call("add", a=1, b=1), "2"], limited=True)
    asked = Agent(model="scripted", tools=[add], tool_prompt="", max_tokens_per_turn=100, max_sequence_tokens=110)
    result = await run(asked, ["go"], policy=policy)
    [trajectory] = result.trajectories
    assert len(trajectory.turns) == 1
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert len(trajectory.sequences[0]) == 110
    assert trajectory.sequences[0].truncated


async def test_a_prompt_longer_than_the_context_ends_as_length_without_a_turn():
    @reward
    def penalty() -> float:
        return -0.2

    trajectory = await play(
        ["never said"],
        reward=penalty,
        prompt="x" * 500,
        settings={"max_sequence_tokens": 600, "max_tokens_per_turn": 9},
    )
    assert (trajectory.finish_reason, trajectory.turns) == (FinishReason.LENGTH, [])
    assert trajectory.reward is None
    assert not trajectory.trainable


async def test_a_reward_gets_the_response_and_fields_of_the_task_by_name():
    @reward
    async def graded(response: str, answer: str, context: Context) -> RewardResult:
        return RewardResult(float(answer in response), metrics={"length": float(len(response))})

    result = await run(
        agent(),
        [Task("2+3?", {"answer": "5"})],
        reward=graded,
        policy=ScriptedPolicy([call("add", a=2, b=3), "It is 5"]),
    )
    assert result.rewards == [1.0]
    assert result.trajectories[0].metrics == {"length": 7.0}


async def test_a_reward_that_raises_leaves_the_trajectory_unscored_and_its_siblings_alone():
    @reward
    def picky(trajectory) -> float:
        if trajectory.attempt == 2:
            raise OSError("judge unreachable")
        return 1.0

    result = await run(agent(), ["go"], reward=picky, attempts=4, policy=ScriptedPolicy(["hello"]))
    assert result.rewards == [1.0, 1.0, None, 1.0]
    failure = result.trajectories[2].reward_failure
    assert failure.boundary is Boundary.REWARD
    assert "judge unreachable" in failure.message
    assert result.metrics["reward/mean"] == 1.0


async def test_one_bad_rollout_of_many_leaves_the_others_alone():
    class Faulty(ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            generation = await super().generate(prompt_ids, sampling, rollout_id=rollout_id)
            if rollout_id == "run-7.0":
                raise RuntimeError("CUDA error")
            if rollout_id == "run-9.0":
                return Generation(generation.ids, generation.logprobs[1:], "stop", 0)
            return generation

    result = await run(agent(), [f"task {i}" for i in range(32)], policy=Faulty(["hello"]), label="run")
    failed = {t.rollout_id: t.failure for t in result.trajectories if t.failure}
    assert set(failed) == {"run-7.0", "run-9.0"}
    assert "CUDA error" in failed["run-7.0"].traceback
    assert failed["run-9.0"].boundary is Boundary.TOKENS


class Panic(BaseException):
    """What bindings of other languages raise: no Exception, but no wish to end the process either."""


@tool
def panic() -> str:
    """Raise what is no Exception."""
    raise Panic("index out of bounds")


@tool
async def cancel_itself() -> str:
    """Cancel the task that runs this."""
    asyncio.current_task().cancel()
    await asyncio.sleep(1)
    return "never"


@pytest.mark.parametrize("bad", [panic, cancel_itself])
async def test_a_tool_that_does_the_unheard_of_leaves_the_other_rollouts_alone(bad):
    script = lambda prompt, turn: call(bad.name) if "task 3<" in prompt and turn == 0 else "fine"  # noqa: E731
    tasks = [f"task {i}" for i in range(8)]
    result = await run(Agent(model="scripted", tools=[bad]), tasks, policy=ScriptedPolicy(script))
    assert [t.finish_reason for t in result.trajectories].count(FinishReason.ANSWERED) >= 7


@pytest.mark.parametrize("ids", [[*b"a" * 600, END], [*b"ab", END, *b"cd", END]], ids=["too many", "past the end"])
async def test_a_generation_that_nobody_asked_for_is_refused_and_never_trained(ids):
    class Odd(ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            if rollout_id == "s-0.0":
                return Generation(ids, [-0.1] * len(ids), "stop", 0)
            return await super().generate(prompt_ids, sampling, rollout_id=rollout_id)

    result = await run(agent(), ["a", "b"], policy=Odd(["fine"], limited=True), label="s")
    odd, sound = result.trajectories
    assert odd.failure.boundary is Boundary.TOKENS
    assert not odd.trainable
    assert sound.finish_reason is FinishReason.ANSWERED


def tensors(values, integers):
    return torch.tensor(values, dtype=torch.int64 if integers else torch.float32)


def arrays(values, integers):
    return np.array(values, dtype=np.int32 if integers else np.float32)


KINDS = {
    "arrays": arrays,
    "tensors": tensors,
    "scalars of arrays": lambda values, integers: list(arrays(values, integers)),
    "scalars of tensors": lambda values, integers: tuple(tensors(values, integers)),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_policy_may_return_arrays_and_tensors(kind):
    made = KINDS[kind]

    class Numeric(ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            plain = await super().generate(prompt_ids, sampling, rollout_id=rollout_id)
            ids, logprobs = made(list(plain.ids), True), made([-0.5] * len(plain.ids), False)
            return Generation(ids, logprobs, plain.finish_reason, made([3] * len(plain.ids), True), logprobs)

    policy = Numeric([call("add", a=1, b=2), "fine"])
    (plain,) = (
        await run(agent(), ["a"], policy=ScriptedPolicy([call("add", a=1, b=2), "fine"]), label="s")
    ).trajectories
    (found,) = (await run(agent(), ["a"], policy=policy, label="s")).trajectories
    assert (found.finish_reason, found.failure) == (FinishReason.ANSWERED, None)
    assert [s.ids for s in found.sequences] == [s.ids for s in plain.sequences]
    sampled = [p for p, o in zip(found.sequences[0].logprobs, found.sequences[0].origins, strict=True) if o == 1]
    assert set(sampled) == {-0.5}
    assert Trajectory.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("ids", "logprobs", "said"),
    [
        (np.array([[1, 2]]), [-0.1, -0.1], "one row of 32-bit integers"),
        (np.array([1.0, 2.0]), [-0.1, -0.1], "one row of 32-bit integers"),
        (np.array([], dtype=int), None, "returned no tokens"),
        (np.array([97, 98]), np.array([[-0.1, -0.1]]), "1 log-probs"),
        (np.array([97, 98]), np.array([[-0.1], [-0.1]]), "not a finite number"),
        (np.array([97, 98]), np.array([-0.1, np.nan]), "not a finite number"),
        (np.array([97, 98]), [-0.1, None], "not a finite number"),
    ],
    ids=["rows", "floats", "none", "rows of log-probs", "columns of log-probs", "NaN", "None"],
)
async def test_arrays_that_are_no_generation_are_refused_in_plain_words(ids, logprobs, said):
    class Odd(ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            if rollout_id == "s-0.0":
                return Generation(ids, logprobs, "length", 0)
            return await super().generate(prompt_ids, sampling, rollout_id=rollout_id)

    odd, _ = (await run(agent(), ["a", "b"], policy=Odd(["fine"]), label="s")).trajectories
    assert odd.failure.boundary is Boundary.TOKENS
    assert said in odd.failure.message


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("cannot say")


@pytest.mark.parametrize("error", [ToolError("no file \udcff.txt"), ValueError("\udcff"), Mute()])
async def test_an_error_with_an_odd_message_is_an_observation_like_any_other(error):
    @tool
    def odd() -> str:
        """Raise an error whose message is odd."""
        raise error

    result = await run(Agent(model="scripted", tools=[odd]), ["go"], policy=ScriptedPolicy([call("odd"), "end"]))
    [trajectory] = result.trajectories
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert trajectory.turns[0].tool_results[0].failure.by_policy
    assert trajectory.turns[0].tool_results[0].observation.encode("utf-8")


async def test_what_a_tool_says_for_readers_of_the_trajectory_is_recorded():
    @tool
    def look() -> ToolResult:
        """Look around."""
        return ToolResult("a door", state={"at": [1, 2]}, info={"moves": 9})

    result = await run(Agent(model="scripted", tools=[look]), ["go"], policy=ScriptedPolicy([call("look"), "end"]))
    record = result.trajectories[0].turns[0].tool_results[0]
    assert (record.state, record.info) == ({"at": [1, 2]}, {"moves": 9})


@pytest.mark.parametrize(
    "limits",
    [
        {"max_tokens_per_turn": 4},
        {"max_tokens_per_turn": 4, "max_sequence_tokens": 8},
        {"max_tokens_per_turn": 4, "max_sampled_tokens": 8},
        {"max_tokens_per_turn": 4, "memory": SummaryFolding(after_tokens=10, max_summary_tokens=2)},
    ],
)
async def test_limits_on_tokens_do_not_bind_a_script_whose_tokens_are_bytes(limits):
    asked = agent(**limits)
    script = [call("add", a=2, b=3), "It is 5, and that is all there is to say of it."]
    [trajectory] = (await run(asked, ["go"], policy=ScriptedPolicy(script))).trajectories
    assert (trajectory.finish_reason, trajectory.response) == (FinishReason.ANSWERED, script[1])
    assert not any(sequence.truncated for sequence in trajectory.sequences)


async def test_what_a_tool_says_to_a_script_is_cut_by_characters_as_where_tokens_are_not_known():
    @tool(max_output_tokens=10)
    def dump() -> str:
        """Dump."""
        return "x" * 1000

    asked = Agent(model="scripted", tools=[dump])
    [trajectory] = (await run(asked, ["go"], policy=ScriptedPolicy([call("dump"), "end"]))).trajectories
    assert trajectory.turns[0].tool_results[0].observation.count("x") == 40


class Padded(ScriptedPolicy):
    """Samples, where it is asked for, an id that no token has, which leaves no trace in the text."""

    async def generate(self, prompt_ids, sampling, **how):
        generation = await super().generate(prompt_ids, sampling, **how)
        if "padding" not in self.tokenizer.decode(prompt_ids):
            return generation
        ids = [generation.ids[0], 300, *generation.ids[1:]]
        return Generation(ids, [0.0] * len(ids), generation.finish_reason, generation.version)


async def test_a_sampled_id_that_no_token_has_spoils_its_rollout_which_is_counted_and_in_no_row():
    @reward
    def generous() -> float:
        return 1.0

    result = await run(agent(), ["go", "padding"], policy=Padded(["done"]), reward=generous)
    sound, spoiled = result.trajectories
    assert (sound.reward, sound.trainable) == (1.0, True)
    assert (spoiled.reward, spoiled.trainable, spoiled.infrastructure_failed) == (None, False, True)
    assert "id 300, which no token of its tokenizer has" in spoiled.failure.message
    assert rows_from_trajectories(result.trajectories).excluded == {"infrastructure": 1}
