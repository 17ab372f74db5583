"""Subagents: agents that answer calls of other agents, in the same rollout and record."""

import asyncio
from dataclasses import replace

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.memory import Window
from agentfly.agents.tool_decorator import tool
from agentfly.agents.tool_result import ToolResult
from agentfly.contexts.context import Context
from agentfly.core.errors import Boundary, ConfigError, ResourceDied, ToolError
from agentfly.core.messages import Image, images_of
from agentfly.core.trajectory import FinishReason, Trajectory
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.policy import ChatGeneration
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.agent_runtime import AgentRuntime
from agentfly.rollouts.failure_budget import FailureBudgetExceeded
from agentfly.rollouts.rollout_record import agent_fingerprint
from agentfly.rollouts.run import run
from agentfly.training.rows import rows_from_trajectories

HERMES = HermesFormat()


def call(name, **arguments):
    return HERMES.write(name, arguments)


@tool
def look(what: str) -> str:
    """Look something up.

    Args:
        what: it.
    """
    return f"{what} is blue"


def researcher(**settings):
    return Agent(model="m", tools=[look], system_prompt="You are the researcher.", **settings)


def boss(*tools, **settings):
    return Agent(model="m", tools=tools, system_prompt="You are the boss.", **settings)


def research(**settings):
    return researcher(**settings).as_tool("Finds out facts.", name="research")


def script(**parts):
    """The texts of each agent by a word of its system prompt: a list of turns, or a function of prompt and turn."""

    def say(prompt, turn):
        said = next(texts for word, texts in parts.items() if f"You are the {word}." in prompt)
        return said(prompt, turn) if callable(said) else said[turn]

    return say


async def play(agent, policy, prompt="go", **runner):
    result = await run(agent, [prompt], policy=policy, label="run", **runner)
    return result.trajectories[0]


ASK = call("research", request="the sky's colour")


@pytest.mark.parametrize("strategy", ["chain", "step"])
async def test_a_subagents_answer_is_the_observation_and_its_turns_stand_in_the_same_trajectory(strategy):
    policy = ScriptedPolicy(script(boss=[ASK, "Blue."], researcher=[call("look", what="sky"), "The sky is blue."]))
    trajectory = await play(boss(research()), policy, strategy=strategy)
    assert (trajectory.finish_reason, trajectory.response) == (FinishReason.ANSWERED, "Blue.")
    assert [(turn.agent, turn.conversation) for turn in trajectory.turns] == [
        ("", ""),
        ("research", "call_0"),
        ("research", "call_0"),
        ("", ""),
    ]
    assert trajectory.turns[0].tool_results[0].observation == "The sky is blue."
    assert len(trajectory.sequences) == (2 if strategy == "chain" else 4)
    for turn in trajectory.turns:
        sampled = trajectory.sequences[turn.sequence].ids[turn.start : turn.stop]
        assert bytes(sampled.tolist()[:-1]).decode() == turn.text


async def test_the_conversation_of_a_subagent_is_its_own_and_is_kept():
    policy = ScriptedPolicy(script(boss=[ASK, "ok"], researcher=["blue"]))
    trajectory = await play(boss(research()), policy)
    assert [m["role"] for m in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]
    system, asked, answer = trajectory.subagents["call_0"]
    assert "You are the researcher." in system["content"]
    assert (asked["content"], answer["content"]) == ("the sky's colour", "blue")
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


async def test_subagents_called_in_one_turn_work_at_the_same_time_and_answer_in_order():
    meeting = asyncio.Barrier(3)

    async def answer(prompt, turn):
        await meeting.wait()
        return prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]

    asks = "".join(call("research", request=f"question {number}") for number in range(3))
    policy = ScriptedPolicy(script(boss=[asks, "ok"], researcher=answer))
    trajectory = await play(boss(research()), policy)
    assert [result.observation for result in trajectory.turns[0].tool_results] == [f"question {n}" for n in range(3)]
    assert set(trajectory.subagents) == {"call_0", "call_1", "call_2"}
    assert len({turn.sequence for turn in trajectory.turns}) == 4


async def test_subagents_have_subagents():
    clerk = Agent(model="m", system_prompt="You are the clerk.").as_tool("Files things.", name="file")
    middle = Agent(model="m", tools=[clerk], system_prompt="You are the middle.").as_tool("Delegates.", name="middle")
    policy = ScriptedPolicy(
        script(
            boss=[call("middle", request="file it"), "done"],
            middle=[call("file", request="a"), call("file", request="b"), "both filed"],
            clerk=lambda prompt, turn: "filed",
        )
    )
    trajectory = await play(boss(middle), policy)
    speakers = [turn.agent for turn in trajectory.turns]
    assert speakers == ["", "middle", "middle/file", "middle", "middle/file", "middle", ""]
    assert set(trajectory.subagents) == {"call_0", "call_0/call_0", "call_0/call_1"}
    assert trajectory.turns[0].tool_results[0].observation == "both filed"


@pytest.mark.parametrize(
    ("settings", "said", "reason"),
    [
        ({"max_turns": 1}, [call("look", what="x")], "max_turns"),
        ({"max_tokens_per_turn": 3}, ["too long"], "length"),
        ({"max_sequence_tokens": 20, "max_tokens_per_turn": 10}, ["never said"], "length"),
        ({"max_wall_seconds": 0.05}, None, "wall_time"),
        ({"max_consecutive_invalid_calls": 1}, [call("nothing")], "invalid_calls"),
        ({"max_tool_calls": 1}, [call("look", what="x") * 2], "max_tool_calls"),
    ],
)
async def test_a_subagent_that_ends_for_a_limit_of_its_own_is_a_failed_call_and_the_caller_goes_on(
    settings, said, reason
):
    async def forever(prompt, turn):
        await asyncio.sleep(60)
        return ""

    policy = ScriptedPolicy(script(boss=[ASK, "never mind"], researcher=said or forever), limited=True)
    settings = {"max_tokens_per_turn": 512, **settings}
    trajectory = await play(boss(research(**settings)), policy)
    record = trajectory.turns[0].tool_results[0]
    assert reason in record.observation
    assert (record.failure.kind, record.failure.by_policy) == ("SubagentUnfinished", True)
    assert trajectory.response == "never mind"


async def test_infrastructure_that_fails_in_a_subagent_spoils_the_rollout():
    @tool
    def look(what: str) -> str:
        """Look.

        Args:
            what: it.
        """
        raise ResourceDied("the library burnt down")

    agent = Agent(model="m", tools=[look], system_prompt="You are the researcher.").as_tool("Finds.", name="research")
    policy = ScriptedPolicy(lambda prompt, turn: "fine" if "sound" in prompt else _one_call(prompt))
    result = await run(boss(agent), ["broken", "sound"], policy=policy)
    broken, sound = result.trajectories
    assert broken.failure.boundary is Boundary.RESOURCE
    assert sound.finish_reason is FinishReason.ANSWERED


def _one_call(prompt):
    return ASK if "You are the boss." in prompt else call("look", what="x")


async def test_a_tool_of_a_subagent_that_is_done_ends_its_conversation_only():
    @tool
    def submit(answer: str) -> ToolResult:
        """Submit.

        Args:
            answer: it.
        """
        return ToolResult(f"submitted: {answer}", reward=0.5, done=True)

    agent = Agent(model="m", tools=[submit], system_prompt="You are the researcher.").as_tool("Finds.", name="research")
    policy = ScriptedPolicy(script(boss=[ASK, "thanks"], researcher=[call("submit", answer="blue")]))
    trajectory = await play(boss(agent), policy)
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert trajectory.turns[0].tool_results[0].observation == "submitted: blue"
    assert trajectory.reward == 0.5


async def test_subagents_share_context_and_have_format_memory_and_limits_of_their_own():
    @tool
    async def note(text: str, context: Context) -> int:
        """Note.

        Args:
            text: it.
        """
        return len(context.state.setdefault("notes", [])) + (context.state["notes"].append(text) or 0)

    plain = Agent(
        model="m",
        tools=[note],
        system_prompt="You are the researcher.",
        tool_call_format="action",
        memory=Window(1),
        max_turns=5,
    )
    policy = ScriptedPolicy(
        script(
            boss=[call("note", text="a"), ASK, "ok"],
            researcher=["Action: note[b]", "Action: note[c]", "noted"],
        )
    )
    trajectory = await play(boss(note, plain.as_tool("Finds.", name="research"), max_turns=3), policy)
    observed = [result.observation for turn in trajectory.turns for result in turn.tool_results]
    assert observed == ["0", "noted", "1", "2"]
    assert len(trajectory.sequences) == 3  # one, and two of the subagent, whose window dropped a turn


async def test_the_prompt_of_a_subagent_may_be_made_of_other_arguments():
    def research(topic: str, words: int = 50) -> str:
        """Find out about a topic.

        Args:
            topic: it.
            words: the length of the answer.
        """
        return f"Write {words} words about {topic}."

    policy = ScriptedPolicy(
        script(boss=[call("research", topic="tea", words="7"), call("research"), "ok"], researcher=["green"])
    )
    trajectory = await play(boss(researcher().as_tool(research)), policy)
    assert trajectory.subagents["call_0"][1]["content"] == "Write 7 words about tea."
    assert trajectory.turns[2].tool_results[0].failure.kind == "InvalidArguments"


def asking(**settings):
    """A prompt's function that repeats its argument."""

    @tool(name="research", **settings)
    def ask(request: str) -> str:
        """Find out.

        Args:
            request: what.
        """
        return request

    return ask


@pytest.mark.parametrize("prompt", ["Finds out facts.", asking(max_output_tokens=5)])
async def test_a_subagent_reads_its_prompt_in_full_however_long_it_is(prompt):
    request = "the sky's colour " * 3000
    policy = ScriptedPolicy(script(boss=[call("research", request=request), "ok"], researcher=["blue"]))
    trajectory = await play(boss(researcher().as_tool(prompt, name="research")), policy)
    assert trajectory.subagents["call_0"][1]["content"] == request


async def test_the_answer_of_a_subagent_is_cut_as_any_observation_is_and_kept_whole_in_its_conversation():
    policy = ScriptedPolicy(script(boss=[ASK, "ok"], researcher=["x" * 100]), limited=True)
    trajectory = await play(boss(researcher().as_tool(asking(max_output_tokens=10))), policy)
    (record,) = trajectory.turns[0].tool_results
    assert record.observation == "xxxxx\n[... 90 characters left out ...]\nxxxxx"  # a token is a byte there
    assert trajectory.messages[3]["content"] == record.observation
    assert trajectory.subagents["call_0"][-1]["content"] == "x" * 100


async def test_what_the_function_of_a_prompt_raises_is_cut_as_any_error_of_a_tool():
    @tool(max_output_tokens=5)
    def research() -> str:
        """Find out."""
        raise ToolError("y" * 1000)

    policy = ScriptedPolicy(script(boss=[call("research"), "ok"], researcher=[]), limited=True)
    trajectory = await play(boss(researcher().as_tool(research)), policy)
    assert trajectory.turns[0].tool_results[0].observation == "Error: yyy\n[... 995 characters left out ...]\nyy"


async def test_a_prompt_may_show_images_and_a_function_that_returns_more_than_a_prompt_is_refused():
    picture = Image(b"\x89PNG...", "image/png")

    def research(how: str) -> ToolResult:
        """Find out.

        Args:
            how: what the prompt holds.
        """
        return ToolResult(["What is this?", picture]) if how == "shown" else ToolResult("It.", reward=1.0, done=True)

    said = script(boss=[call("research", how="shown"), "ok"], researcher=["a cat"])
    trajectory = await play(boss(researcher().as_tool(research)), ScriptedPolicy(said, sees=True))
    assert list(images_of(trajectory.subagents["call_0"][1]["content"])) == [picture]
    scored = script(boss=[call("research", how="scored")], researcher=[])
    with pytest.raises(FailureBudgetExceeded, match=r"ToolResult\(reward=…, done=…\), but a prompt is text and images"):
        await play(boss(researcher().as_tool(research)), ScriptedPolicy(scored))


async def test_every_conversation_has_a_name_of_its_own_at_the_policy_which_forgets_it():
    class Naming(ScriptedPolicy):
        names, forgotten = [], []

        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            self.names.append(rollout_id)
            return await super().generate(prompt_ids, sampling, rollout_id=rollout_id)

        def release_rollout(self, rollout_id):
            self.forgotten.append(rollout_id)
            super().release_rollout(rollout_id)

    policy = Naming(script(boss=[ASK, ASK, "ok"], researcher=["blue"]))
    await play(boss(research()), policy)
    assert policy.names == ["run-0.0", "run-0.0/call_0", "run-0.0", "run-0.0/call_1", "run-0.0"]
    assert sorted(policy.forgotten) == sorted(set(policy.names))


async def test_the_tokens_of_a_subagent_with_another_model_are_recorded_and_never_trained():
    other = Agent(model="other", system_prompt="You are the researcher.", temperature=0.3)
    asked = []

    class Sampling(ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            asked.append(sampling.temperature)
            return await super().generate(prompt_ids, sampling, rollout_id=rollout_id)

    agent = boss(other.as_tool("Finds.", name="research"), research_twin())
    policy = Sampling(script(boss=[ASK, call("twin", request="x"), "ok"], researcher=["blue"], twin=["same model"]))
    trajectory = await play(
        agent,
        policy,
        subagent_policies={"other": Sampling(script(researcher=["blue"]))},
        sampling=lambda params: replace(params, temperature=0.7),
    )
    assert asked == [0.7, 0.3, 0.7, 0.7, 0.7]
    assert [turn.other_model for turn in trajectory.turns] == ["", "other", "", "", ""]
    trajectory.reward = 1.0
    rows = rows_from_trajectories([trajectory]).rows
    assert len(trajectory.sequences) == 3
    assert [list(row.ids) for row in rows] == [list(trajectory.sequences[index].ids) for index in (0, 2)]


def research_twin():
    return Agent(model="m", system_prompt="You are the twin.").as_tool("Twin.", name="twin")


async def test_a_subagent_behind_an_api_leaves_the_trajectory_trainable():
    class FarSide:
        async def chat(self, messages, tools, sampling, *, rollout_id):
            return ChatGeneration("blue", (), "stop")

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            pass

    other = Agent(model="api", system_prompt="You are the researcher.").as_tool("Finds.", name="research")
    trajectory = await play(boss(other), ScriptedPolicy(script(boss=[ASK, "ok"])), subagent_policies={"api": FarSide()})
    trajectory.reward = 1.0
    assert trajectory.turns[0].tool_results[0].observation == "blue"
    assert len(rows_from_trajectories([trajectory]).rows) == 1


def test_a_changed_model_is_that_of_the_subagents_which_had_the_same():
    other = Agent(model="other", tools=[research_twin()]).as_tool("Finds.", name="research")
    changed = boss(other, research_twin()).with_model("new")
    assert [str(agent.model) for agent in changed.subagents] == ["other", "new", "new"]


def test_a_subagent_that_has_changed_is_noticed_when_a_run_is_gone_on_with():
    def traits(**settings):
        return agent_fingerprint(boss(research(**settings)))

    assert traits() == traits()
    assert traits(memory=Window(2)) != traits(memory=Window(3)) != traits()
    assert traits(max_turns=3) != traits()


def test_a_runtime_without_a_policy_for_a_subagents_model_is_refused():
    other = Agent(model="other").as_tool("Finds.", name="research")
    with pytest.raises(ConfigError, match="'other'"):
        AgentRuntime.create(boss(other), ScriptedPolicy([]))


def test_an_agent_that_is_given_as_it_stands_is_refused_with_the_cure():
    with pytest.raises(ConfigError, match="as_tool"):
        boss(researcher())
    with pytest.raises(ConfigError, match="name="):
        researcher().as_tool("Finds out facts.")


async def test_wall_time_of_the_rollout_ends_what_its_subagents_do_and_the_record_is_whole():
    async def forever(prompt, turn):
        await asyncio.sleep(60)
        return ""

    policy = ScriptedPolicy(script(boss=[ASK], researcher=forever))
    trajectory = await play(boss(research(), max_wall_seconds=0.05), policy)
    assert trajectory.finish_reason is FinishReason.WALL_TIME
    assert [sequence.sampled_count > 0 for sequence in trajectory.sequences] == [True, False]
    with pytest.raises(Exception, match="finished"):
        trajectory.sequences[1].truncate(1)


async def test_turns_of_parallel_subagents_follow_the_turn_that_called_them_and_lead_to_the_next_one():
    together, begun = asyncio.Event(), []

    async def helper(prompt, turn):
        begun.append(turn)
        if len(begun) == 2:
            together.set()
        await together.wait()
        return call("look", what="sky") if turn == 0 else "Blue."

    policy = ScriptedPolicy(script(boss=[ASK + ASK, call("look", what="sea"), "Blue."], researcher=helper))
    trajectory = await play(boss(research(), look), policy)
    assert trajectory.finish_reason == FinishReason.ANSWERED
    first = {turn.conversation: turn.index for turn in reversed(trajectory.turns)}
    last = {turn.conversation: turn.index for turn in trajectory.turns}
    own = [turn.index for turn in trajectory.turns if not turn.conversation]
    parent_turns = [turn.parent_turns for turn in trajectory.turns]
    assert [parent_turns[first[name]] for name in ("call_0", "call_1")] == [(own[0],)] * 2
    assert [parent_turns[last[name]] for name in ("call_0", "call_1")] == [(first["call_0"],), (first["call_1"],)]
    assert sorted(parent_turns[own[1]]) == sorted([last["call_0"], last["call_1"]])
    assert (parent_turns[own[0]], parent_turns[own[2]]) == ((), (own[1],)), "a tool of no agent takes no turn"


async def test_rows_pass_through_turns_of_another_model():
    other = ScriptedPolicy(["The sky is blue."])
    helper = Agent(model="another", system_prompt="You are the researcher.").as_tool(
        "Finds out facts.", name="research"
    )
    policy = ScriptedPolicy(script(boss=[ASK, "Blue."]))
    trajectory = await play(boss(helper), policy, subagent_policies={"another": other})
    trajectory.reward = 1.0
    assert [turn.parent_turns for turn in trajectory.turns] == [(), (0,), (1,)]
    (row,) = rows_from_trajectories([trajectory]).rows
    assert [(turn.index, turn.parent_turns) for turn in row.turns] == [(0, ()), (2, (0,))]
