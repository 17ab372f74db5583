"""Traits: what shapes the rollouts of an agent, as values that can be saved and compared with those of later."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from agentfly.agents.agent import Agent
from agentfly.agents.subagent import Subagent
from agentfly.agents.tool import Tool

LONGEST = 100
"""Characters of a setting that is kept as it is."""

_FINGERPRINT = "sha256:"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

_SAMPLING = ("temperature", "top_p", "top_k")
_WORDS = ("model", "tools", "system_prompt", "tool_prompt", "tool_call_format")


def agent_traits(agent: Agent) -> dict[str, Any]:
    """What of an agent shapes its rollouts, besides model and sampling: words and tools as fingerprints, and limits."""
    tools = {f"tool {tool.name}": fingerprint(_traits_of_tool(tool, agent)) for tool in agent.tools}
    settings = {
        field.name: plain(getattr(agent, field.name)) for field in fields(agent) if field.name not in _SAMPLING + _WORDS
    }
    return {
        "system message": fingerprint(agent.system_message()),
        "tool-call format": agent.format.name,
        **tools,
        **settings,
    }


def fingerprint(value: Any) -> str:
    """A value that is too long to be shown, as something that is equal where it is."""
    text = json.dumps(value, sort_keys=True, default=str)
    return _FINGERPRINT + hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], whose: str = "") -> Iterator[str]:
    """What is not as it was, in words, each with both values.

    Args:
        saved, now: by name.
        whose: goes before the names, for instance ``the agent's``.
    """
    for name in {**saved, **now}:
        before, after = saved.get(name), now.get(name)
        if before == after:
            continue
        called = f"{whose} {name}" if whose else name
        if any(isinstance(value, str) and value.startswith(_FINGERPRINT) for value in (before, after)):
            yield f"{called} is {'new' if before is None else 'missing' if after is None else 'another'}"
        else:
            yield f"{called} was {before!r} and is now {after!r}"


def _traits_of_tool(tool: Tool, caller: Agent) -> list[Any]:
    if not isinstance(tool, Subagent):
        return [tool.definition]
    model = None if tool.agent.model == caller.model else str(tool.agent.model)
    return [tool.definition, agent_traits(tool.agent), model]


def plain(value: Any) -> Any:
    """A setting as JSON keeps it; an object by what it says of itself, without where it lies in memory."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    said = _ADDRESS.sub("", repr(value))
    return said if len(said) <= LONGEST else fingerprint(said)
