"""The tool-call formats by name, and the one that a chat template speaks."""

from __future__ import annotations

import re
from collections.abc import Callable

from agentfly.agents.toolcalls.action import ActionFormat
from agentfly.agents.toolcalls.code_block import CodeBlockFormat
from agentfly.agents.toolcalls.deepseek import CALLS, DeepSeekFormat
from agentfly.agents.toolcalls.format import ToolCallFormat
from agentfly.agents.toolcalls.hermes import HermesFormat
from agentfly.agents.toolcalls.llama_json import LlamaJsonFormat
from agentfly.agents.toolcalls.llama_pythonic import LlamaPythonicFormat
from agentfly.agents.toolcalls.mistral import ARGUMENTS, OPEN, MistralFormat
from agentfly.agents.toolcalls.model_format import ModelFormat
from agentfly.agents.toolcalls.qwen3_coder import Qwen3CoderFormat
from agentfly.agents.toolcalls.react import ReActFormat
from agentfly.agents.toolcalls.tags import TagsFormat
from agentfly.errors import ConfigError, did_you_mean

_FORMATS: dict[str, Callable[[], ToolCallFormat]] = {
    "action": ActionFormat,
    "code_block": CodeBlockFormat,
    "deepseek": DeepSeekFormat,
    "hermes": HermesFormat,
    "llama_json": LlamaJsonFormat,
    "llama_pythonic": LlamaPythonicFormat,
    "mistral": MistralFormat,
    "model": ModelFormat,
    "qwen3_coder": Qwen3CoderFormat,
    "react": ReActFormat,
    "tags": TagsFormat,
}
_MEMBERS = ("name", "in_template", "instructions", "parse", "write", "said", "result")
_DESCRIBES_TOOLS = re.compile(r"\btools\b")
_HERMES_CALL = re.compile(r"[\"']name\\?[\"']\s*:|[\"']arguments\\?[\"']\s*:")
_OTHER_CALLS = re.compile(r"<arg_key>|<tool_calls>")  # of GLM and Apriel
_LLAMA_CALL = re.compile(r"[\"']name\\?[\"']\s*:\s[^{}]{0,80}[\"']parameters\\?[\"']\s*:")


def tool_call_format(asked: str | ToolCallFormat) -> ToolCallFormat:
    """The tool-call format of this name, or the one that is given.

    Raises:
        ConfigError: there is no format of this name, or the value is no format.
    """
    if isinstance(asked, str):
        if asked in _FORMATS:
            return _FORMATS[asked]()
        raise ConfigError(f"There is no tool-call format {asked!r}. {did_you_mean(asked, _FORMATS)}")
    if isinstance(asked, ToolCallFormat) and not isinstance(asked, type):
        return asked
    missing = [name for name in _MEMBERS if not hasattr(asked, name)]
    if isinstance(asked, type) and not missing:
        raise ConfigError(f"{asked.__name__} is a class. Make an instance: tool_call_format={asked.__name__}().")
    if len(missing) < len(_MEMBERS):
        raise ConfigError(f"{asked!r:.100} is no whole tool-call format: it lacks {', '.join(missing)}.")
    raise ConfigError(
        f"{asked!r} is no tool-call format. Give one of the names {', '.join(_FORMATS)}, or an object with the "
        "members of agentfly.agents.toolcalls.format.ToolCallFormat."
    )


def format_of_template(template: str) -> ToolCallFormat | None:
    """The format of which a model's chat template speaks; None if it is none that is known here.

    ``in_template`` of the format says whether the template both describes tools and writes calls. Where it does not,
    the format's own instructions describe them, as for DeepSeek V3.

    Args:
        template: the text of the template, in Jinja.
    """
    complete = "tool_calls" in template and _DESCRIBES_TOOLS.search(template) is not None
    if "<tool_call>" in template and "<function=" in template and "<parameter=" in template:
        return Qwen3CoderFormat(in_template=complete)
    if "<tool_call>" in template and not _OTHER_CALLS.search(template) and _HERMES_CALL.search(template):
        return HermesFormat(in_template=complete)
    if OPEN in template:
        return MistralFormat(in_template=complete, style="separate" if ARGUMENTS in template else "list")
    if CALLS in template:
        return DeepSeekFormat(in_template=complete, style="v3" if "```json" in template else "v3.1")
    if "<|tool_call_start|>" in template:
        return LlamaPythonicFormat(in_template=complete, opening="<|tool_call_start|>", closing="<|tool_call_end|>")
    if "[func_name1(" in template:
        return LlamaPythonicFormat(in_template=complete)
    if "ipython" in template and _LLAMA_CALL.search(template):
        return LlamaJsonFormat(in_template=complete)
    return None


def format_for(asked: ToolCallFormat, template: str | None, model: str) -> ToolCallFormat:
    """The format that an agent uses with a model: ``asked``, or the model's own where it asked for that.

    Args:
        asked: the agent's.
        template: the text of the model's chat template; None if it has none.
        model: name of the model, for messages.

    Raises:
        ConfigError: the model's own format is asked for and not known, or the model's chat template is to describe the
            tools and does not.
    """
    if isinstance(asked, ModelFormat):
        own = format_of_template(template) if template else None
        if own is None:
            raise ConfigError(
                f"tool_call_format='model': the chat template of {model!r} speaks of no tool-call format that is known "
                "here. Name one that the model can follow: 'hermes' (JSON in tags), or 'action', 'react' or 'tags' for "
                "small models."
            )
        return own
    if asked.in_template and not (template and _DESCRIBES_TOOLS.search(template)):
        raise ConfigError(
            f"tool_call_format={asked.name!r} leaves it to the model's chat template to describe the tools, but that "
            f"of {model!r} does not. Have the format describe them, by {type(asked).__name__}(in_template=False), or "
            "use another one."
        )
    return asked
