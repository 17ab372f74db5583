"""Voice: an agent that can speak, because its policy and its chat format are at hand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import cast

from agentfly.agents.agent import Agent
from agentfly.agents.excerpt import Cut, TokenCutter, cut_by_characters
from agentfly.agents.subagent import Subagent
from agentfly.errors import ConfigError
from agentfly.policies.policy import ChatPolicy, Policy, SamplingParams, token_limits_bind
from agentfly.policies.vision import barred_ids
from agentfly.rollouts.chat.agent_format import settle
from agentfly.rollouts.chat.chat_format import ChatFormat
from agentfly.rollouts.chat_speaker import ChatSpeaker
from agentfly.rollouts.speaker import Speaker
from agentfly.rollouts.strategy import STRATEGIES, require_strategy
from agentfly.rollouts.tape import Tape
from agentfly.rollouts.token_speaker import TokenSpeaker
from agentfly.tokens import TokenSequence

NO_OTHERS: Mapping[str, Policy | ChatPolicy] = MappingProxyType({})

ChangeOfSampling = Callable[[SamplingParams], SamplingParams]


def unchanged(sampling: SamplingParams) -> SamplingParams:
    """Sample as the agent says."""
    return sampling


@dataclass(frozen=True)
class Voice:
    """An agent that can speak.

    Attributes:
        agent: the agent.
        policy: what it speaks by.
        chat: renders and reads for a policy that takes token ids; None for one that takes messages.
        strategy: how its turns become token sequences, by name.
        foreign: the name of its model, where that is not the one that the rollouts are about; empty where it is.
        subagents: the voices of its subagents, by the names of their tools.
    """

    agent: Agent
    policy: Policy | ChatPolicy
    chat: ChatFormat | None
    strategy: str
    foreign: str = ""
    subagents: Mapping[str, Voice] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        agent: Agent,
        policy: Policy | ChatPolicy,
        *,
        strategy: str = "chain",
        others: Mapping[str, Policy | ChatPolicy] = NO_OTHERS,
    ) -> Voice:
        """The voice of an agent, and those of its subagents.

        Args:
            agent: the agent.
            policy: what it speaks by, and each of its subagents that has the same model.
            strategy: how turns become token sequences.
            others: what subagents with another model speak by, by the model.

        Raises:
            ChatFormatError: a policy's chat format cannot be continued turn by turn.
            ConfigError: there is no such strategy, no policy for a subagent's model, or no tool-call format that an
                agent's model and its chat template have in common.
        """
        require_strategy(strategy)
        return cls._of(agent, strategy, {**others, str(agent.model): policy}, str(agent.model))

    @classmethod
    def _of(cls, agent: Agent, strategy: str, policies: Mapping[str, Policy | ChatPolicy], own: str) -> Voice:
        model = str(agent.model)
        if model not in policies:
            raise ConfigError(f"A subagent speaks by the model {model!r}, for which there is no policy among `others`.")
        policy = policies[model]
        chat = None
        if isinstance(policy, Policy):
            agent, chat = settle(agent, policy.tokenizer)
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
    def cut(self) -> Cut:
        """Cuts what tools say by the tokens of the policy's model, where they can be counted here."""
        policy = self.token_policy
        return TokenCutter(policy.tokenizer) if policy is not None and token_limits_bind(policy) else cut_by_characters

    def speaker(self, sequences: list[TokenSequence], rollout_id: str, change: ChangeOfSampling = unchanged) -> Speaker:
        """The model's side of one conversation.

        Args:
            sequences: where its tokens are recorded.
            rollout_id: the conversation's name, under which the policy may keep what it knows of earlier turns.
            change: changes how the model that the rollouts are about samples.
        """
        agent, policy, sampling = self.agent, self.token_policy, self.sampling(change)
        if self.chat is None or policy is None:
            tape = Tape(sequences, max_tokens=sys.maxsize, stop_ids=())
            put = tape.begin if self.strategy == "step" else tape.follow
            return ChatSpeaker(agent, cast(ChatPolicy, self.policy), tape, put, sampling, rollout_id)
        limit, limited = policy.context_length, token_limits_bind(policy)
        if limited and agent.max_sequence_tokens is not None:
            limit = min(limit, agent.max_sequence_tokens)
        barred = barred_ids(policy.tokenizer.vision)
        tape = Tape(
            sequences,
            max_tokens=limit,
            stop_ids=self.chat.stop_ids,
            token_ids=policy.tokenizer.token_ids,
            barred_ids=barred,
        )
        strategy = STRATEGIES[self.strategy](self.chat, tape)
        sampling = replace(sampling, stop_ids=self.chat.stop_ids, barred_ids=barred)
        return TokenSpeaker(agent, policy, self.chat, strategy, tape, sampling, rollout_id, limited=limited)

    def sampling(self, change: ChangeOfSampling = unchanged) -> SamplingParams:
        """How the agent samples; ``change`` may change it, unless it speaks by another model than the rollouts' own.

        The ids at which its format stops are not among it.
        """
        agent = self.agent
        params = SamplingParams(agent.temperature, agent.top_p, agent.top_k, max_tokens=agent.max_tokens_per_turn)
        return params if self.foreign else change(params)

    def forget(self, rollout_id: str) -> None:
        """The conversation of this name has ended: what the policy keeps for it may go."""
        if self.token_policy is not None:
            self.token_policy.forget(rollout_id)
