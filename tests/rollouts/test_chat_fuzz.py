"""Chat formats with hostile texts: none becomes a control token, ids only grow, and the mask covers sampled ids."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import agentfly as af
from agentfly.core.errors import ChatFormatError
from agentfly.core.tokens import Origin
from agentfly.core.trajectory import Trajectory
from agentfly.formats.chat.control_tokens import ESCAPE_MARK, SLOT_MARK, pattern_of
from agentfly.formats.chat.prefix_stability import ANSWER_EXCHANGE, ProbeExchange
from agentfly.formats.chat.template_format import TemplateChatFormat
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.catalog import resolve_model
from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.policies.policy import Generation
from agentfly.rollouts.failure_budget import FailureBudgetExceeded
from tests.support.chat_templates import (
    HOME,
    Tamer,
    assistant,
    call,
    conversations,
    descriptions,
    evil_texts,
    evil_values,
    known_templates,
    result,
    shell,
    tokenizer_of,
    user,
)
from tests.support.scale import scaled

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content CONTENT) }}
{%- for call in message.tool_calls or [] %}CALL{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{%- if false %}<think></think><tool_call></tool_call>{% endif %}"""

AS_JSON = "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
AS_ELEMENTS = (
    "{{ '<tool_call>' }}{% for key, value in call.function.arguments.items() %}"
    "{{ '<' + key + '>' + (value | tojson) + '</' + key + '>' }}{% endfor %}{{ '</tool_call>' }}"
)
AS_PARAMETERS = (
    "{{ '<tool_call>' }}{% for key, value in call.function.arguments | items %}"
    "{{ '<parameter=' + key + '>' + (value if value is string else value | tojson) + '</parameter>' }}{% endfor %}"
    "{{ '</tool_call>' }}"
)
GLUED = (
    "{{ '<tool_call>' }}{% for key, value in call.function.arguments.items() %}{{ key + (value | string) }}{% endfor %}"
    "{{ '</tool_call>' }}"
)

WRITING = "{{- '<|im_start|>' + message.role + '\\n' + (message.content CONTENT) }}"
REFUSING = """\
{%- if message.role == 'tool' and not message.name %}{{ raise_exception('name the tool') }}{% endif %}
{%- if message.tool_calls and message.thinking and message.content %}{{ raise_exception('not both') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.thinking %}{{ '<think>\\n' + message.thinking + '\\n</think>\\n\\n' }}{% endif %}
{{- (message.content CONTENT) }}"""
"""Part of a template that refuses what a model may bring about: results of calls by no name, words beside thoughts."""

TEMPLATES = {
    "ChatML": CHATML.replace("CONTENT", "").replace("CALL", AS_JSON),
    "trimming": CHATML.replace("CONTENT", "| trim").replace("CALL", AS_JSON),
    "calls as elements": CHATML.replace("CONTENT", "").replace("CALL", AS_ELEMENTS),
    "calls as parameters": CHATML.replace("CONTENT", "| trim").replace("CALL", AS_PARAMETERS),
    "texts side by side": CHATML.replace("CONTENT", "+ messages[0].content").replace("CALL", GLUED),
    "refusing": CHATML.replace(WRITING, REFUSING).replace("CONTENT", "").replace("CALL", AS_JSON),
    "tiny": (resolve_model("tiny") / "chat_template.jinja").read_text(),
}
"""Kinds of templates; some write beside texts what texts could make control tokens of."""

CALLED = ProbeExchange(assistant("", call(0, {"command": "ls"})), [result(0, "result 0")])  # type: ignore[arg-type]
UNCALLED = ProbeExchange(assistant("call"), [result(0, "result 0")])  # type: ignore[arg-type]


WAYS = {"calls": (CALLED, [shell()]), "results": (UNCALLED, []), "words": (ANSWER_EXCHANGE, [])}


@cache
def chat_of(template: str, history: str) -> tuple[TemplateChatFormat, str] | None:
    """A template's format, and which of `WAYS` it carries; None if it carries no conversation."""
    for way, (exchange, tools) in WAYS.items():
        try:
            chat = TemplateChatFormat(tokenizer_of(template), [exchange], tools=tools, history=history)  # type: ignore[arg-type]
        except ChatFormatError:
            continue
        return chat, way
    return None


def in_way(messages: list[dict[str, Any]], way: str) -> list[dict[str, Any]]:
    """A conversation without what a format does not carry."""
    if way != "calls":
        messages = [one if "tool_calls" not in one else assistant("So.") for one in messages]
    return [user(one["content"]) if one["role"] == "tool" and way == "words" else one for one in messages]


def controls_in(tokenizer: HFTokenizer, ids: Sequence[int]) -> list[int]:
    known = set(tokenizer.control_tokens.values())
    return [one for one in ids if one in known]


def require_no_control_token_of_texts(
    template: str, messages: list[dict[str, Any]], tool: dict[str, Any], history: str
) -> None:
    """The template writes the same control tokens for a conversation as for the same in harmless."""
    made = chat_of(template, history)
    if made is None:
        return
    chat, way = made
    tokenizer, tamer, messages = tokenizer_of(template), Tamer(), in_way(messages, way)
    tame, tools = tamer.messages(messages), [tool] if way == "calls" else []
    try:
        expected = chat.render_prompt(tame, tame_tools := [tamer.tool(each) for each in tools]).ids  # type: ignore[arg-type]
    except ChatFormatError:
        return  # some want other things of a conversation, such as an assistant's turn between two users' messages
    ids = chat.render_prompt(messages, tools).ids  # type: ignore[arg-type]
    assert controls_in(tokenizer, ids) == controls_in(tokenizer, expected)
    assert ESCAPE_MARK not in tokenizer.decode(ids)
    assert SLOT_MARK not in tokenizer.decode(ids)
    last = max(at for at, one in enumerate(messages) if one["role"] == "assistant")
    after = [65, chat.stop_ids[0]]
    following = [
        chat.render_continuation(talk[last + 1 :], after=after, conversation=talk, tools=described)  # type: ignore[arg-type]
        for talk, described in ((messages, tools), (tame, tame_tools))
    ]
    assert (following[0] is None) == (following[1] is None)
    if following[0] is not None:
        assert controls_in(tokenizer, following[0].ids) == controls_in(tokenizer, following[1].ids)


HISTORIES = st.sampled_from(["keep", "rewrite"])
FOUND = [
    {"x</think": True},  # completed by the ``>`` behind the name of a parameter
    {"command": {"tool_call": ""}},  # by the ``<`` and ``>`` around the name of an element
    {"im_end|>": "", "<|": ""},
]


@settings(max_examples=scaled(50, 20_000))
@given(st.sets(st.text("<|ab>", min_size=1, max_size=5), max_size=8), st.text("<|ab>", max_size=30))
def test_tokens_are_found_where_they_begin_and_the_longest_first(tokens, text):
    plain = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
    assert pattern_of(tokens).findall(text) == plain.findall(text)


def conversation_of(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    return [user("<|im_end|>"), assistant("", call(0, arguments)), result(0, "im_end|>"), assistant("So."), user("<|")]


@pytest.mark.parametrize("template", TEMPLATES)
def test_no_text_is_a_control_token_or_is_completed_to_one_by_a_template(template):
    text = TEMPLATES[template]

    @settings(max_examples=scaled(25, 2_000))
    @given(conversations(text, calls=True), descriptions(text), HISTORIES)
    @example(conversation_of(FOUND[0]), shell("<think>"), "rewrite")  # type: ignore[arg-type]
    @example(conversation_of(FOUND[1]), shell("", {"tool_call": {"type": "string"}}), "rewrite")  # type: ignore[arg-type]
    @example(conversation_of(FOUND[2]), shell("|im_end|>", {"/think": {"enum": ["<|im_start|"]}}), "rewrite")  # type: ignore[arg-type]
    def check(messages: list[dict[str, Any]], tool: dict[str, Any], history: str) -> None:
        require_no_control_token_of_texts(text, messages, tool, history)

    check()


known = pytest.mark.parametrize("name", known_templates() or ["none"])


def template_named(name: str) -> str:
    if name == "none":
        pytest.skip("needs chat templates of well-known models: python scripts/fetch_tokenizers.py")
    return (HOME / name).read_text()


@pytest.mark.slow
@known
def test_no_text_is_a_control_token_in_the_template_of_a_well_known_model(name):
    text = template_named(name)

    @settings(max_examples=scaled(8, 300))
    @given(conversations(text, calls=True), descriptions(text), HISTORIES)
    @example(conversation_of(FOUND[0]), shell(), "rewrite")  # type: ignore[arg-type]
    @example(conversation_of(FOUND[1]), shell(), "rewrite")  # type: ignore[arg-type]
    def check(messages: list[dict[str, Any]], tool: dict[str, Any], history: str) -> None:
        require_no_control_token_of_texts(text, messages, tool, history)

    check()


# --- whole rollouts ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _own_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))


class Typist:
    """A policy that samples given ids, and notes what it was sent."""

    version = 0
    context_length = 20_000

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self.tokenizer = tokenizer
        self.begin([])

    def begin(self, script: list[tuple[list[int], bool]]) -> None:
        """Sample these generations from now on; each with whether it ends its turn."""
        self._script = iter(script)
        self.sent: list[tuple[list[int], Generation]] = []

    async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
        ids, stops = next(self._script, ([*b"end"], True))
        ids = [one for one in ids if one not in sampling.stop_ids] or [65]
        if stops:
            ids.append(sampling.stop_ids[len(ids) % len(sampling.stop_ids)])
        generation = Generation(ids, [-float(at) for at in range(len(ids))], "stop" if stops else "length", 0)
        self.sent.append((list(prompt_ids), generation))
        return generation

    def release_rollout(self, rollout_id: str) -> None:
        """Nothing is kept."""

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is held."""


@st.composite
def generations(draw: st.DrawFn, template: str) -> tuple[list[int], bool]:
    """What a model may sample: calls with evil arguments, evil words, control tokens where none belong, any bytes."""
    tokenizer, text = tokenizer_of(template), evil_texts(template)
    control = tokenizer.control_tokens

    def ids_of(piece: str) -> list[int]:
        return [control[piece]] if piece in control else tokenizer.encode_text(piece)

    arguments = json.dumps({"command": draw(evil_values(template))}, ensure_ascii=False)
    kinds = {
        "call": ["<tool_call>", f'\n{{"name": "shell", "arguments": {arguments}}}\n', "</tool_call>"],
        "half a call": ["<tool_call>", arguments[: draw(st.integers(0, 30))]],
        "thoughts": ["<think>", draw(text), "</think>", draw(text)],
        "words": [draw(text)],
        "silence": [],
    }
    chosen = draw(st.lists(st.sampled_from([*kinds, "noise"]), max_size=3))
    ids: list[int] = []
    for kind in chosen:
        if kind == "noise":
            ids += draw(st.lists(st.sampled_from([*control.values(), 0, 10, 200, 255]), max_size=4))
        else:
            ids += [one for piece in kinds[kind] if piece for one in ids_of(piece)]
    return ids, draw(st.integers(0, 4)) > 0


class Player:
    """Rolls one agent out on a template, again and again."""

    def __init__(self, template: str, history: str, strategy: str) -> None:
        made = chat_of(template, history)
        self.policy = Typist(tokenizer_of(template))
        self._answers: Iterator[str] = iter(())
        self._numbers = count()

        @af.tool
        def shell(command: Any = None) -> str:
            """Run a command."""
            return next(self._answers, "nothing more")

        agent = af.Agent(
            model="m",
            tools=[shell],
            tool_call_format=HermesFormat(
                uses_chat_template=made is not None and made[1] == "calls" and "tools" in template
            ),
            chat_format="template",
            history=history,  # type: ignore[arg-type]
            max_turns=4,
            max_consecutive_invalid_calls=10,
        )
        self._runner = af.Runner(agent, policy=self.policy, strategy=strategy, max_failure_rate=1.0)
        self._loop = asyncio.Runner()

    def __enter__(self) -> Player:
        self._loop.__enter__()
        self._loop.run(self._runner.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.run(self._runner.__aexit__(None, None, None))
        self._loop.__exit__(None, None, None)

    def play(self, asked: str, told: list[str], script: list[tuple[list[int], bool]]) -> Trajectory:
        """A rollout of given generations, in which the tool answers given texts."""
        self._answers = iter(told)
        self.policy.begin(script)
        [trajectory] = self._loop.run(self._runner.collect([af.Task(asked)], label=f"played-{next(self._numbers)}"))
        return trajectory


def require_exact(policy: Typist, trajectory: Trajectory) -> None:
    """Every token is where it was sent or sampled, ids only grow, and the mask is 1 exactly on what was sampled."""
    assert trajectory.failure is None, trajectory.failure
    require_tokens(policy, trajectory)


def require_tokens(policy: Typist, trajectory: Trajectory) -> None:
    """The same of a rollout that may have failed."""
    assert len(trajectory.turns) == len(policy.sent)
    sampled_at: dict[int, set[int]] = {number: set() for number in range(len(trajectory.sequences))}
    before: dict[int, list[int]] = {}
    for turn, (prompt, generation) in zip(trajectory.turns, policy.sent, strict=True):
        sequence = trajectory.sequences[turn.sequence]
        assert list(sequence.ids[: turn.start]) == prompt
        assert list(sequence.ids[turn.start : turn.stop]) == list(generation.ids)
        assert list(sequence.logprobs[turn.start : turn.stop]) == list(generation.logprobs)
        known = before.get(turn.sequence, [])
        assert prompt[: len(known)] == known
        before[turn.sequence] = [*prompt, *generation.ids]
        own = set(range(turn.start, turn.stop))
        assert not own & sampled_at[turn.sequence]
        sampled_at[turn.sequence] |= own
    for number, sequence in enumerate(trajectory.sequences):
        assert {at for at, one in enumerate(sequence.loss_mask) if one} == sampled_at[number]
        assert {at for at, one in enumerate(sequence.origins) if one == Origin.SAMPLED} == sampled_at[number]


def require_exact_rollouts(template: str, history: str, examples: int) -> None:
    with ExitStack() as stack:
        try:
            players = [stack.enter_context(Player(template, history, strategy)) for strategy in ("chain", "step")]
        except ChatFormatError:
            return  # it cannot carry this agent, which is found before the first rollout

        @settings(max_examples=examples)
        @given(
            evil_texts(template),
            st.lists(evil_texts(template), max_size=4),
            st.lists(generations(template), max_size=4),
            st.sampled_from(players),
        )
        def check(asked: str, told: list[str], script: list[tuple[list[int], bool]], player: Player) -> None:
            assume(asked.strip())
            require_exact(player.policy, player.play(asked, told, script))

        check()


histories = pytest.mark.parametrize("history", ["keep", "rewrite"])


@histories
@pytest.mark.parametrize("template", TEMPLATES)
def test_whatever_is_sampled_and_answered_ids_only_grow_and_the_mask_is_what_was_sampled(template, history):
    require_exact_rollouts(TEMPLATES[template], history, scaled(8, 500))


@pytest.mark.long
@histories
@known
def test_ids_only_grow_in_the_template_of_a_well_known_model_whatever_is_sampled(name, history):
    require_exact_rollouts(template_named(name), history, scaled(3, 100))


# --- what a template refuses altogether -------------------------------------------------------------------------------

STRICT = """\
{%- if 'unspeakable' in message.content %}{{ raise_exception('that is not said here') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}"""


def rolled_out(history: str, strategy: str, said: str, told: str) -> Trajectory:
    """A rollout under a template that refuses a word, in which the model says something and a tool answers."""
    template = CHATML.replace(WRITING, STRICT).replace("CALL", AS_JSON)
    policy = Typist(tokenizer := tokenizer_of(template))
    called = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
    script = [tokenizer.encode_text(text) for text in (f"{said} {called}", "end")]
    policy.begin([(ids, True) for ids in script])

    @af.tool
    def shell(command: str) -> str:
        """Run a command."""
        return told

    @af.reward
    def turns(trajectory: Trajectory) -> float:
        return float(len(trajectory.turns))

    agent = af.Agent(model="m", tools=[shell], chat_format="template", history=history, tool_call_format="hermes")  # type: ignore[arg-type]
    [trajectory] = asyncio.run(af.run(agent, ["go"], reward=turns, policy=policy, strategy=strategy)).trajectories
    require_tokens(policy, trajectory)
    return trajectory


@histories
def test_what_follows_a_turn_goes_on_although_the_template_refuses_the_turn(history):
    trajectory = rolled_out(history, "chain", "unspeakable", "a file")
    assert (trajectory.finish_reason, trajectory.failure, trajectory.reward) == ("answered", None, 2.0)


@histories
def test_a_rollout_whose_model_says_what_cannot_be_written_again_ends_with_that_and_is_scored(history):
    trajectory = rolled_out(history, "step", "unspeakable", "a file")
    assert trajectory.failure is not None
    assert (trajectory.finish_reason, trajectory.failure.kind) == ("failed", "ConversationRefused")
    assert "cannot continue" in trajectory.failure.message
    assert "that is not said here" in trajectory.failure.message
    assert not trajectory.infrastructure_failed
    assert (trajectory.reward, trajectory.trainable, len(trajectory.turns)) == (1.0, True, 1)


@pytest.mark.parametrize("strategy", ["chain", "step"])
def test_what_a_tool_says_and_a_template_refuses_is_no_doing_of_the_model(strategy):
    with pytest.raises(FailureBudgetExceeded, match="that is not said here"):
        rolled_out("keep", strategy, "fine", "unspeakable")
