"""Runtime of an agent: its policy, and the chat format checked for its tools."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import cast

from agentfly.agents.agent import Agent, Subagent
from agentfly.core.errors import ChatFormatError, ConfigError, PrerequisiteError
from agentfly.core.messages import Message
from agentfly.core.tokens import TokenSequence
from agentfly.core.truncation import TokenTruncator, Truncate, truncate_by_characters
from agentfly.formats.chat.chat_format import ChatFormat
from agentfly.formats.chat.prefix_stability import ANSWER_EXCHANGE, ProbeExchange
from agentfly.formats.chat.renderers_format import RenderersFormat, renderer_name
from agentfly.formats.chat.template_format import TemplateChatFormat
from agentfly.formats.toolcalls.registry import resolve_format
from agentfly.policies.policy import (
    ChatPolicy,
    Policy,
    SamplingParams,
    Tokenizer,
    enforces_token_limits,
    image_token_ids,
)
from agentfly.rollouts.token_recorder import STRATEGIES, TokenRecorder, require_strategy
from agentfly.rollouts.turn_generator import ChatTurnGenerator, TokenTurnGenerator, TurnGenerator

logger = logging.getLogger(__name__)


def chat_format_of(agent: Agent, tokenizer: Tokenizer) -> ChatFormat:
    """Return the chat format in which an agent converses with a model. Raises the errors of `resolve_chat_format`."""
    return resolve_chat_format(agent, tokenizer)[1]


def resolve_chat_format(agent: Agent, tokenizer: Tokenizer) -> tuple[Agent, ChatFormat]:
    """Return an agent with the tool-call format that it uses with a model, and the chat format of its conversations.

    With ``agent.chat_format="auto"``, the hand-written format of the ``renderers`` package is used if the package is
    installed, knows the model by its Hugging Face id, and supports the conversations. Otherwise the format is derived
    from the model's chat template. Models that take images always use the template.

    Raises:
        ConfigError: the requested format does not exist, or the model's template does not support it.
        PrerequisiteError: the package is requested and not installed.
        ChatFormatError: the model's chat template cannot render this agent's conversations; the message says why.
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
        tools=agent.tools_for_template,
        system=_system(agent),
        history=agent.history,
        longest=agent.max_turns,
    )


def _by_hand(name: str, agent: Agent, tokenizer: Tokenizer) -> ChatFormat:
    return RenderersFormat(
        name, tokenizer, _exchanges(agent), tools=agent.tools_for_template, system=_system(agent), history=agent.history
    )


def _with_format(agent: Agent, tokenizer: Tokenizer) -> Agent:
    """Return the agent with the tool-call format that both it and its model's template support."""
    if not agent.tools:
        return agent
    own = resolve_format(agent.format, tokenizer.chat_template, str(agent.model))
    return agent if own is agent.format else replace(agent, tool_call_format=own)


def _system(agent: Agent) -> Message | None:
    system = agent.system_message()
    return {"role": "system", "content": system} if system else None


def _exchanges(agent: Agent) -> list[ProbeExchange]:
    if not agent.tools:
        return [ANSWER_EXCHANGE]
    return [ProbeExchange.calling(agent.tools[0].name, count, agent.format) for count in (1, 2)]


def _renderer_of(agent: Agent, tokenizer: Tokenizer) -> str | None:
    """Return the name of the hand-written format to use, or None for the model's template."""
    asked, _, name = agent.chat_format.partition(":")
    if asked == "template" or (tokenizer.vision is not None and asked != "renderers"):
        return None
    known = name or renderer_name(str(agent.model))
    if known is None and asked == "renderers":
        raise ConfigError(
            f"The renderers package is not installed, or does not know the model {str(agent.model)!r} by that name. "
            "Name the format to use, for instance Agent(chat_format='renderers:qwen3'), or use 'template'."
        )
    return known


NO_POLICIES: Mapping[str, Policy | ChatPolicy] = MappingProxyType({})

SamplingOverride = Callable[[SamplingParams], SamplingParams]


def keep_sampling(sampling: SamplingParams) -> SamplingParams:
    """Return the agent's own sampling parameters unchanged."""
    return sampling


@dataclass(frozen=True)
class AgentRuntime:
    """An agent with the policy and the chat format that it runs with.

    Attributes:
        agent: the agent.
        policy: generates its turns.
        chat: the chat format for a policy that takes token ids; None for one that takes messages.
        strategy: name of the strategy by which its turns become token sequences.
        other_model: the name of its model, if it is not the model of the main agent; else empty.
        subagents: the runtimes of its subagents, by the names of their tools.
    """

    agent: Agent
    policy: Policy | ChatPolicy
    chat: ChatFormat | None
    strategy: str
    other_model: str = ""
    subagents: Mapping[str, AgentRuntime] = field(default_factory=dict)

    @classmethod
    def create(
        cls,
        agent: Agent,
        policy: Policy | ChatPolicy,
        *,
        strategy: str = "chain",
        others: Mapping[str, Policy | ChatPolicy] = NO_POLICIES,
    ) -> AgentRuntime:
        """Create the runtime of an agent and of its subagents.

        Args:
            agent: the agent.
            policy: generates the turns of the agent, and of each subagent with the same model.
            strategy: how turns become token sequences.
            others: policies of subagents with another model, by the model's name.

        Raises:
            ChatFormatError: a policy's chat format cannot be continued turn by turn.
            ConfigError: the strategy is unknown, a subagent's model has no policy, or an agent and its model's chat
                template have no tool-call format in common.
        """
        require_strategy(strategy)
        return cls._of(agent, strategy, {**others, str(agent.model): policy}, str(agent.model))

    @classmethod
    def _of(cls, agent: Agent, strategy: str, policies: Mapping[str, Policy | ChatPolicy], own: str) -> AgentRuntime:
        model = str(agent.model)
        if model not in policies:
            raise ConfigError(f"A subagent uses the model {model!r}, and `others` has no policy for it.")
        policy = policies[model]
        chat = None
        if isinstance(policy, Policy):
            agent, chat = resolve_chat_format(agent, policy.tokenizer)
        subagents = {
            tool.name: cls._of(tool.agent, strategy, policies, own)
            for tool in agent.tools
            if isinstance(tool, Subagent)
        }
        return cls(agent, policy, chat, strategy, "" if model == own else model, subagents)

    @cached_property
    def token_policy(self) -> Policy | None:
        """The policy, if it takes token ids."""
        return self.policy if isinstance(self.policy, Policy) else None

    @cached_property
    def truncate(self) -> Truncate:
        """Truncates observations by the tokens of the policy's model, or by characters where tokens are not counted."""
        policy = self.token_policy
        return (
            TokenTruncator(policy.tokenizer)
            if policy is not None and enforces_token_limits(policy)
            else truncate_by_characters
        )

    def turn_generator(
        self, sequences: list[TokenSequence], rollout_id: str, change: SamplingOverride = keep_sampling
    ) -> TurnGenerator:
        """Create the turn generator of one conversation.

        Args:
            sequences: receives the token sequences of the conversation.
            rollout_id: id of the conversation, under which the policy may cache earlier turns.
            change: changes how the main agent's model samples.
        """
        agent, policy, sampling = self.agent, self.token_policy, self.sampling(change)
        if self.chat is None or policy is None:
            recorder = TokenRecorder(sequences, max_tokens=sys.maxsize, stop_ids=())
            put = recorder.begin_sequence if self.strategy == "step" else recorder.continue_or_begin
            return ChatTurnGenerator(agent, cast(ChatPolicy, self.policy), recorder, put, sampling, rollout_id)
        limit, limited = policy.context_length, enforces_token_limits(policy)
        if limited and agent.max_sequence_tokens is not None:
            limit = min(limit, agent.max_sequence_tokens)
        barred = image_token_ids(policy.tokenizer.vision)
        recorder = TokenRecorder(
            sequences,
            max_tokens=limit,
            stop_ids=self.chat.stop_ids,
            token_ids=policy.tokenizer.vocabulary_ids,
            barred_ids=barred,
        )
        strategy = STRATEGIES[self.strategy](self.chat, recorder)
        sampling = replace(sampling, stop_ids=self.chat.stop_ids, suppressed_ids=barred)
        return TokenTurnGenerator(agent, policy, self.chat, strategy, recorder, sampling, rollout_id, limited=limited)

    def sampling(self, change: SamplingOverride = keep_sampling) -> SamplingParams:
        """Return the agent's sampling parameters, changed by ``change`` if it uses the main agent's model.

        They do not include the stop ids of its chat format.
        """
        agent = self.agent
        params = SamplingParams(agent.temperature, agent.top_p, agent.top_k, max_tokens=agent.max_tokens_per_turn)
        return params if self.other_model else change(params)

    def release_rollout(self, rollout_id: str) -> None:
        """Let the policy discard what it keeps for a conversation that has ended."""
        if self.token_policy is not None:
            self.token_policy.release_rollout(rollout_id)
