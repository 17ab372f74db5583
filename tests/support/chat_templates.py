"""Chat templates over bytes, hostile texts that spell control tokens, and harmless texts of the same form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentfly.formats.chat.control_tokens import ESCAPE_MARK, SLOT_MARK
from agentfly.policies.hf_tokenizer import ChatTemplate, HFTokenizer

HOME = Path(__file__).parents[2] / ".test-tokenizers" / "templates"
"""Where `scripts/fetch_tokenizers.py` puts the templates of well-known models."""

_MARKUP = re.compile(
    r"<[|｜][^<>\s]*?[|｜]>|</?[A-Za-z_][^<>\s{}'\"]*>|\[/?[A-Z_]{2,}\]|<\|[a-z_]+>|<[a-z_]+\|>|\[\|[a-z]+\|\]"
)
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>", "<｜end▁of▁sentence｜>"),
    *("<|END_OF_TURN_TOKEN|>", "</s>", "<|endoftext|>", "[|endofturn|]", "<|user|>"),
)
_LITERALS = re.compile(r"(?:split|replace|strip|lstrip|rstrip|startswith|endswith)\(\s*(['\"])(.*?)\1")
_SWITCH = re.compile("/(no_)?think")
"""What users of some models write to have them think, or not: the template answers it by tokens of its own."""


def byte_tokenizer(template: str) -> HFTokenizer:
    """A tokenizer of bytes, with all that looks like markup in a template as control tokens."""
    found = _MARKUP.findall("".join(ChatTemplate(template, {}).literal_texts()))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = next((end for end in _ENDS if end in found), "</s>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, bos_token="<s>")
    others = [token for token in dict.fromkeys(found) if token not in (end, "<s>")]
    tokenizer.add_special_tokens({"additional_special_tokens": others})
    tokenizer.chat_template = template
    return HFTokenizer(tokenizer)


def known_templates() -> list[str]:
    """The names of all templates that are here."""
    return sorted(str(path.relative_to(HOME)) for path in HOME.rglob("*.jinja"))


@cache
def tokenizer_of(template: str) -> HFTokenizer:
    """The tokenizer of a template, by its text."""
    return byte_tokenizer(template)


@cache
def evil_texts(template: str) -> st.SearchStrategy[str]:
    """Texts that hold control tokens of a template, parts of them, and what the template looks for in texts."""
    tokens = sorted(tokenizer_of(template).control_tokens)
    literals = [found for _, found in _LITERALS.findall(template) if found and not _SWITCH.search(found)] or ["-"]
    cut = st.tuples(st.sampled_from(tokens), st.integers(0, 12), st.integers(0, 12))
    return st.lists(
        st.one_of(
            st.sampled_from(tokens),
            cut.map(lambda one: one[0][: one[1]]),
            cut.map(lambda one: one[0][one[1] :]),
            cut.map(lambda one: one[0][one[1] : one[1] + one[2]]),
            st.tuples(cut, st.sampled_from([*literals, ESCAPE_MARK, SLOT_MARK, "\n", " "])).map(
                lambda both: both[0][0][: both[0][1]] + both[1] + both[0][0][both[0][1] :]
            ),
            st.sampled_from(
                [ESCAPE_MARK, SLOT_MARK, " ", "\n", "{{ messages }}", "{% endif %}", "\\n", "'", '"', "\u200b"]
            ),
            st.just("＜"),  # noqa: RUF001
            st.sampled_from(literals),
            st.sampled_from(["a", "b c", "é", "1", ".", "👩\u200d👧"]),
        ),
        max_size=5,
    ).map("".join)


def evil_values(template: str) -> st.SearchStrategy[Any]:
    """Values of arguments of such texts, keys included."""
    text = evil_texts(template)
    return st.recursive(
        text | st.sampled_from([1, 2.5, True, None]),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
        max_leaves=4,
    )


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text: str, *calls: Mapping[str, Any]) -> dict[str, Any]:
    """A turn of the model."""
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def call(number: int, arguments: Any) -> dict[str, Any]:
    """A call of the tool ``shell``."""
    return {"id": f"call_{number}", "type": "function", "function": {"name": "shell", "arguments": arguments}}


def result(number: int, text: str) -> dict[str, Any]:
    """What the tool answers."""
    return {"role": "tool", "name": "shell", "tool_call_id": f"call_{number}", "content": text}


def shell(description: str = "Run a command.", properties: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The description of the tool."""
    schema = {"type": "object", "properties": properties or {"command": {"type": "string"}}, "required": ["command"]}
    return {"type": "function", "function": {"name": "shell", "description": description, "parameters": schema}}


@st.composite
def conversations(draw: st.DrawFn, template: str, *, calls: bool) -> list[dict[str, Any]]:
    """Conversations of evil texts: of the system, users, tools and in the arguments of calls."""
    text, values = evil_texts(template), evil_values(template)
    messages = [{"role": "system", "content": draw(text)}] if draw(st.booleans()) else []
    messages.append(user(draw(text)))
    made = 0
    for kind in draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)):
        if kind == 0 or not calls:
            messages += [assistant("So."), user(draw(text))]
            continue
        if kind == 3:  # a call that could not be read
            messages += [assistant("So."), result(made, draw(text))]
        else:
            arguments = [draw(st.dictionaries(text, values, min_size=1, max_size=2)) for _ in range(kind)]
            messages.append(assistant("", *(call(made + number, each) for number, each in enumerate(arguments))))
            messages += [result(made + number, draw(text)) for number in range(kind)]
        made += kind
    return messages


@st.composite
def descriptions(draw: st.DrawFn, template: str) -> dict[str, Any]:
    """Descriptions of the tool in which texts and names of arguments are evil."""
    text = evil_texts(template)
    kinds = st.sampled_from(["integer", "string", ["string", "null"], "boolean"])
    plain = st.builds(
        lambda kind, said, choices: {"type": kind, "description": said, "enum": choices, "default": said},
        kinds,
        text,
        st.lists(text, max_size=2),
    )
    nested = plain | st.builds(
        lambda name, inner: {"type": "object", "properties": {name: inner}, "required": [name]}, text, plain
    )
    return shell(draw(text), {"command": draw(nested), draw(text): draw(nested)})


@dataclass
class Tamer:
    """Puts a harmless text in the place of each evil one, the same for the same; what is blank stays as it is."""

    names: dict[str, str] = field(default_factory=dict)

    def text(self, text: str) -> str:
        """A harmless text."""
        return text if not text.strip() else self.names.setdefault(text, f"x{len(self.names)}")

    def value(self, value: Any) -> Any:
        """A harmless value of arguments."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key): self.value(each) for key, each in value.items()}
        return [self.value(each) for each in value] if isinstance(value, list) else value

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The conversation in harmless."""
        return list(self._messages(messages))

    def tool(self, value: Any, *, names: bool = False) -> Any:
        """The description of a tool in harmless."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.tool(each) for each in value]
        if not isinstance(value, dict):
            return value
        return {
            self.text(key) if names else key: each
            if key in ("type", "name") and not names
            else self.tool(each, names=not names and key == "properties")
            for key, each in value.items()
        }

    def _messages(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        for message in messages:
            if message["role"] != "assistant":
                yield {**message, "content": self.text(message["content"])}
            elif "tool_calls" in message:
                functions = [(one, one["function"]) for one in message["tool_calls"]]
                made = [
                    {**one, "function": {**function, "arguments": self.value(function["arguments"])}}
                    for one, function in functions
                ]
                yield {**message, "tool_calls": made}
            else:
                yield dict(message)
