"""Conversations rendered for a model: ids and masks equal those of the model's own rollout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import agentfly as af
from agentfly.agents.memory import Window
from agentfly.core.errors import ConfigError, ToolError
from agentfly.core.messages import ToolCall
from agentfly.core.trajectory import Trajectory
from agentfly.formats.chat.control_tokens import ControlTokens
from agentfly.policies.catalog import resolve_model
from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.policies.policy import Generation, Tokenizer
from agentfly.policies.scripted import ByteTokenizer, ScriptedPolicy
from agentfly.rollouts.run import run
from agentfly.rollouts.trajectory_rendering import CannotRender, TrajectoryRenderer

FAMILIES = Path(__file__).parents[2] / ".test-tokenizers"


@af.tool
def look(item: str) -> str:
    """Look at a shelf.

    Args:
        item: what is on it.
    """
    if item == "gold":
        raise ToolError("there is no <|im_end|> of gold")
    return f"{item}: low"


@af.reward
def fine() -> float:
    return 1.0


def agent(**changes) -> af.Agent:
    return af.Agent(**{"model": "tiny", "tools": [look], "tool_call_format": "hermes", "max_turns": 6, **changes})


def call(item: str) -> str:
    return agent().format.write("look", {"item": item})


class Typist(ScriptedPolicy):
    """Says what is written in the tokens that a model's own tokenizer would choose: a stand-in for that model."""

    def __init__(self, script: list[str], tokenizer: Tokenizer) -> None:
        super().__init__(script)
        self.tokenizer = tokenizer  # type: ignore[assignment]
        self._texts = iter(script)

    async def generate(self, prompt_ids, sampling, *, rollout_id, images=()) -> Generation:
        ids = [*ControlTokens(self.tokenizer).encode(next(self._texts)), sampling.stop_ids[0]]
        return Generation(ids, [0.0] * len(ids), "stop", 0)


@cache
def tokenizer_of(name: str) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer()
    if name == "tiny":
        return HFTokenizer.load(resolve_model("tiny"))
    if not (FAMILIES / name).is_dir():
        pytest.skip("needs tokenizers of well-known models: python scripts/fetch_tokenizers.py")
    return HFTokenizer.load(FAMILIES / name)


async def played(script: list[str], tokenizer: Tokenizer, strategy: str = "chain", **changes) -> Trajectory:
    policy = ScriptedPolicy(script, limited=True) if isinstance(tokenizer, ByteTokenizer) else Typist(script, tokenizer)
    result = await run(agent(**changes), ["What about tea?"], reward=fine, policy=policy, strategy=strategy)
    (trajectory,) = result.trajectories
    assert trajectory.failure is None, trajectory.failure
    return trajectory


def as_seen(trajectory: Trajectory) -> list[tuple]:
    sequences = [(list(one.ids), one.loss_mask) for one in trajectory.sequences]
    return [*sequences, *((turn.sequence, turn.start, turn.stop) for turn in trajectory.turns)]


SCRIPTS = {
    "an answer": ["It is low."],
    "a call and an answer": [call("tea"), "It is low."],
    "several calls, one refused by its tool": [f"Let me see.\n{call('tea')}\n{call('gold')}", call("milk"), "Both."],
    "a call that cannot be read": ['<tool_call>\n{"name": "look", "arguments"\n</tool_call>', "Sorry."],
}


@pytest.mark.parametrize("strategy", ["chain", "step"])
@pytest.mark.parametrize("family", ["bytes", "tiny", "qwen2.5", pytest.param("llama3.2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
async def test_what_a_model_said_is_rendered_with_the_ids_and_the_mask_it_was_sampled_with(script, family, strategy):
    tokenizer = tokenizer_of(family)
    trajectory = await played(script, tokenizer, strategy)
    rendered = TrajectoryRenderer(agent(), tokenizer, strategy=strategy, max_tokens=10_000).render(trajectory)
    assert as_seen(rendered) == as_seen(trajectory)
    assert trajectory.trainable
    assert rendered.trainable


async def test_what_one_model_said_is_rendered_for_another_as_if_it_had_said_it():
    tiny = tokenizer_of("tiny")
    script = SCRIPTS["several calls, one refused by its tool"]
    by_bytes = await played(script, ByteTokenizer())
    rendered = TrajectoryRenderer(agent(), tiny, max_tokens=1000).render(by_bytes)
    assert as_seen(rendered) == as_seen(await played(script, tiny))
    masked = [
        one for one, sampled in zip(rendered.sequences[0].ids, rendered.sequences[0].loss_mask, strict=True) if sampled
    ]
    said = tiny.decode(masked).replace("<|im_end|>", "")
    assert said == "".join(script)


async def test_a_turn_that_a_limit_cut_has_no_end_to_learn():
    trajectory = await played(["It is low, " * 20], ByteTokenizer(), max_tokens_per_turn=40)
    rendered = TrajectoryRenderer(agent(), ByteTokenizer(), max_tokens=10_000).render(trajectory)
    assert as_seen(rendered) == as_seen(trajectory)
    assert rendered.sequences[0].loss_mask[-1] == 1
    assert rendered.sequences[0].ids[-1] not in ByteTokenizer().eos_ids


async def test_the_calls_and_thoughts_that_an_endpoint_told_apart_are_written_as_this_model_writes_them():
    trajectory = await played([call("tea"), "Low."], ByteTokenizer())
    (first, last) = trajectory.turns
    told = replace(first, text="Let me see.", content=None, reasoning="Tea?", sequence=-1, start=0, stop=0)
    far = replace(trajectory, turns=[told, replace(last, sequence=-1, start=0, stop=0)], sequences=[])
    tiny = tokenizer_of("tiny")
    (sequence,) = TrajectoryRenderer(agent(), tiny, max_tokens=1000).render(far).sequences
    text = tiny.decode(sequence.ids)
    assert f"assistant\n<think>\nTea?\n</think>\n\nLet me see.\n{call('tea')}<|im_end|>" in text


@pytest.mark.parametrize(
    ("cause", "spoil"),
    [
        ("too_long", lambda one: one),
        ("no_turns", lambda one: replace(one, turns=[])),
        (
            "other_call_format",
            lambda one: replace(
                one,
                turns=[
                    replace(
                        turn, text="look(tea)", tool_results=[replace(r, call=ToolCall("c", "look", {"item": "tea"}))]
                    )
                    for turn in one.turns
                    for r in turn.tool_results
                ],
            ),
        ),
    ],
)
async def test_what_cannot_be_rendered_is_told_by_its_cause(cause, spoil):
    trajectory = spoil(await played([call("tea"), "Low."], ByteTokenizer()))
    renderer = TrajectoryRenderer(agent(), ByteTokenizer(), max_tokens=100 if cause == "too_long" else 10_000)
    with pytest.raises(CannotRender) as refusal:
        renderer.render(trajectory)
    assert refusal.value.cause == cause


def test_an_agent_that_forgets_is_refused_since_nobody_knows_what_it_saw():
    with pytest.raises(ConfigError, match="memory is Window"):
        TrajectoryRenderer(agent(memory=Window(turns=2)), ByteTokenizer(), max_tokens=1000)


async def test_a_subagents_turns_are_rendered_in_a_conversation_of_their_own():
    helper = agent(system_prompt="You help.")
    chief = agent(tools=[helper.as_tool("Asks the helper.", name="help")], system_prompt="You decide.")
    asked = chief.format.write("help", {"request": "How is tea?"})
    script = iter([asked, call("tea"), "Low.", "It is low."])
    policy = ScriptedPolicy(lambda prompt, turn: next(script))
    (trajectory,) = (await run(chief, ["What about tea?"], reward=fine, policy=policy)).trajectories
    assert trajectory.failure is None
    assert {turn.agent for turn in trajectory.turns} == {"", "help"}
    rendered = TrajectoryRenderer(chief, ByteTokenizer(), max_tokens=10_000).render(trajectory)
    assert sorted(as_seen(rendered)[:2]) == sorted(as_seen(trajectory)[:2])
    for turn, again in zip(trajectory.turns, rendered.turns, strict=True):
        spoken = trajectory.sequences[turn.sequence].ids[turn.start : turn.stop]
        assert rendered.sequences[again.sequence].ids[again.start : again.stop] == spoken
