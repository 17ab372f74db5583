"""Speaker: has the model say its next turn, and keeps the record of its tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentfly.agents.agent import Agent
from agentfly.errors import TokenInvariantError
from agentfly.messages import Message, ToolCall
from agentfly.policies.policy import Policy, SamplingParams
from agentfly.rollouts.chat.chat_format import ChatFormat
from agentfly.rollouts.strategy import Strategy
from agentfly.rollouts.tape import Place, Tape


@dataclass(frozen=True, slots=True)
class Utterance:
    """One turn of the model.

    Attributes:
        message: the turn as it stands in the conversation.
        text: everything that was sampled, without the stop id at its end.
        reasoning: the thoughts in it, where the format tells them apart.
        calls: the tool calls in it. A turn that a limit cut makes none, even if what is left of it happens to parse.
        stopped: whether the model ended the turn itself.
        place: where its tokens stand.
        prompt_tokens: how many tokens the model saw.
        seconds: how long the generation took.
    """

    message: Message
    text: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]
    stopped: bool
    place: Place
    prompt_tokens: int
    seconds: float


class Speaker(Protocol):
    """The model's side of one conversation."""

    async def speak(self, view: Sequence[Message], *, first_call: int) -> Utterance | None:
        """The model's next turn, or None if no token of it would fit.

        Args:
            view: the conversation as the agent's memory recalls it.
            first_call: number of the first tool call; the calls of a rollout are numbered through.
        """
        ...

    def finish(self) -> None:
        """The conversation has ended: check the record."""
        ...


class TokenSpeaker:
    """Speaks by a policy that takes and returns token ids.

    Args:
        agent: reads the tool calls.
        policy: samples.
        chat: renders and reads.
        strategy: decides what is sent, on ``tape``.
        tape: the record.
        sampling: how to sample; ``max_tokens`` is the limit of one turn.
        rollout_id: the rollout's name, under which the policy keeps what it knows of earlier turns.
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
    ) -> None:
        self._agent = agent
        self._policy = policy
        self._chat = chat
        self._strategy = strategy
        self._tape = tape
        self._sampling = sampling
        self._rollout_id = rollout_id

    async def speak(self, view: Sequence[Message], *, first_call: int) -> Utterance | None:
        """Show the view, sample, and read what came."""
        tape = self._tape
        self._strategy.show(view, self._agent.template_tools)
        if tape.room < 1:
            return None
        prompt = tape.prompt()
        sampling = replace(self._sampling, max_tokens=min(self._sampling.max_tokens, tape.room))
        started = time.perf_counter()
        generation = await self._policy.generate(prompt, sampling, rollout_id=self._rollout_id, images=tape.images)
        seconds = time.perf_counter() - started
        if len(generation.ids) > sampling.max_tokens:
            raise TokenInvariantError(
                f"The policy returned {len(generation.ids)} tokens where at most {sampling.max_tokens} were asked for."
            )
        place = tape.sampled(generation)
        reply = self._chat.reply(generation.ids)
        stopped = generation.finish == "stop"
        calls: tuple[ToolCall, ...] = ()
        if stopped:
            calls = self._agent.calls_in(reply.text, first_call=first_call) if reply.calls is None else reply.calls
        message = self._agent.said(reply.text, calls)
        self._strategy.replied(message)
        return Utterance(message, reply.text, reply.reasoning, calls, stopped, place, len(prompt), seconds)

    def finish(self) -> None:
        """Check every invariant of the tokens, and freeze the sequences."""
        self._tape.finish()
