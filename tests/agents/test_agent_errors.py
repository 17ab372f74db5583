"""Mistakes in agents and scripts: they are reported at construction, with the cure."""

from __future__ import annotations

import asyncio

import pytest

import agentfly as af
from agentfly.core.errors import ConfigError
from agentfly.formats.toolcalls.hermes import HermesFormat


@af.tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


class Half:
    """A format of one's own that lacks some members."""

    name = "half"
    uses_chat_template = False

    def instructions(self, tools):
        return ""

    def parse(self, text, tools, *, first_call=0):
        return ()

    def write(self, name, arguments):
        return ""


class Nothing(HermesFormat):
    """A format of one's own whose parse has no return."""

    def parse(self, text, tools, *, first_call=0):
        return None


class Broken(HermesFormat):
    """A format of one's own whose parse fails."""

    def parse(self, text, tools, *, first_call=0):
        return text.index("<nowhere>")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tools": add}, r"Write tools=\[add\]"),
        ({"tools": Half}, r"Write tools=\[Half\]"),
        ({"system_prompt": 3}, r"system_prompt=3\): it must be a text"),
        ({"tool_call_format": Half()}, "it lacks assistant_message, result_message"),
        ({"tool_call_format": HermesFormat}, r"HermesFormat is a class. Make an instance"),
    ],
)
def test_an_agent_is_refused_when_it_is_made(fields, told):
    with pytest.raises(ConfigError, match=told):
        af.Agent(model="m", **fields)


@pytest.mark.parametrize("script", [[3], "hello", 3, ["hi", None]])
def test_a_script_that_is_no_texts_is_refused_when_it_is_made(script):
    with pytest.raises(ConfigError, match="a list of texts"):
        af.ScriptedPolicy(script)


@pytest.mark.parametrize(
    ("own", "told"), [(Nothing(), "its parse returned None"), (Broken(), "its parse raised ValueError")]
)
def test_an_own_format_that_cannot_read_a_turn_is_named_as_what_is_to_blame(own, told):
    agent = af.Agent(model="m", tools=[add], tool_call_format=own)
    with pytest.raises(af.AgentFlyError, match=rf"UsageError.*'hermes' \({type(own).__name__}\).*{told}"):
        asyncio.run(af.run(agent, ["go"], policy=af.ScriptedPolicy(["hello"])))


@pytest.mark.parametrize("name", ["system_prompt", "tool_prompt"])
def test_a_prompt_with_half_a_character_is_refused_when_the_agent_is_made(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"Agent\({name}=….*half a surrogate pair"):
        af.Agent(**{"model": "tiny", name: "half \ud800"})  # type: ignore[arg-type]
