"""The shipped model: it can call tools, and does not win without training."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agentfly.core.messages import Message
from agentfly.formats.chat.control_tokens import ControlTokens
from agentfly.formats.chat.prefix_stability import ProbeExchange
from agentfly.formats.chat.template_format import TemplateChatFormat
from agentfly.policies.catalog import resolve_model
from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.policies.load import load_policy
from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.rollouts.run import evaluate
from agentfly.tasks.stockroom import eval_tasks, hermes_agent, stockroom_reward

needs_sandbox = pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script that makes the model."""
    path = Path(__file__).parents[2] / "scripts/make_tiny.py"
    spec = importlib.util.spec_from_file_location("make_tiny", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up while they are made
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return HFTokenizer.load(resolve_model("tiny"))


def test_the_model_is_a_few_megabytes():
    assert sum(file.stat().st_size for file in resolve_model("tiny").iterdir()) < 4e6


def test_the_markers_of_turns_and_calls_are_control_tokens(tokenizer):
    assert set(tokenizer.control_tokens) == {"<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"}
    assert tokenizer.eos_ids == (tokenizer.control_tokens["<|im_end|>"],)


def test_any_text_is_encoded_without_loss(tokenizer):
    text = 'naïve  {"x": [1, "zwölf"]}\n\t<tool_call> 漢字 <|im_end|>\n'
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.control_tokens.values())


def test_a_word_has_the_same_tokens_at_every_position(tokenizer):
    word = tokenizer.encode_text("honey")
    assert len(word) == 1
    for text in ("the honey?", '{"item": "honey"}', "honey\n"):
        assert word[0] in tokenizer.encode_text(text)


def test_the_template_writes_calls_that_are_given_apart_from_the_text(tokenizer):
    function = {"name": "check", "arguments": {"item": "tea"}}
    rendered = tokenizer.apply_chat_template(
        [{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]
    )
    call = '<tool_call>\n{"name": "check", "arguments": {"item": "tea"}}\n</tool_call>'
    assert rendered == f"<|im_start|>assistant\n{call}<|im_end|>\n"


def test_the_dialogues_it_was_made_from_have_the_ids_of_rollouts(tokenizer, script):
    chance = random.Random(0)
    for kind in list(script.KINDS) * 10:
        dialogue = kind(chance)
        ids, sampled = script.encode(dialogue, tokenizer.hf)
        as_rolled_out, as_sampled = roll_out(dialogue, tokenizer)
        assert ids[: len(as_rolled_out)] == as_rolled_out
        assert tokenizer.decode(ids[len(as_rolled_out) :]) == "\n"
        assert sampled[: len(as_sampled)] == as_sampled
        assert not any(sampled[len(as_sampled) :])


EXCHANGE = ProbeExchange({"role": "assistant", "content": "call"}, ({"role": "tool", "content": "result"},))


def roll_out(dialogue: list[Message], tokenizer: HFTokenizer) -> tuple[list[int], list[bool]]:
    """Return the ids and the mask of a dialogue whose assistant turns are sampled."""
    chat = TemplateChatFormat(tokenizer, [EXCHANGE])
    ids: list[int] = []
    sampled: list[bool] = []
    unanswered: list[Message] = []
    for message in dialogue:
        if message["role"] != "assistant":
            unanswered.append(message)
            continue
        rendered = (
            chat.render_continuation(unanswered, after=ids, conversation=unanswered)
            if ids
            else chat.render_prompt(unanswered)
        ).ids
        said = [*ControlTokens(tokenizer).encode(message["content"]), *tokenizer.eos_ids]  # type: ignore[arg-type]
        ids += [*rendered, *said]
        sampled += [False] * len(rendered) + [True] * len(said)
        unanswered = []
    return ids, sampled


@needs_sandbox
@pytest.mark.slow
async def test_untrained_it_makes_sound_calls_and_rarely_wins():
    policy = load_policy("tiny", dtype="float32", threads=1, seed=0)
    async with policy:
        result = await evaluate(
            hermes_agent(), eval_tasks(), reward=stockroom_reward, attempts=4, temperature=1.0, policy=policy
        )
    calls = [record for trajectory in result.trajectories for turn in trajectory.turns for record in turn.tool_results]
    assert len(calls) >= 1.8 * len(result.trajectories)
    assert sum(record.failure is None for record in calls) >= 0.9 * len(calls)
    assert 0.05 <= result.metrics["success/mean"] <= 0.35
