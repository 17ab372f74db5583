"""Both strategies with the same agent: turns, anchors, limits, and the resulting rows."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.agents.agent import Agent
from agentfly.agents.tool_decorator import tool
from agentfly.agents.tool_result import ToolResult
from agentfly.core.errors import ConfigError, PromptTooLong
from agentfly.core.messages import Image, ToolCall
from agentfly.core.trajectory import FinishReason, ToolRecord
from agentfly.formats.chat.chat_format import ParsedReply, RenderedTokens
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.policy import Generation, SamplingParams
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.run import run
from agentfly.rollouts.runner import Runner
from agentfly.rollouts.token_recorder import ChainStrategy, TokenRecorder
from agentfly.rollouts.trajectory_recorder import AnchorState, anchor_hash
from agentfly.rollouts.turn_generator import CallIdAllocator, TokenTurnGenerator
from agentfly.training.advantages import ALGORITHMS, AdvantageInputs
from agentfly.training.config.groups import AdvantageConfig
from agentfly.training.rows import rows_from_trajectories

STRATEGIES = ["chain", "step"]


@tool
def move(direction: str) -> ToolResult:
    """Move.

    Args:
        direction: where to.
    """
    places = {"north": {"x": 0, "y": 1}, "south": {"y": -1, "x": 0}, "nowhere": None}
    return ToolResult(f"went {direction}", reward=0.5, state=places[direction])


def call(direction):
    return HermesFormat().write("move", {"direction": direction})


def agent(**settings):
    return Agent(model="scripted", **{"tools": [move], "tool_prompt": "", **settings})


async def play(script, strategy="chain", prompts=("go",), attempts=1, runner=None, **settings):
    policy = script if isinstance(script, ScriptedPolicy) else ScriptedPolicy(script, limited=True)
    runner = {"policy": policy, "strategy": strategy, "attempts": attempts, **(runner or {})}
    return (await run(agent(**settings), list(prompts), **runner)).trajectories


# --- turns and rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_same_script_makes_the_same_turns_rewards_and_anchors_under_both(strategy):
    [trajectory] = await play([call("north"), call("south"), "done"], strategy)
    assert [turn.index for turn in trajectory.turns] == [0, 1, 2]
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.5, None]
    assert trajectory.reward == 1.0
    assert len({turn.anchor for turn in trajectory.turns}) == 3
    assert len(trajectory.sequences) == {"chain": 1, "step": 3}[strategy]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_rows_know_the_turns_that_they_hold_and_where_their_tokens_are(strategy):
    [trajectory] = await play([call("north"), call("south"), "done"], strategy)
    rows = rows_from_trajectories([trajectory]).rows
    assert [len(row.turns) for row in rows] == {"chain": [3], "step": [1, 1, 1]}[strategy]
    assert [(turn.index, turn.reward, turn.anchor, turn.kind) for row in rows for turn in row.turns] == [
        (turn.index, turn.reward, turn.anchor, "act") for turn in trajectory.turns
    ]
    assert {(row.agent, row.reward, row.rollout_id) for row in rows} == {("", 1.0, trajectory.rollout_id)}
    for row in rows:
        assert row.targets == [position for turn in row.turns for position in range(turn.start, turn.stop)]
        assert [row.raw_logprobs[position] for position in row.targets] == [0.0] * len(row.targets)


async def test_a_long_rollout_counts_once_in_the_baseline_of_its_group_however_many_rows_it_has():
    def script(prompt, turn):
        return call("north") if turn < script.lengths[prompt.count("long")] else "done"  # type: ignore[attr-defined]

    script.lengths = [0, 4]  # type: ignore[attr-defined]
    trajectories = await play(script, "step", prompts=["short", "long"])
    for trajectory, reward in zip(trajectories, (0.0, 1.0), strict=True):
        trajectory.group_id, trajectory.reward = "group", reward
    rows = rows_from_trajectories(trajectories).rows
    assert len(rows) == 6
    advantages = ALGORITHMS["dr_grpo"].estimate(AdvantageInputs(rows), AdvantageConfig())
    assert [float(values[0]) for values in advantages.values] == [-0.5] + [0.5] * 5


# --- anchors -------------------------------------------------------------------------------------------------------


async def test_turns_of_equal_states_share_an_anchor_whatever_led_there():
    [one] = await play([call("north"), call("south"), "done"])
    [other] = await play([call("south"), call("north"), "done"])
    assert one.turns[0].anchor == other.turns[0].anchor
    assert one.turns[1].anchor == other.turns[2].anchor
    assert one.turns[2].anchor == other.turns[1].anchor
    assert one.turns[1].anchor != one.turns[2].anchor


async def test_what_was_seen_since_the_last_state_tells_turns_apart():
    [trajectory] = await play([call("north"), call("nowhere"), "done"])
    assert len({turn.anchor for turn in trajectory.turns}) == 3


def seen(text="", state=None, images=()):
    return ToolRecord(ToolCall("call_0", "move"), text, state=state, images=images)


def test_without_a_state_it_is_the_observations_and_their_images_that_name_the_turn():
    def after(*results):
        situation = AnchorState([{"role": "system", "content": "you"}, {"role": "user", "content": "go"}])
        situation.update(results)
        return situation.anchor

    assert after(seen("a")) == after(seen("a"))
    assert after(seen("a")) != after(seen("b"))
    assert after(seen("a"), seen("b")) != after(seen("b"), seen("a"))
    assert after(seen("a", images=(Image(b"1"),))) != after(seen("a", images=(Image(b"2"),)))
    assert after(seen("x", state={"at": 1})) == after(seen("y", state={"at": 1.0}))
    assert after(seen("x", state=0)) != after(seen("x"))


def test_the_first_turn_is_named_by_the_task_and_not_by_the_system_prompt():
    def first(system, user):
        return AnchorState([{"role": "system", "content": system}, {"role": "user", "content": user}]).anchor

    assert first("a", "go") == first("b", "go") != first("a", "stop")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(), parts, max_size=4),
    max_leaves=12,
)


def turned(value):
    """The same value with the keys in the other order, and tuples for lists."""
    if isinstance(value, dict):
        return {key: turned(part) for key, part in reversed(value.items())}
    return tuple(map(turned, value)) if isinstance(value, list) else value


@given(json_values)
def test_an_anchor_knows_no_order_of_keys_and_outlives_a_trip_through_json(value):
    anchor = anchor_hash(value)
    assert anchor_hash(turned(value)) == anchor
    assert anchor_hash(json.loads(json.dumps(value))) == anchor
    assert anchor_hash([value]) != anchor


# --- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_tokens_in_all_are_counted_over_every_sequence(strategy):
    length = len(call("north")) + 1
    [trajectory] = await play([call("north")] * 9, strategy, max_sampled_tokens=2 * length + 5, max_tokens_per_turn=90)
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert [turn.stop - turn.start for turn in trajectory.turns] == [length, length, 5]
    [exact] = await play([call("north")] * 9, strategy, max_sampled_tokens=2 * length, max_tokens_per_turn=90)
    assert (exact.finish_reason, len(exact.turns)) == (FinishReason.LENGTH, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_nothing_is_sent_where_nothing_fits(strategy):
    class Counting(ScriptedPolicy):
        calls = 0

        async def generate(self, *args, **settings):
            self.calls += 1
            return await super().generate(*args, **settings)

    policy = Counting([call("north"), "never said"], limited=True)
    limits = {"max_sequence_tokens": 130, "max_tokens_per_turn": 100}
    [trajectory] = await play(policy, strategy, **limits)
    assert (trajectory.finish_reason, policy.calls) == (FinishReason.LENGTH, 1)
    policy = Counting(["never said"], limited=True)
    [trajectory] = await play(policy, strategy, tool_prompt=None, **limits)  # the tools' description is counted
    assert (trajectory.finish_reason, policy.calls) == (FinishReason.LENGTH, 0)


async def test_a_policy_that_finds_the_prompt_too_long_ends_the_rollout_as_length():
    class Short(ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            if len(prompt_ids) > 50:
                raise PromptTooLong("no room")
            return await super().generate(prompt_ids, sampling, rollout_id=rollout_id)

    [trajectory] = await play(Short([call("north"), "never said"]))
    assert (trajectory.finish_reason, len(trajectory.turns)) == (FinishReason.LENGTH, 1)
    assert trajectory.failure is None


async def test_an_unknown_strategy_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="Did you mean 'chain'"):
        Runner(agent(), strategy="chian")
    with pytest.raises(ConfigError, match="There are: chain, step"):
        Runner(agent(), strategy="forest")


# --- calls ---------------------------------------------------------------------------------------------------------


def test_calls_keep_their_ids_unless_they_are_missing_or_given_before():
    numbers = CallIdAllocator()
    first = numbers.assign_ids([ToolCall("a", "f"), ToolCall("a", "f"), ToolCall("", "f")])
    second = numbers.assign_ids([ToolCall("call_1", "f"), ToolCall("b", "f"), ToolCall("a", "f")])
    ids = [one.id for one in (*first, *second)]
    assert ids[0] == "a"
    assert ids[4] == "b"
    assert len(set(ids)) == 6


async def test_calls_that_the_chat_format_reads_get_ids_and_stand_as_such_in_the_conversation():
    class Reading:
        """A chat format that reads its own calls: what stands between angle brackets."""

        stop_ids = (257,)

        def render_prompt(self, messages, tools=()):
            return RenderedTokens([1, 2, 3])

        def parse_reply(self, ids):
            text = bytes(ids[:-1]).decode()
            calls = tuple(ToolCall("", "move", {"direction": word[1:-1]}) for word in text.split() if word[0] == "<")
            return ParsedReply(text, text.partition("<")[0].strip(), "thoughts", calls)

    chat, recorder = Reading(), TokenRecorder([], max_tokens=100, stop_ids=[257])
    policy = ScriptedPolicy(["I go <north> <south>"])
    strategy = ChainStrategy(chat, recorder)  # type: ignore[arg-type]
    speaker = TokenTurnGenerator(agent(), policy, chat, strategy, recorder, SamplingParams(), "r")  # type: ignore[arg-type]
    said = await speaker.generate_turn([{"role": "user", "content": "go"}])
    assert (said.content, said.reasoning) == ("I go", "thoughts")
    assert [one.arguments["direction"] for one in said.calls] == ["north", "south"]
    assert (said.message["content"], said.message["reasoning_content"]) == ("I go", "thoughts")
    assert [one["id"] for one in said.message["tool_calls"]] == [one.id for one in said.calls] == ["call_0", "call_1"]


async def test_images_of_results_reach_the_model_with_the_text():
    @tool
    def photograph() -> ToolResult:
        """Take a photograph."""
        return ToolResult("a cat", image=Image(b"png"))

    script = [HermesFormat().write("photograph", {}), "done"]
    [trajectory] = await play(ScriptedPolicy(script, sees=True), tools=[photograph])
    shown = trajectory.messages[2]
    assert [part["type"] for part in shown["content"]] == ["text", "image"]
    assert shown["content"][1]["image"] == Image(b"png")
    assert trajectory.turns[0].tool_results[0].images == (Image(b"png"),)


async def test_a_generation_longer_than_asked_for_is_refused():
    class Long(ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            return Generation([1] * (sampling.max_tokens + 1), None, "length", 0)

    def script(prompt, turn):
        return "x"

    with pytest.raises(Exception, match="at most 512 were requested"):
        await play(Long(script, limited=True))
