"""The tool-call formats by name."""

from __future__ import annotations

import difflib

from agentfly.agents.toolcalls.action import ActionFormat
from agentfly.agents.toolcalls.format import ToolCallFormat
from agentfly.agents.toolcalls.hermes import HermesFormat
from agentfly.errors import ConfigError

_FORMATS: dict[str, type[HermesFormat] | type[ActionFormat]] = {"action": ActionFormat, "hermes": HermesFormat}


def tool_call_format(asked: str | ToolCallFormat) -> ToolCallFormat:
    """The tool-call format of this name, or the one that is given.

    Raises:
        ConfigError: there is no format of this name, or the value is no format.
    """
    if isinstance(asked, str):
        if asked in _FORMATS:
            return _FORMATS[asked]()
        near = difflib.get_close_matches(asked, _FORMATS, n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"There is no tool-call format {asked!r}; known are {', '.join(sorted(_FORMATS))}.{guess}")
    if isinstance(asked, ToolCallFormat) and not isinstance(asked, type):
        return asked
    raise ConfigError(
        f"{asked!r} is no tool-call format. Give one of the names {', '.join(sorted(_FORMATS))}, or an object with the "
        "members of agentfly.agents.toolcalls.format.ToolCallFormat."
    )
