"""TokenSpeaker: speaks by a policy that takes and returns token ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from agentfly.agents.agent import Agent
from agentfly.errors import ChatFormatError, ConversationRefused, PromptTooLong, TokenInvariantError
from agentfly.messages import Message, ToolCall
from agentfly.policies.policy import Policy, SamplingParams
from agentfly.rollouts.chat.chat_format import ChatFormat, Reply
from agentfly.rollouts.chat.proof import without_words
from agentfly.rollouts.speaker import CallNumbers, Utterance, turn_message
from agentfly.rollouts.strategy import Strategy
from agentfly.rollouts.tape import Tape


class TokenSpeaker:
    """Speaks by a policy that takes and returns token ids.

    Args:
        agent: reads the tool calls.
        policy: samples.
        chat: renders and reads.
        strategy: decides what is sent, on ``tape``.
        tape: the record.
        sampling: how to sample; ``max_tokens`` is the limit of one turn.
        rollout_id: the conversation's name, under which the policy keeps what it knows of earlier turns.
        limited: whether limits on tokens other than the tape's bind the policy.
    """

    def __init__(
        self,
        agent: Agent,
        policy: Policy,
        chat: ChatFormat,
        strategy: Strategy,
        tape: Tape,
        sampling: SamplingParams,
        rollout_id: str,
        *,
        limited: bool = True,
    ) -> None:
        self._agent = agent
        self._policy = policy
        self._chat = chat
        self._strategy = strategy
        self._tape = tape
        self._sampling = sampling
        self._rollout_id = rollout_id
        self._limited = limited
        self._numbers = CallNumbers()

    async def speak(self, view: Sequence[Message], *, max_tokens: int | None = None) -> Utterance | None:
        """Show the view, sample, and read what came.

        Raises:
            ConversationRefused: the chat format cannot write what the model has said.
        """
        tape, agent = self._tape, self._agent
        try:
            self._strategy.show(view, agent.template_tools)
        except ChatFormatError as error:
            raise self._explained(error, view) from error
        limits = [tape.room]
        if self._limited:
            limits.append(max_tokens or self._sampling.max_tokens)
        if self._limited and agent.max_sampled_tokens is not None:
            limits.append(agent.max_sampled_tokens - tape.sampled_count)
        if min(limits) < 1:
            tape.refused()
            return None
        prompt = tape.prompt()
        sampling = self._sampling
        if min(limits) != sampling.max_tokens:
            sampling = replace(sampling, max_tokens=min(limits))
        started = time.perf_counter()
        try:
            generation = await self._policy.generate(prompt, sampling, rollout_id=self._rollout_id, images=tape.images)
        except PromptTooLong:
            tape.refused()
            return None
        seconds = time.perf_counter() - started
        if len(generation.ids) > sampling.max_tokens:
            raise TokenInvariantError(
                f"The policy returned {len(generation.ids)} tokens where at most {sampling.max_tokens} were asked for."
            )
        place = tape.sampled(generation)
        reply = self._chat.reply(generation.ids)
        stopped = generation.finish == "stop"
        calls = self._numbers.claim(self._calls_in(reply)) if stopped else ()
        if reply.calls is None:
            message = agent.said(reply.text, calls, opened=reply.opened)
        else:
            message = turn_message(reply.content, reply.reasoning, calls)
        self._strategy.replied(message)
        return Utterance(
            message=message,
            text=reply.text,
            content=reply.content,
            reasoning=reply.reasoning,
            calls=calls,
            stopped=stopped,
            place=place,
            prompt_tokens=len(prompt),
            sampled_tokens=len(generation.ids),
            seconds=seconds,
        )

    def _explained(self, error: ChatFormatError, view: Sequence[Message]) -> ChatFormatError:
        """The error, which is of another type where it is for what the model has said that a view is refused."""
        if not self._tape.sampled_count:
            return error
        try:
            self._chat.prompt(without_words(view), self._agent.template_tools)
        except ChatFormatError:
            return error
        return ConversationRefused(
            f"The model said what its chat format cannot write, so that the conversation cannot go on: {error} If this "
            "comes often, choose another chat_format or tool_call_format for the agent."
        )

    def _calls_in(self, reply: Reply) -> tuple[ToolCall, ...]:
        if reply.calls is None:
            return self._agent.calls_in(reply.text, first_call=self._numbers.next, opened=reply.opened)
        return reply.calls if self._agent.tools else ()

    def tokens(self, view: Sequence[Message]) -> int | None:
        """The length that the sequence would have; None where it is not counted in tokens of a model."""
        try:
            return self._strategy.length(view, self._agent.template_tools) if self._limited else None
        except ChatFormatError as error:
            raise self._explained(error, view) from error

    def finish(self) -> None:
        """Check every invariant of the tokens, and freeze the sequences."""
        self._tape.finish()
