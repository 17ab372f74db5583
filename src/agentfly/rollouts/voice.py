"""Voice: an agent that can speak, because its policy and its chat format are at hand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from agentfly.agents.agent import Agent
from agentfly.agents.excerpt import Cut, TokenCutter, cut_by_characters
from agentfly.errors import ConfigError
from agentfly.messages import Message, ToolCall
from agentfly.policies.policy import ChatPolicy, Policy, SamplingParams
from agentfly.rollouts.chain import Chain
from agentfly.rollouts.chat.chat_format import ChatFormat
from agentfly.rollouts.chat.template_format import TemplateChatFormat
from agentfly.rollouts.chat_speaker import ChatSpeaker
from agentfly.rollouts.speaker import Speaker
from agentfly.rollouts.step import Step
from agentfly.rollouts.strategy import Strategy
from agentfly.rollouts.tape import Tape
from agentfly.rollouts.token_speaker import TokenSpeaker
from agentfly.tokens import TokenSequence

STRATEGIES: Mapping[str, Callable[[ChatFormat, Tape], Strategy]] = {"chain": Chain, "step": Step}
"""The strategies by name."""

ChangeOfSampling = Callable[[SamplingParams], SamplingParams]


def unchanged(sampling: SamplingParams) -> SamplingParams:
    """Sample as the agent says."""
    return sampling


def require_strategy(name: str) -> None:
    """Raise ConfigError unless there is a strategy of this name."""
    if name not in STRATEGIES:
        known = " and ".join(map(repr, STRATEGIES))
        raise ConfigError(f"strategy={name!r}: there is no such strategy; known are {known}.")


@dataclass(frozen=True)
class Voice:
    """An agent that can speak.

    Attributes:
        agent: the agent.
        policy: what it speaks by.
        chat: renders and reads for a policy that takes token ids; None for one that takes messages.
        strategy: how its turns become token sequences, by name.
    """

    agent: Agent
    policy: Policy | ChatPolicy
    chat: ChatFormat | None
    strategy: str

    @classmethod
    def of(cls, agent: Agent, policy: Policy | ChatPolicy, *, strategy: str = "chain") -> Voice:
        """The voice of an agent.

        Raises:
            ChatFormatError: the policy's chat format cannot be continued turn by turn.
            ConfigError: there is no such strategy.
        """
        require_strategy(strategy)

        def answer(text: str) -> Message:
            if not agent.tools:
                return {"role": "user", "content": text}
            return agent.result_message(ToolCall("call_0", agent.tools[0].name), text)

        chat = TemplateChatFormat(policy.tokenizer, answer) if isinstance(policy, Policy) else None
        return cls(agent, policy, chat, strategy)

    @property
    def cut(self) -> Cut:
        """Cuts what tools say by the tokens of the policy's model, where they can be counted here."""
        return TokenCutter(self.policy.tokenizer) if isinstance(self.policy, Policy) else cut_by_characters

    def speaker(self, sequences: list[TokenSequence], rollout_id: str, change: ChangeOfSampling = unchanged) -> Speaker:
        """The model's side of one conversation.

        Args:
            sequences: where its tokens are recorded.
            rollout_id: the conversation's name, under which the policy may keep what it knows of earlier turns.
            change: changes how the agent samples.
        """
        agent, policy, sampling = self.agent, self.policy, self.sampling(change)
        if self.chat is None or not isinstance(policy, Policy):
            assert isinstance(policy, ChatPolicy)
            tape = Tape(sequences, max_tokens=sys.maxsize, stop_ids=())
            put = tape.begin if self.strategy == "step" else tape.follow
            return ChatSpeaker(agent, policy, tape, put, sampling, rollout_id)
        limit = min(agent.max_sequence_tokens or policy.context_length, policy.context_length)
        tape = Tape(sequences, max_tokens=limit, stop_ids=self.chat.stop_ids)
        strategy = STRATEGIES[self.strategy](self.chat, tape)
        sampling = replace(sampling, stop_ids=self.chat.stop_ids)
        return TokenSpeaker(agent, policy, self.chat, strategy, tape, sampling, rollout_id)

    def sampling(self, change: ChangeOfSampling = unchanged) -> SamplingParams:
        """How the agent samples, perhaps changed; the ids at which its format stops not among it."""
        agent = self.agent
        return change(SamplingParams(agent.temperature, agent.top_p, agent.top_k, max_tokens=agent.max_tokens_per_turn))

    def forget(self, rollout_id: str) -> None:
        """The conversation of this name has ended: what the policy keeps for it may go."""
        if isinstance(self.policy, Policy):
            self.policy.forget(rollout_id)
