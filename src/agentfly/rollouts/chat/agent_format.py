"""The chat format of an agent: made for a policy's tokenizer, and proved for the agent's tools and way of answering."""

from __future__ import annotations

from agentfly.agents.agent import Agent
from agentfly.agents.toolcalls.format import call_id, message_with_calls
from agentfly.messages import Message, ToolCall
from agentfly.policies.policy import Tokenizer
from agentfly.rollouts.chat.chat_format import ChatFormat
from agentfly.rollouts.chat.proof import Exchange
from agentfly.rollouts.chat.template_format import TemplateChatFormat


def chat_format_of(agent: Agent, tokenizer: Tokenizer) -> ChatFormat:
    """The chat format in which an agent converses with a model.

    Raises:
        ChatFormatError: the model's chat template cannot carry this agent's conversations; the message says why.
    """
    system = agent.system_message()
    return TemplateChatFormat(
        tokenizer,
        [exchange_of(agent, 1), exchange_of(agent, 2)] if agent.tools else [exchange_of(agent, 0)],
        tools=agent.template_tools,
        system={"role": "system", "content": system} if system else None,
        history=agent.history,
    )


def exchange_of(agent: Agent, calls: int) -> Exchange:
    """A turn of an agent that calls this many tools, and what answers it; without calls, a user's words."""
    if not calls:
        return Exchange({"role": "assistant", "content": "answer"}, ({"role": "user", "content": "the next question"},))
    made = [ToolCall(call_id(number), agent.tools[0].name) for number in range(calls)]
    turn: Message = {"role": "assistant", "content": "calls"}
    answers = [agent.result_message(call, f"observation {number}") for number, call in enumerate(made)]
    return Exchange(message_with_calls("", made) if agent.template_tools else turn, tuple(answers))
