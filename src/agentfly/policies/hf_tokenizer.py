"""HFTokenizer: a transformers fast tokenizer that keeps control tokens and text apart, with its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentfly.core.errors import ChatFormatError, PrerequisiteError
from agentfly.core.messages import Message
from agentfly.policies.hf_vision import HFVision
from agentfly.policies.policy import Vision

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""The names that templates use for an assistant's reasoning."""


class ChatTemplate:
    """Renders conversations as `transformers` does, but without copying and checking every message.

    The template runs in Jinja's sandbox. The time that it can read is the moment of its compilation, so a conversation
    that continues past midnight is rendered in the same way.

    Args:
        source: the Jinja template.
        variables: further variables of the template, such as ``bos_token``.

    Raises:
        TemplateError: the source is not a Jinja template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        environment = _environment()
        self._template = environment.from_string(source)
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> str:
        """Return a conversation as text.

        Raises:
            TemplateError, TypeError, ValueError, KeyError: the template rejects the conversation.
        """
        return self._template.render(
            messages=[_with_all_reasoning_names(message) for message in messages],
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
        )

    def literal_texts(self) -> list[str]:
        """Return the texts that the template may write: everything except its code."""
        return [text for _, kind, text in self._template.environment.lex(self.source) if kind in ("data", "string")]


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}``, which some templates put around the model's text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = datetime.now().strftime
    return environment


def _with_all_reasoning_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message without empty fields, with its reasoning under every name that templates use."""
    known = {name: value for name, value in message.items() if value is not None}
    reasoning = next((known[name] for name in REASONING_FIELDS if name in known), None)
    return known if reasoning is None else {**dict.fromkeys(REASONING_FIELDS, reasoning), **known}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(why: str) -> None:
    raise TemplateError(why)


_MARKUP = re.compile(r"<[|｜].*[|｜]>|</?s>|<(?:bos|eos|pad|unk|mask)>")
"""Spellings of control tokens, which vocabularies do not always mark as special."""

_LONG = 32_768
"""Number of characters from which on encoding takes milliseconds."""


class HFTokenizer:
    """Implements `agentfly.policies.policy.Tokenizer` with a tokenizer of the transformers library.

    The special tokens of the tokenizer are control tokens. So are the added tokens that end a text, that the model's
    chat template writes (such as ``<tool_call>``, which many tokenizers do not mark as special), or that are spelled as
    markup (``<|…|>``, ``</s>`` and the like). Text that spells one of them is encoded as ordinary text. Added tokens of
    white space only, such as runs of spaces, are text, even if a template writes them to indent.

    Args:
        tokenizer: the tokenizer.
        vision: how images are shown to the model, if it takes images.
        eos_ids: further ids at which the model stops, beside the tokenizer's own end of text.

    Attributes:
        eos_ids: all ids at which the model stops, the tokenizer's own first.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, vision: Vision | None = None, *, eos_ids: Sequence[int] = ()
    ) -> None:
        self.hf = tokenizer
        self.vision = vision
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.eos_ids = tuple(dict.fromkeys([*own, *(one for one in eos_ids if one in self.vocabulary_ids)]))
        written = self._template_texts()
        control = {
            token_id: added
            for token_id, added in tokenizer.added_tokens_decoder.items()
            if added.special
            or token_id in self.eos_ids
            or _MARKUP.fullmatch(added.content)
            or (added.content.strip() and any(added.content in text for text in written))
        }
        self._control = {added.content: token_id for token_id, added in control.items()}
        self._control_ids = frozenset(self._control.values())
        self._greedy = {
            added.content: (added.lstrip, added.rstrip) for added in control.values() if added.lstrip or added.rstrip
        }
        self._text_tokenizer = _with_control_as_text(tokenizer.backend_tokenizer, self._control_ids)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load the tokenizer of a model directory.

        Raises:
            PrerequisiteError: the directory has no tokenizer, or only one without a fast form.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise PrerequisiteError(f"{path} holds no tokenizer that transformers can load: {error}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise PrerequisiteError(
                f"The tokenizer in {path} ({type(tokenizer).__name__}) has no fast form (tokenizer.json), which is "
                "needed to keep text and control tokens apart. Save it once from transformers with a fast tokenizer."
            )
        legacy_template = path / "chat_template.json"  # older models with vision have it there
        if not tokenizer.chat_template and legacy_template.is_file():
            tokenizer.chat_template = json.loads(legacy_template.read_text(encoding="utf-8"))["chat_template"]
        return cls(tokenizer, HFVision.of(path, tokenizer), eos_ids=_eos_of(path))

    def encode_text(self, text: str) -> list[int]:
        """Encode ordinary text that follows a control token. Nothing in it becomes a control token."""
        ids = self._ids(text)
        if self._control_ids.isdisjoint(ids):
            return ids
        # Some Unigram vocabularies can spell a control token as an ordinary piece. Encode its text in two halves.
        for content in self._control:
            if (found := text.find(content)) >= 0 and len(content) > 1:
                middle = found + 1
                return self.encode_text(text[:middle]) + self.encode_text(text[middle:])
        # The tokenizer normalised other characters to a control token. Their text is dropped, so that it has no effect.
        return [token_id for token_id in ids if token_id not in self._control_ids]

    def _ids(self, text: str) -> list[int]:
        ids: list[int]
        if len(text) < _LONG:
            ids = self._text_tokenizer.encode(text, add_special_tokens=False).ids
        else:  # encoding a batch releases the interpreter's lock, so that other threads can run
            ids = self._text_tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, control tokens included. Invalid bytes become U+FFFD."""
        text: str = self._text_tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    @cached_property
    def vocabulary_ids(self) -> Collection[int]:
        """The ids that have a token."""
        found = frozenset(self.hf.get_vocab().values())
        whole = range(max(found, default=-1) + 1)
        return whole if len(found) == len(whole) else found

    @property
    def control_tokens(self) -> dict[str, int]:
        """The control tokens by their text, with their ids."""
        return dict(self._control)

    @property
    def stripping_tokens(self) -> dict[str, tuple[bool, bool]]:
        """Control tokens that strip white space: for each, whether before and whether after it."""
        return dict(self._greedy)

    @property
    def chat_template(self) -> str | None:
        """The text of the model's chat template, the one for conversations with tools; None if it has none."""
        return self._template_with_tools.source if self.hf.chat_template else None

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Render a conversation and the definitions of ``tools`` as text, by the model's own chat template.

        Raises:
            ChatFormatError: the model has no chat template, or the template rejects the conversation.
        """
        template = self._template_with_tools if tools else self._template
        try:
            return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ChatFormatError(
                f"The chat template of {self.hf.name_or_path!r} rejects a conversation of the roles {roles}: {error}"
            ) from error

    @cached_property
    def _template(self) -> ChatTemplate:
        return self._compiled(None)

    @cached_property
    def _template_with_tools(self) -> ChatTemplate:
        """The template for conversations with tools. Some models have a separate one."""
        return self._compiled([{}])

    def _compiled(self, tools: list[dict[str, Any]] | None) -> ChatTemplate:
        if not self.hf.chat_template:
            raise ChatFormatError(
                f"The model {self.hf.name_or_path!r} has no chat template; it is probably a base model. Use its "
                "instruct version, or put a chat_template.jinja next to its tokenizer.json."
            )
        try:
            return ChatTemplate(self.hf.get_chat_template(tools=tools), self.hf.special_tokens_map)
        except (TemplateError, ValueError) as error:
            raise ChatFormatError(f"The chat template of {self.hf.name_or_path!r} cannot be used: {error}") from error

    def _template_texts(self) -> list[str]:
        """Return the texts that the model's chat templates may write."""
        try:
            templates = (self._template, self._template_with_tools) if self.hf.chat_template else ()
            return [text for template in templates for text in template.literal_texts()]
        except ChatFormatError:
            return []  # rendering reports the error


def _eos_of(path: Path) -> list[int]:
    """Return the ids at which a model stops, from its generation settings or else from its configuration."""
    for name in ("generation_config.json", "config.json"):
        file = path / name
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for section in (settings, settings.get("text_config") or {}):
            if (found := section.get("eos_token_id")) is not None:
                return [int(one) for one in (found if isinstance(found, list) else [found])]
    return []


def _with_control_as_text(backend: FastTokenizer, control_ids: frozenset[int]) -> FastTokenizer:
    """Return a copy of a tokenizer that reads control tokens in a text as their characters.

    A SentencePiece vocabulary puts a space before the first word of a text. Text that is encoded here always follows a
    control token, so it gets no such space. Decoding keeps all spaces.
    """
    settings = json.loads(backend.to_str())
    for added in settings["added_tokens"]:
        added["special"] = added["id"] in control_ids
    settings["truncation"] = settings["padding"] = None
    before = settings["pre_tokenizer"]
    if before and before["type"] == "Metaspace" and before["prepend_scheme"] == "first":
        before["prepend_scheme"] = "never"
        decoder = settings["decoder"]
        if decoder and decoder["type"] == "Sequence":
            decoder["decoders"] = [step for step in decoder["decoders"] if step["type"] != "Strip"]
        elif decoder and decoder["type"] == "Metaspace":
            decoder["prepend_scheme"] = "never"
    copy: FastTokenizer = FastTokenizer.from_str(json.dumps(settings))
    copy.encode_special_tokens = True
    return copy
