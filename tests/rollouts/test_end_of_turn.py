"""The end of a turn: every id at which the model's tokenizer or its generation settings stop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import agentfly as af
from agentfly.formats.chat.chat_format import ChatFormat
from agentfly.formats.chat.prefix_stability import ANSWER_EXCHANGE
from agentfly.formats.chat.template_format import TemplateChatFormat
from agentfly.policies.catalog import resolve_model
from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.policies.load import load_policy
from agentfly.policies.scripted import ByteTokenizer
from agentfly.rollouts.agent_runtime import chat_format_of

AGENT = af.Agent(model="tiny", tool_prompt="", max_turns=1, temperature=0)
ASKED = af.Task("What to do about eggs?")


def tiny_that_stops_at(folder: Path, ids: object, *, told_by: str = "generation_config.json") -> Path:
    """The model tiny, with other ids at which it is to stop."""
    shutil.copytree(resolve_model("tiny"), folder)
    for name in ("generation_config.json", "config.json"):
        settings = json.loads((folder / name).read_text())
        if name == told_by:
            (folder / name).write_text(json.dumps({**settings, "eos_token_id": ids}))
        elif name == "generation_config.json":
            (folder / name).unlink()
    return folder


@pytest.mark.parametrize("told_by", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(("ids", "stops"), [([0, 408], (0, 408)), ([408, 0], (0, 408)), (408, (0, 408)), (None, (0,))])
def test_every_id_of_the_generation_settings_ends_a_turn(told_by, ids, stops, tmp_path):
    tokenizer = HFTokenizer.load(tiny_that_stops_at(tmp_path / "model", ids, told_by=told_by))
    assert tokenizer.eos_ids == stops
    assert chat_format_of(AGENT, tokenizer).stop_ids == stops


def test_ids_that_no_token_has_end_nothing(tmp_path):
    assert HFTokenizer.load(tiny_that_stops_at(tmp_path / "model", [0, 100_000])).eos_ids == (0,)


async def test_a_turn_ends_where_transformers_ends_it(tmp_path):
    async with load_policy("tiny", dtype="float32") as policy:
        [before] = (await af.run(AGENT, [ASKED], policy=policy)).trajectories
    [turn] = before.turns
    stop = before.sequences[0].ids[turn.start + 2]
    model = tiny_that_stops_at(tmp_path / "model", [0, stop])
    policy = load_policy(model, dtype="float32")
    prompt = list(before.sequences[0].ids[: turn.start])
    expected = policy.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=64)[0].tolist()  # type: ignore[operator]
    assert len(expected) <= len(prompt) + 3
    async with policy:
        [after] = (await af.run(AGENT, [ASKED], policy=policy)).trajectories
    assert list(after.sequences[0].ids) == expected
    assert after.turns[0].ended_by_model


END, OTHER_END = 257, 259


class Stopping(ByteTokenizer):
    """Has a second token that ends turns, and is to stop at a bracket of ordinary text, too."""

    control_tokens = {**ByteTokenizer.control_tokens, "<|eot|>": OTHER_END}
    eos_ids = (END, OTHER_END, ord("}"))  # type: ignore[assignment]


@pytest.fixture
def chat() -> ChatFormat:
    return TemplateChatFormat(Stopping(), [ANSWER_EXCHANGE])


@pytest.mark.parametrize(
    ("end", "said", "closed"),
    [(END, "{1", True), (OTHER_END, "{1", True), (ord("}"), "{1}", False), (ord("2"), "{12", False)],
    ids=["the template's end", "another control token", "ordinary text", "no end at all"],
)
def test_a_control_token_ends_the_turn_and_ordinary_text_is_said_and_then_ended(chat, end, said, closed):
    assert chat.stop_ids == (END, OTHER_END, ord("}"))
    sampled = [*b"{1", end]
    assert chat.parse_reply(sampled).text == said
    answers = [{"role": "user", "content": "2"}]
    talk = [{"role": "user", "content": "0"}, {"role": "assistant", "content": said}, *answers]
    following = list(chat.render_continuation(answers, after=sampled, conversation=talk).ids)
    header = [ord("\n"), 256, *b"user\n2", END, ord("\n"), 256, *b"assistant\n"]
    assert following == (header if closed else [END, *header])
