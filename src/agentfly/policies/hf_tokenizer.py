"""HFTokenizer: a transformers fast tokenizer that keeps control tokens and text apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jinja2 import Environment, TemplateError
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentfly.errors import ChatFormatError, PrerequisiteError
from agentfly.messages import Message


class HFTokenizer:
    """Implements `agentfly.policies.policy.Tokenizer` over a tokenizer of the transformers library.

    Control tokens are the special tokens of the tokenizer and, besides, those added tokens that the model's chat
    template writes (such as ``<tool_call>``, which many tokenizers do not mark as special). Text that spells one of
    them is encoded as ordinary text. Added tokens of white space only, such as runs of blanks, are text, however a
    template is indented.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.hf = tokenizer
        written = _written_by(tokenizer.chat_template)
        self._control = {
            added.content: token_id
            for token_id, added in tokenizer.added_tokens_decoder.items()
            if added.special or (added.content.strip() and any(added.content in text for text in written))
        }
        self._control_ids = frozenset(self._control.values())
        self._text_tokenizer = _with_control_as_text(tokenizer.backend_tokenizer, self._control_ids)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The tokenizer of a model directory.

        Raises:
            PrerequisiteError: there is none, or only one without a fast form.
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
        return cls(tokenizer)

    def encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text: nothing in it becomes a control token."""
        ids: list[int] = self._text_tokenizer.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        # A vocabulary that can spell a control token as an ordinary piece (some Unigram ones can): encode it in halves.
        for content in self._control:
            if (found := text.find(content)) >= 0 and len(content) > 1:
                middle = found + 1
                return self.encode_text(text[:middle]) + self.encode_text(text[middle:])
        # The tokenizer made it of other characters, by normalising them; what they said is lost rather than obeyed.
        return [token_id for token_id in ids if token_id not in self._control_ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens included; invalid bytes become U+FFFD."""
        text: str = self.hf.backend_tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    @property
    def control_tokens(self) -> dict[str, int]:
        """The control tokens, text to id."""
        return dict(self._control)

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text, if the tokenizer has one."""
        eos: int | None = self.hf.eos_token_id
        return eos

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """A conversation as text, by the model's own chat template, which describes ``tools`` too.

        Raises:
            ChatFormatError: the model has no chat template, or the template refuses the conversation.
        """
        if not self.hf.chat_template:
            raise ChatFormatError(
                f"The model {self.hf.name_or_path!r} has no chat template; it is probably a base model. Use its "
                "instruct version, or put a chat_template.jinja next to its tokenizer.json."
            )
        try:
            template: Any = self.hf.apply_chat_template
            text: str = template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ChatFormatError(
                f"The chat template of {self.hf.name_or_path!r} refuses a conversation of the roles {roles}: {error}"
            ) from error
        return text


def _written_by(template: str | dict[str, str] | None) -> list[str]:
    """The texts that a chat template, or each of several by name, writes: all but its code."""
    if not template:
        return []
    if isinstance(template, dict):
        return [text for one in template.values() for text in _written_by(one)]
    try:
        return [text for _, kind, text in Environment().lex(template) if kind in ("data", "string")]
    except TemplateError:
        return [template]  # rendering will say what is wrong with it; until then, all of it counts


def _with_control_as_text(backend: FastTokenizer, control_ids: frozenset[int]) -> FastTokenizer:
    """A copy of a tokenizer that reads control tokens in a text as the characters they consist of."""
    settings = json.loads(backend.to_str())
    for added in settings["added_tokens"]:
        added["special"] = added["id"] in control_ids
    settings["truncation"] = settings["padding"] = None
    copy: FastTokenizer = FastTokenizer.from_str(json.dumps(settings))
    copy.encode_special_tokens = True
    return copy
