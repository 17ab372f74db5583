"""The tool-call formats by name, and the detection of a model's own format from its chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.core.errors import ConfigError, suggest_name
from agentfly.core.messages import Message, ToolCall
from agentfly.formats.toolcalls.action import ActionFormat
from agentfly.formats.toolcalls.code_block import CodeBlockFormat
from agentfly.formats.toolcalls.deepseek import CALLS, DeepSeekFormat
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.formats.toolcalls.llama_json import LlamaJsonFormat
from agentfly.formats.toolcalls.llama_pythonic import LlamaPythonicFormat
from agentfly.formats.toolcalls.mistral import ARGUMENTS, OPEN, MistralFormat
from agentfly.formats.toolcalls.qwen3_coder import Qwen3CoderFormat
from agentfly.formats.toolcalls.react import ReActFormat
from agentfly.formats.toolcalls.tags import TagsFormat
from agentfly.formats.toolcalls.tool_call_format import (
    ToolCallFormat,
    ToolDescription,
    message_with_calls,
    tool_message,
)


@dataclass(frozen=True)
class ModelDefaultFormat:
    """The format ``"model"``: a placeholder for the format that the model was trained on.

    It suffices where the model's chat format describes the tools and parses the calls itself. Otherwise
    `resolve_format` replaces it by the format detected in the model's chat template. It cannot parse or write text.
    """

    uses_chat_template = True

    @property
    def name(self) -> str:
        """The name by which an agent selects the format."""
        return "model"

    def instructions(self, tools: Sequence[ToolDescription]) -> str:
        """Return an empty text: the chat template describes the tools."""
        return ""

    def parse(self, text: str, tools: Sequence[ToolDescription], *, first_call: int = 0) -> tuple[ToolCall, ...]:
        """Fail: calls cannot be parsed without the model.

        Raises:
            ConfigError: always.
        """
        raise self._unknown()

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Fail: calls cannot be written without the model.

        Raises:
            ConfigError: always.
        """
        raise self._unknown()

    def assistant_message(self, text: str, calls: Sequence[ToolCall]) -> Message:
        """Return a message with ``text``, which has no calls in it, and the calls as ``tool_calls``."""
        readable = [call for call in calls if call.arguments is not None]
        return message_with_calls(text, readable) if readable else {"role": "assistant", "content": text}

    def result_message(self, call: ToolCall, observation: str) -> Message:
        """Return a message of role ``tool`` with the call's id."""
        return tool_message(call, observation)

    def _unknown(self) -> ConfigError:
        return ConfigError(
            "tool_call_format='model' stands for the model's own format, which is known once the model is. Name the "
            "format itself to read or write its text, for instance 'hermes'."
        )


_FORMATS: dict[str, Callable[[], ToolCallFormat]] = {
    "action": ActionFormat,
    "code_block": CodeBlockFormat,
    "deepseek": DeepSeekFormat,
    "hermes": HermesFormat,
    "llama_json": LlamaJsonFormat,
    "llama_pythonic": LlamaPythonicFormat,
    "mistral": MistralFormat,
    "model": ModelDefaultFormat,
    "qwen3_coder": Qwen3CoderFormat,
    "react": ReActFormat,
    "tags": TagsFormat,
}
_MEMBERS = ("name", "uses_chat_template", "instructions", "parse", "write", "assistant_message", "result_message")
_DESCRIBES_TOOLS = re.compile(r"\btools\b")
_HERMES_CALL = re.compile(r"[\"']name\\?[\"']\s*:|[\"']arguments\\?[\"']\s*:")
_OTHER_CALLS = re.compile(r"<arg_key>|<tool_calls>")  # of GLM and Apriel
_LLAMA_CALL = re.compile(r"[\"']name\\?[\"']\s*:\s[^{}]{0,80}[\"']parameters\\?[\"']\s*:")


def tool_call_format(asked: str | ToolCallFormat) -> ToolCallFormat:
    """Return the tool-call format with this name, or the given format.

    Raises:
        ConfigError: the name is unknown, or the value is not a format.
    """
    if isinstance(asked, str):
        if asked in _FORMATS:
            return _FORMATS[asked]()
        raise ConfigError(f"There is no tool-call format {asked!r}. {suggest_name(asked, _FORMATS)}")
    if isinstance(asked, ToolCallFormat) and not isinstance(asked, type):
        return asked
    missing = [name for name in _MEMBERS if not hasattr(asked, name)]
    if isinstance(asked, type) and not missing:
        raise ConfigError(f"{asked.__name__} is a class. Make an instance: tool_call_format={asked.__name__}().")
    if len(missing) < len(_MEMBERS):
        raise ConfigError(f"{asked!r:.100} is no whole tool-call format: it lacks {', '.join(missing)}.")
    raise ConfigError(
        f"{asked!r} is no tool-call format. Give one of the names {', '.join(_FORMATS)}, or an object with the "
        "members of agentfly.formats.toolcalls.tool_call_format.ToolCallFormat."
    )


def detect_format(template: str) -> ToolCallFormat | None:
    """Detect the tool-call format of a model's chat template; None if it is unknown.

    ``uses_chat_template`` of the result says whether the template both describes tools and writes calls. Otherwise the
    format's own instructions describe them, as for DeepSeek V3.

    Args:
        template: the template's Jinja source.
    """
    complete = "tool_calls" in template and _DESCRIBES_TOOLS.search(template) is not None
    if "<tool_call>" in template and "<function=" in template and "<parameter=" in template:
        return Qwen3CoderFormat(uses_chat_template=complete)
    if "<tool_call>" in template and not _OTHER_CALLS.search(template) and _HERMES_CALL.search(template):
        return HermesFormat(uses_chat_template=complete)
    if OPEN in template:
        return MistralFormat(uses_chat_template=complete, style="separate" if ARGUMENTS in template else "list")
    if CALLS in template:
        return DeepSeekFormat(uses_chat_template=complete, style="v3" if "```json" in template else "v3.1")
    if "<|tool_call_start|>" in template:
        return LlamaPythonicFormat(
            uses_chat_template=complete, opening="<|tool_call_start|>", closing="<|tool_call_end|>"
        )
    if "[func_name1(" in template:
        return LlamaPythonicFormat(uses_chat_template=complete)
    if "ipython" in template and _LLAMA_CALL.search(template):
        return LlamaJsonFormat(uses_chat_template=complete)
    return None


def resolve_format(asked: ToolCallFormat, template: str | None, model: str) -> ToolCallFormat:
    """Return the format that an agent uses with a model: ``asked``, or the model's own format for ``"model"``.

    Args:
        asked: the agent's format.
        template: the Jinja source of the model's chat template; None if it has none.
        model: name of the model, for messages.

    Raises:
        ConfigError: the model's own format is unknown, or the chat template should describe the tools and does not.
    """
    if isinstance(asked, ModelDefaultFormat):
        own = detect_format(template) if template else None
        if own is None:
            raise ConfigError(
                f"tool_call_format='model': the chat template of {model!r} speaks of no tool-call format that is known "
                "here. Name one that the model can follow: 'hermes' (JSON in tags), or 'action', 'react' or 'tags' for "
                "small models."
            )
        return own
    if asked.uses_chat_template and not (template and _DESCRIBES_TOOLS.search(template)):
        raise ConfigError(
            f"tool_call_format={asked.name!r} leaves it to the model's chat template to describe the tools, but that "
            f"of {model!r} does not. Have the format describe them, by "
            f"{type(asked).__name__}(uses_chat_template=False), or use another one."
        )
    return asked
