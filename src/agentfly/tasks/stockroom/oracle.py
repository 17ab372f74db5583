"""The oracle: the answers that earn the full reward, which prove that the task can be solved."""

from __future__ import annotations

import re

from agentfly.agents.toolcalls.format import ToolCallFormat
from agentfly.policies.scripted import Script
from agentfly.tasks.stockroom.shop import ORDERS

_ASKED = re.compile(r"(?:How is|What about) the (\w+)\?")
_LEVEL = re.compile(rf"\b({'|'.join(ORDERS)})<\|im_end\|>")


def oracle(tool_call_format: ToolCallFormat) -> Script:
    """A script for `agentfly.policies.scripted.ScriptedPolicy` that reads the conversation as a model would.

    Args:
        tool_call_format: that of the agent, ``agent.format``.
    """

    def play(conversation: str, turn: int) -> str:
        if turn == 0:
            return tool_call_format.write("check", {"item": _ASKED.findall(conversation)[-1]})
        return tool_call_format.write("order", {"crates": ORDERS[_LEVEL.findall(conversation)[-1]]})

    return play
