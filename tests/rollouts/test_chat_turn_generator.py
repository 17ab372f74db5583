"""Rollouts with a policy that takes and returns messages: their text, and their tokens as far as known."""

from agentfly.agents.agent import Agent
from agentfly.agents.tool_decorator import tool
from agentfly.core.errors import PromptTooLong
from agentfly.core.messages import ToolCall
from agentfly.core.trajectory import FinishReason
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.policy import ChatGeneration
from agentfly.rollouts.run import run
from agentfly.training.rows import rows_from_trajectories

NATIVE = HermesFormat(uses_chat_template=True)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


class FarSide:
    """Answers with given generations, and keeps what it was asked."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    async def chat(self, messages, tools, sampling, *, rollout_id):
        self.asked.append((list(messages), list(tools), sampling))
        answer = self.answers[len(self.asked) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass


def call(number, a=1, b=2, **tokens):
    return ChatGeneration("", (ToolCall(number, "add", {"a": a, "b": b}),), "stop", **tokens)


def words(text, finish="stop", **tokens):
    return ChatGeneration(text, (), finish, **tokens)


async def play(far_side, **settings):
    runner = {name: settings.pop(name) for name in ("strategy", "reward") if name in settings}
    settings = {"tools": [add], "tool_call_format": NATIVE, **settings}
    result = await run(Agent(model="far", **settings), ["go"], policy=far_side, **runner)
    return result.trajectories[0]


async def test_the_far_side_gets_the_tools_and_the_conversation_and_its_calls_are_executed():
    far_side = FarSide(call("x"), words("It is 3."))
    trajectory = await play(far_side)
    assert (trajectory.finish_reason, trajectory.response) == (FinishReason.ANSWERED, "It is 3.")
    (_, tools, _), (messages, _, _) = far_side.asked
    assert [one["function"]["name"] for one in tools] == ["add"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[-1]["content"] == "3"


async def test_a_text_format_reads_the_calls_where_the_far_side_does_not():
    far_side = FarSide(words(HermesFormat().write("add", {"a": 2, "b": 2})), words("4"))
    trajectory = await play(far_side, tool_call_format="hermes")
    assert trajectory.turns[0].tool_results[0].observation == "4"
    assert far_side.asked[0][1] == []
    assert "<tools>" in far_side.asked[0][0][0]["content"]


async def test_calls_with_repeated_or_missing_ids_get_their_own():
    repeated = ChatGeneration("", tuple(ToolCall(name, "add", {"a": 1, "b": 1}) for name in ("x", "x", "")), "stop")
    trajectory = await play(FarSide(repeated, call("x"), words("done")))
    ids = [result.call.id for turn in trajectory.turns for result in turn.tool_results]
    assert ids[0] == "x"
    assert len(set(ids)) == 4
    assert all(ids)


async def test_a_cut_answer_makes_no_calls_and_ends_as_length():
    cut = ChatGeneration("", (ToolCall("x", "add", {"a": 1, "b": 2}),), "length")
    trajectory = await play(FarSide(cut))
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert trajectory.turns[0].tool_results == ()


async def test_a_conversation_too_long_for_the_far_side_ends_as_length():
    trajectory = await play(FarSide(call("x"), PromptTooLong("no room")))
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert len(trajectory.turns) == 1


async def test_without_ids_there_are_no_sequences_and_no_row_for_a_cause_of_its_own():
    trajectory = await play(FarSide(words("hello")))
    trajectory.reward = 1.0
    assert trajectory.sequences == []
    assert not trajectory.trainable
    assert rows_from_trajectories([trajectory]).excluded == {"no_tokens": 1}


async def test_one_turn_without_ids_makes_the_whole_trajectory_untrainable():
    told = {"prompt_ids": [1, 2], "ids": [3, 9], "logprobs": [-0.1, -0.2]}
    trajectory = await play(FarSide(call("x", **told), words("hello")))
    trajectory.reward = 1.0
    assert rows_from_trajectories([trajectory]).excluded == {"no_tokens": 1}


async def test_ids_that_go_on_from_those_before_make_one_sequence_and_others_a_new_one():
    answers = [
        call("x", prompt_ids=[1, 2], ids=[3, 9], logprobs=[-0.1, -0.2]),
        call("y", prompt_ids=[1, 2, 3, 9, 4], ids=[5, 9], logprobs=[-0.3, -0.4]),
        words("ok", prompt_ids=[1, 2, 4], ids=[6], logprobs=[-0.5]),
    ]
    trajectory = await play(FarSide(*answers))
    assert [list(one.ids) for one in trajectory.sequences] == [[1, 2, 3, 9, 4, 5, 9], [1, 2, 4, 6]]
    assert [one.loss_mask for one in trajectory.sequences] == [[0, 0, 1, 1, 0, 1, 1], [0, 0, 0, 1]]
    stepwise = await play(FarSide(*answers), strategy="step")
    assert [one.sampled_count for one in stepwise.sequences] == [2, 2, 1]


async def test_limits_on_tokens_hold_where_the_far_side_tells_them():
    told = {"prompt_ids": [1] * 60, "ids": [3] * 30, "logprobs": [-0.1] * 30}
    far_side = FarSide(call("x", **told), words("never said"))
    trajectory = await play(far_side, max_tokens_per_turn=30, max_sampled_tokens=30)
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert len(far_side.asked) == 1
    far_side = FarSide(call("x", **told), words("short"))
    await play(far_side, max_tokens_per_turn=30, max_sequence_tokens=100)
    assert far_side.asked[1][2].max_tokens == 10
