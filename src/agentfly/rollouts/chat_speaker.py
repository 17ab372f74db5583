"""ChatSpeaker: speaks by a policy that takes messages and returns one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from agentfly.agents.agent import Agent
from agentfly.errors import PromptTooLong
from agentfly.messages import Message, ToolCall, images_of
from agentfly.policies.policy import ChatGeneration, ChatPolicy, Generation, SamplingParams
from agentfly.rollouts.chat.chat_format import Rendered
from agentfly.rollouts.speaker import CallNumbers, Utterance, turn_message
from agentfly.rollouts.tape import Place, Tape


class ChatSpeaker:
    """Speaks by a policy that takes messages and returns one, and records the tokens where the far side tells them.

    Where the far side tells no tokens there are no sequences, and limits on tokens hold per turn only.

    Args:
        agent: says whether the far side is to describe the tools and read the calls, or the tool-call format does.
        policy: answers.
        tape: the record.
        put: puts a prompt that was sent on the tape: `Tape.follow`, or `Tape.begin` where every turn is a sequence.
        sampling: how to sample; ``max_tokens`` is the limit of one turn.
        rollout_id: the conversation's name.
    """

    def __init__(
        self,
        agent: Agent,
        policy: ChatPolicy,
        tape: Tape,
        put: Callable[[Rendered], None],
        sampling: SamplingParams,
        rollout_id: str,
    ) -> None:
        self._agent = agent
        self._policy = policy
        self._tape = tape
        self._put = put
        self._seen = 0
        self._sampling = sampling
        self._rollout_id = rollout_id
        self._numbers = CallNumbers()

    async def speak(self, view: Sequence[Message], *, max_tokens: int | None = None) -> Utterance | None:
        """Send the view, and read what came."""
        agent = self._agent
        limits = [max_tokens or self._sampling.max_tokens]
        if agent.max_sequence_tokens is not None and len(view) > self._seen:  # else it was folded, and is shorter
            limits.append(agent.max_sequence_tokens - self._tape.length)
        if agent.max_sampled_tokens is not None:
            limits.append(agent.max_sampled_tokens - self._tape.sampled_count)
        if min(limits) < 1:
            return None
        sampling = replace(self._sampling, max_tokens=min(limits))
        started = time.perf_counter()
        try:
            generation = await self._policy.chat(view, agent.template_tools, sampling, rollout_id=self._rollout_id)
        except PromptTooLong:
            return None
        seconds = time.perf_counter() - started
        self._seen = len(view)
        stopped = generation.finish == "stop"
        calls = self._numbers.claim(self._calls_in(generation)) if stopped else ()
        return Utterance(
            message=self._message(generation, calls),
            text=generation.content,
            content=generation.content,
            reasoning=generation.reasoning,
            calls=calls,
            stopped=stopped,
            place=self._recorded(generation, view),
            prompt_tokens=generation.prompt_tokens,
            sampled_tokens=generation.sampled_tokens,
            seconds=seconds,
        )

    def tokens(self, view: Sequence[Message]) -> None:
        """Nobody can tell before it is sent."""

    def finish(self) -> None:
        """Check every invariant of the tokens that were told, and freeze the sequences."""
        self._tape.finish()

    def _calls_in(self, generation: ChatGeneration) -> tuple[ToolCall, ...]:
        agent = self._agent
        if agent.format.in_template:
            return generation.calls if agent.tools else ()
        return agent.calls_in(generation.content, first_call=self._numbers.next)

    def _message(self, generation: ChatGeneration, calls: Sequence[ToolCall]) -> Message:
        """The turn as it is sent back."""
        if self._agent.format.in_template:
            return turn_message(generation.content, generation.reasoning, calls)
        message = self._agent.said(generation.content, calls)
        if generation.reasoning is not None:
            message["reasoning_content"] = generation.reasoning
        return message

    def _recorded(self, generation: ChatGeneration, view: Sequence[Message]) -> Place | None:
        """Put the tokens on the tape, where they are told; which of them stand for images is told by nobody."""
        if generation.prompt_ids is None or generation.ids is None:
            return None
        if any(images_of(message["content"]) for message in view):
            return None
        self._put(Rendered(generation.prompt_ids))
        self._tape.prompt()
        return self._tape.sampled(
            Generation(generation.ids, generation.logprobs, generation.finish, generation.version)
        )
