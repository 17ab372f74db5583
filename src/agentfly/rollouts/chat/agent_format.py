"""The chat format of an agent: made for a policy's tokenizer, and proved for the agent's tools and way of answering."""

from __future__ import annotations

import logging
from dataclasses import replace

from agentfly.agents.agent import Agent
from agentfly.agents.toolcalls.registry import format_for
from agentfly.errors import ChatFormatError, ConfigError, PrerequisiteError
from agentfly.messages import Message
from agentfly.policies.policy import Tokenizer
from agentfly.rollouts.chat.chat_format import ChatFormat
from agentfly.rollouts.chat.proof import ANSWERED, Exchange
from agentfly.rollouts.chat.renderers_format import RenderersFormat, renderer_name
from agentfly.rollouts.chat.template_format import TemplateChatFormat

logger = logging.getLogger(__name__)


def chat_format_of(agent: Agent, tokenizer: Tokenizer) -> ChatFormat:
    """The chat format in which an agent converses with a model; raises as `settle`."""
    return settle(agent, tokenizer)[1]


def settle(agent: Agent, tokenizer: Tokenizer) -> tuple[Agent, ChatFormat]:
    """An agent with the tool-call format that it uses with a model, and the chat format of their conversations.

    Where ``agent.chat_format`` leaves the choice, that is the hand-written one of the ``renderers`` package if the
    package is installed, knows the model by its Hugging Face id, and can carry the conversations; and otherwise
    what the model's template tells. For models that see images it is the template's.

    Raises:
        ConfigError: a format is asked for that there is not, or that the model's template does not speak of.
        PrerequisiteError: the package is asked for and not installed.
        ChatFormatError: the model's chat template cannot carry this agent's conversations; the message says why.
    """
    by_hand = _renderer_of(agent, tokenizer)
    if by_hand is not None:
        try:
            return agent, _by_hand(by_hand, agent, tokenizer)
        except (ChatFormatError, PrerequisiteError) as error:
            if agent.chat_format != "auto":
                raise
            logger.info("The template of %s is used, not the format of the renderers package: %s", agent.model, error)
    agent = _with_format(agent, tokenizer)
    return agent, TemplateChatFormat(
        tokenizer,
        _exchanges(agent),
        tools=agent.template_tools,
        system=_system(agent),
        history=agent.history,
        longest=agent.max_turns,
    )


def _by_hand(name: str, agent: Agent, tokenizer: Tokenizer) -> ChatFormat:
    return RenderersFormat(
        name, tokenizer, _exchanges(agent), tools=agent.template_tools, system=_system(agent), history=agent.history
    )


def _with_format(agent: Agent, tokenizer: Tokenizer) -> Agent:
    """The agent with the tool-call format that it and its model's template have in common."""
    if not agent.tools:
        return agent
    own = format_for(agent.format, tokenizer.chat_template, str(agent.model))
    return agent if own is agent.format else replace(agent, tool_call_format=own)


def _system(agent: Agent) -> Message | None:
    system = agent.system_message()
    return {"role": "system", "content": system} if system else None


def _exchanges(agent: Agent) -> list[Exchange]:
    if not agent.tools:
        return [ANSWERED]
    return [Exchange.calling(agent.tools[0].name, count, agent.format) for count in (1, 2)]


def _renderer_of(agent: Agent, tokenizer: Tokenizer) -> str | None:
    """The hand-written format that an agent is to use; None for its model's template."""
    asked, _, name = agent.chat_format.partition(":")
    if asked == "template" or (tokenizer.vision is not None and asked != "renderers"):
        return None
    known = name or renderer_name(str(agent.model))
    if known is None and asked == "renderers":
        raise ConfigError(
            f"The renderers package is not installed, or does not know the model {str(agent.model)!r} by that name. "
            "Say which of its formats it is, for instance Agent(chat_format='renderers:qwen3'), or 'template'."
        )
    return known
