"""The history modes: dropped reasoning, rewritten calls, and sequence breaks."""

import copy

import jinja2
import pytest

from agentfly.core.errors import ChatFormatError
from agentfly.formats.chat.prefix_stability import ProbeExchange, drift_from_whole
from agentfly.formats.chat.template_capabilities import detect_capabilities
from agentfly.formats.chat.template_format import TemplateChatFormat
from agentfly.policies.hf_tokenizer import ChatTemplate
from agentfly.policies.policy import Generation
from agentfly.policies.scripted import ByteTokenizer
from agentfly.rollouts.token_recorder import ChainStrategy, TokenRecorder

IM_START, IM_END = 256, 257


class TemplateTokenizer(ByteTokenizer):
    """The byte tokenizer with a Jinja template of its own."""

    def __init__(self, template: str) -> None:
        self._template = ChatTemplate(template, {})

    def apply_chat_template(self, messages, *, tools=(), add_generation_prompt=False):
        try:
            return self._template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        except (jinja2.TemplateError, TypeError) as error:
            raise ChatFormatError(str(error)) from error


THINKING = """\
{% set last = namespace(question=-1) %}
{% for message in messages if message.role == 'user' %}{% set last.question = loop.index0 %}{% endfor %}
{% set seen = namespace(questions=-1) %}
{% for message in messages %}
{% if message.role == 'user' %}{% set seen.questions = seen.questions + 1 %}{% endif %}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content and seen.questions == last.question %}
{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{ message.content + '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Writes an assistant's thoughts only if they answer the last question."""

OPENING = THINKING.replace("assistant\\n'", "assistant\\n<think>\\n'")
"""The same, and the header of the assistant's turn opens thoughts."""


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def generation(text):
    ids = [*text.encode(), IM_END]
    return Generation(ids, [-0.5] * len(ids), "stop", 0)


class Talk:
    """A conversation under the strategy chain, its turns given by hand, as the rollout would keep them."""

    def __init__(self, template, history, answer=user):
        self.tokenizer = TemplateTokenizer(template)
        exchange = ProbeExchange(assistant("said"), [answer("answered")])  # type: ignore[arg-type]
        self.chat = TemplateChatFormat(self.tokenizer, [exchange], history=history)
        self.sequences = []  # type: ignore[var-annotated]
        self.recorder = TokenRecorder(self.sequences, max_tokens=10_000, stop_ids=self.chat.stop_ids)
        self.strategy = ChainStrategy(self.chat, self.recorder)
        self.view = []

    def turn(self, seen, said):
        self.view.append(seen)
        self.strategy.render_view(self.view)
        self.recorder.prompt_ids()
        self.recorder.append_sampled(generation(said))
        self.view.append(assistant(said))
        self.strategy.add_reply(self.view[-1])
        return self

    @property
    def texts(self):
        return [self.tokenizer.decode(sequence.ids) for sequence in self.sequences]


def test_kept_thoughts_stay_in_the_one_sequence_though_the_template_would_drop_them():
    talk = Talk(THINKING, "keep").turn(user("a?"), "<think>a</think>1").turn(user("b?"), "<think>b</think>2")
    assert len(talk.sequences) == 1
    assert talk.texts[0].count("<think>a</think>1") == 1
    assert talk.sequences[0].sampled_count == len("<think>a</think>1") + len("<think>b</think>2") + 2
    assert talk.chat.keeps_thoughts is False


def test_rewritten_history_begins_a_new_sequence_where_thoughts_are_dropped_and_each_token_is_sampled_once():
    talk = Talk(THINKING, "rewrite").turn(user("a?"), "<think>a</think>1").turn(user("b?"), "<think>b</think>2")
    first, second = talk.texts
    assert first.endswith("<think>a</think>1<|im_end|>")
    assert "<think>a" not in second
    assert second.startswith("<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n")
    assert [sequence.sampled_count for sequence in talk.sequences] == [
        len("<think>a</think>1") + 1,
        len("<think>b</think>2") + 1,
    ]


def test_rewritten_history_goes_on_in_the_sequence_while_the_template_keeps_thoughts():
    talk = Talk(THINKING, "rewrite", tool)
    talk.turn(user("a?"), "<think>a</think>1").turn(tool("r"), "<think>b</think>2")
    assert len(talk.sequences) == 1
    assert "<think>a</think>1<|im_end|>\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n" in talk.texts[0]


def test_what_was_sampled_stays_as_it_was_where_the_template_would_space_it_otherwise():
    said = "<think>  a\n</think>\n\n\n1"
    talk = Talk(THINKING, "rewrite", tool).turn(user("a?"), said).turn(tool("r"), "2")
    assert len(talk.sequences) == 1
    assert said in talk.texts[0]


def test_a_reply_without_thoughts_breaks_nothing():
    talk = Talk(THINKING, "rewrite").turn(user("a?"), "1").turn(user("b?"), "2").turn(user("c?"), "3")
    assert len(talk.sequences) == 1


def test_a_template_that_forgets_old_answers_is_followed_if_history_is_to_be_rewritten():
    forgets = """\
{% for message in messages %}
{% set text = message.content if loop.last or message.role == 'assistant' else '(left out)' %}
{{ '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
    with pytest.raises(ChatFormatError, match="history='rewrite'"):
        Talk(forgets, "keep")
    talk = Talk(forgets, "rewrite").turn(user("a?"), "1").turn(user("b?"), "2").turn(user("c?"), "3")
    assert len(talk.sequences) == 3
    assert talk.texts[1].count("(left out)") == 1


@pytest.mark.parametrize(
    ("template", "sampled"),
    [(OPENING, "2+2 is 4.\n</think>\n\nAnswer: 4"), (THINKING, "<think>\n2+2 is 4.\n</think>\n\nAnswer: 4")],
)
def test_a_turn_has_one_block_of_thoughts_whether_or_not_the_header_opens_it(template, sampled):
    talk = Talk(template, "keep", tool).turn(user("2+2?"), sampled)
    reply = talk.chat.parse_reply([*sampled.encode(), IM_END])
    assert (reply.reasoning, reply.content, reply.text) == ("2+2 is 4.", "Answer: 4", sampled)
    again = talk.tokenizer.decode(talk.chat.render_prompt([*talk.view, tool("ok")]).ids)
    assert again.count("<think>\n2+2 is 4.\n</think>\n\nAnswer: 4<|im_end|>") == 1
    assert again.count("</think>") == 1


def test_thoughts_that_are_never_closed_go_on_to_the_end():
    talk = Talk(OPENING, "keep", tool)
    assert talk.chat.parse_reply(list(b"2+2 is")) == talk.chat.parse_reply(list(b"2+2 is"))
    assert (talk.chat.parse_reply(list(b"2+2 is")).reasoning, talk.chat.parse_reply(list(b"2+2 is")).content) == (
        "2+2 is",
        "",
    )


CALLING = """\
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{{ call.function.name + ' ' }}{{ ARGUMENTS }}
{%- endfor %}
{{ '<|im_end|>' }}
{% endfor %}"""

WRITTEN = {
    "arguments | tojson": '{"city": "Oslo"}',
    "arguments | string if arguments is mapping else arguments": '{"city": "Oslo"}',
    "'(' + arguments + ')'": '({"city": "Oslo"})',
}
ITEMS = "{% for key, value in arguments | items %}{{ key + '=' + value }}{% endfor %}"


@pytest.mark.parametrize("how", [*WRITTEN, "items"])
@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'])
def test_arguments_come_as_the_template_wants_them_in_whichever_shape_they_are_given(how, arguments):
    written = "city=Oslo" if how == "items" else WRITTEN[how]
    expression = ITEMS if how == "items" else f"{{{{ {how} }}}}"
    tokenizer = TemplateTokenizer(CALLING.replace("{{ ARGUMENTS }}", expression))
    called = {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [user("q"), {"role": "assistant", "content": "", "tool_calls": [called]}]
    before = copy.deepcopy(messages)
    assert f"weather {written}<|im_end|>" in tokenizer.apply_chat_template(
        detect_capabilities(tokenizer).adapt_messages(messages)
    )
    assert messages == before


def test_user_messages_in_a_row_are_one_where_the_template_wants_them_to_alternate():
    alternating = THINKING.replace(
        "{{ '<|im_start|>'",
        "{% if not loop.first and message.role == 'user' and loop.previtem.role == 'user' %}"
        "{{ raise_exception('alternate') }}{% endif %}\n{{ '<|im_start|>'",
    )
    talk = Talk(alternating, "keep").turn(user("a?"), "1")
    both = [user("result 0"), user("result 1")]
    ids = talk.chat.render_continuation(both, after=[IM_END], conversation=[*talk.view, *both]).ids
    assert talk.tokenizer.decode(ids).startswith("\n<|im_start|>user\nresult 0\n\nresult 1<|im_end|>")


def test_the_tools_that_a_template_describes_count_in_the_prompt():
    described = {"type": "function", "function": {"name": "weather", "description": "d" * 40, "parameters": {}}}
    chat = Talk(THINKING.replace("{% set last", "{{ tools | tojson if tools else '' }}{% set last", 1), "keep").chat
    bare, full = chat.render_prompt([user("q")]), chat.render_prompt([user("q")], [described])
    assert len(full.ids) > len(bare.ids) + 40


def test_drift_from_the_whole_is_shown_where_it_begins():
    talk = Talk(THINKING, "keep").turn(user("a?"), "<think>a</think>1").turn(user("b?"), "2")
    whole = talk.chat.render_prompt([*talk.view, user("c?")]).ids
    assert drift_from_whole(talk.chat, talk.tokenizer, whole, [*talk.view, user("c?")]) is None
    following = talk.chat.render_continuation(
        [user("c?")], after=talk.recorder.ids, conversation=[*talk.view, user("c?")]
    )
    drift = drift_from_whole(talk.chat, talk.tokenizer, [*talk.recorder.ids, *following.ids], [*talk.view, user("c?")])
    assert "Sent: 'sistant\\n<think>" in drift
