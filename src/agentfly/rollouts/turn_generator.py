"""Turn generators: have the model generate its next turn, by token ids or by messages, and record the tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentfly.agents.agent import Agent
from agentfly.core.errors import ChatFormatError, ConversationRefused, PolicyError, PromptTooLong, TokenInvariantError
from agentfly.core.messages import Message, ToolCall, images_of
from agentfly.formats.chat.chat_format import ChatFormat, ParsedReply, RenderedTokens
from agentfly.formats.chat.prefix_stability import without_own_text
from agentfly.formats.toolcalls.tool_call_format import call_id, message_with_calls
from agentfly.policies.policy import ChatGeneration, ChatPolicy, Generation, Policy, SamplingParams
from agentfly.rollouts.token_recorder import SequenceStrategy, TokenRecorder, TokenSpan


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """One generated turn.

    Attributes:
        message: the turn as a message of the conversation.
        text: the whole sampled text, without the control token at its end.
        content: the text without the reasoning.
        reasoning: the reasoning, if the format separates it.
        calls: the tool calls. A turn that a limit cut has none, even if the rest happens to parse.
        ended_by_model: whether the model ended the turn itself.
        token_span: the position of its tokens; None if they are not known.
        prompt_tokens, sampled_tokens: numbers of tokens that the model read and sampled; None if not reported.
        seconds: duration of the generation.
    """

    message: Message
    text: str
    content: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]
    ended_by_model: bool
    token_span: TokenSpan | None
    prompt_tokens: int | None
    sampled_tokens: int | None
    seconds: float


class TurnGenerator(Protocol):
    """The model's side of one conversation."""

    async def generate_turn(self, view: Sequence[Message], *, max_tokens: int | None = None) -> AssistantTurn | None:
        """Generate the next turn. Return None, without sampling, if there is no room for one token.

        Args:
            view: the conversation as the agent's memory recalls it.
            max_tokens: maximum number of tokens of this turn; the agent's ``max_tokens_per_turn`` if not given.
        """
        ...

    def count_tokens(self, view: Sequence[Message]) -> int | None:
        """Return how many tokens the model would see for ``view``; None if this is not known."""
        ...

    def finish(self) -> None:
        """Check the token record at the end of the conversation, and freeze it."""
        ...


def turn_message(content: str, reasoning: str | None, calls: Sequence[ToolCall]) -> Message:
    """Return a turn as a message, for turns whose reasoning and calls the agent did not parse from text itself.

    A tool result must follow a call, so a malformed call is included without its arguments.
    """
    written = [call if call.arguments is not None else replace(call, arguments={}) for call in calls]
    message: Message = message_with_calls(content, written) if written else {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message


class CallIdAllocator:
    """Numbers the tool calls of a conversation, so that every call has a unique id."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    @property
    def next(self) -> int:
        """The number of the next call."""
        return len(self._taken)

    def assign_ids(self, calls: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
        """Return the calls with unique ids: a call whose id is missing or already taken gets a new one."""
        claimed = []
        for call in calls:
            name, number = call.id, self.next
            while not name or name in self._taken:
                name, number = call_id(number), number + 1
            self._taken.add(name)
            claimed.append(call if name == call.id else replace(call, id=name))
        return tuple(claimed)


class TokenTurnGenerator:
    """Generates turns by a policy that takes and returns token ids.

    Args:
        agent: parses the tool calls.
        policy: samples.
        chat: renders prompts and parses replies.
        strategy: decides which sequence of ``recorder`` a turn continues.
        recorder: records the tokens.
        sampling: how to sample; ``max_tokens`` is the limit of one turn.
        rollout_id: id of the conversation, under which the policy caches earlier turns.
        limited: whether the policy obeys token limits other than the recorder's.
    """

    def __init__(
        self,
        agent: Agent,
        policy: Policy,
        chat: ChatFormat,
        strategy: SequenceStrategy,
        recorder: TokenRecorder,
        sampling: SamplingParams,
        rollout_id: str,
        *,
        limited: bool = True,
    ) -> None:
        self._agent = agent
        self._policy = policy
        self._chat = chat
        self._strategy = strategy
        self._recorder = recorder
        self._sampling = sampling
        self._rollout_id = rollout_id
        self._limited = limited
        self._numbers = CallIdAllocator()

    async def generate_turn(self, view: Sequence[Message], *, max_tokens: int | None = None) -> AssistantTurn | None:
        """Render the view, sample a turn and parse it.

        Raises:
            ConversationRefused: the chat format cannot render what the model has generated.
        """
        recorder, agent = self._recorder, self._agent
        try:
            self._strategy.render_view(view, agent.tools_for_template)
        except ChatFormatError as error:
            raise self._explained(error, view) from error
        limits = [recorder.remaining]
        if self._limited:
            limits.append(max_tokens or self._sampling.max_tokens)
        if self._limited and agent.max_sampled_tokens is not None:
            limits.append(agent.max_sampled_tokens - recorder.sampled_count)
        if min(limits) < 1:
            recorder.mark_full()
            return None
        prompt = recorder.prompt_ids()
        sampling = self._sampling
        if min(limits) != sampling.max_tokens:
            sampling = replace(sampling, max_tokens=min(limits))
        started = time.perf_counter()
        try:
            generation = await self._policy.generate(
                prompt, sampling, rollout_id=self._rollout_id, images=recorder.images
            )
        except PromptTooLong:
            recorder.mark_full()
            return None
        seconds = time.perf_counter() - started
        if len(generation.ids) > sampling.max_tokens:
            raise TokenInvariantError(
                f"The policy returned {len(generation.ids)} tokens, but at most {sampling.max_tokens} were requested."
            )
        span = recorder.append_sampled(generation)
        reply = self._chat.parse_reply(generation.ids)
        stopped = generation.finish_reason == "stop"
        calls = self._numbers.assign_ids(self._calls_in(reply)) if stopped else ()
        if reply.calls is None:
            message = agent.assistant_message(reply.text, calls, opened=reply.opened)
        else:
            message = turn_message(reply.content, reply.reasoning, calls)
        self._strategy.add_reply(message)
        return AssistantTurn(
            message=message,
            text=reply.text,
            content=reply.content,
            reasoning=reply.reasoning,
            calls=calls,
            ended_by_model=stopped,
            token_span=span,
            prompt_tokens=len(prompt),
            sampled_tokens=len(generation.ids),
            seconds=seconds,
        )

    def _explained(self, error: ChatFormatError, view: Sequence[Message]) -> ChatFormatError:
        """Return the error, as `ConversationRefused` if the model's own words are the reason for it."""
        if not self._recorder.sampled_count:
            return error
        try:
            self._chat.render_prompt(without_own_text(view), self._agent.tools_for_template)
        except ChatFormatError:
            return error
        return ConversationRefused(
            f"The chat format cannot render what the model has generated, so the conversation cannot continue: {error} "
            "If this happens often, choose another chat_format or tool_call_format for the agent."
        )

    def _calls_in(self, reply: ParsedReply) -> tuple[ToolCall, ...]:
        if reply.calls is None:
            return self._agent.parse_calls(reply.text, first_call=self._numbers.next, opened=reply.opened)
        return reply.calls if self._agent.tools else ()

    def count_tokens(self, view: Sequence[Message]) -> int | None:
        """Return the length that the sequence would have; None if the policy ignores token limits."""
        try:
            return self._strategy.count_tokens(view, self._agent.tools_for_template) if self._limited else None
        except ChatFormatError as error:
            raise self._explained(error, view) from error

    def finish(self) -> None:
        """Check all token invariants and freeze the sequences."""
        self._recorder.finish()


class ChatTurnGenerator:
    """Generates turns by a policy that takes and returns messages, and records token ids if the endpoint reports them.

    If it reports none, there are no sequences, and token limits hold per turn only.

    Args:
        agent: its tool-call format decides who describes the tools and parses the calls: the endpoint or the format.
        policy: answers.
        recorder: records the tokens.
        put: records a prompt that was sent: `TokenRecorder.continue_or_begin`, or `TokenRecorder.begin_sequence` if
            every turn is a sequence.
        sampling: how to sample; ``max_tokens`` is the limit of one turn.
        rollout_id: id of the conversation.
    """

    def __init__(
        self,
        agent: Agent,
        policy: ChatPolicy,
        recorder: TokenRecorder,
        put: Callable[[RenderedTokens], None],
        sampling: SamplingParams,
        rollout_id: str,
    ) -> None:
        self._agent = agent
        self._policy = policy
        self._recorder = recorder
        self._put = put
        self._seen = 0
        self._sampling = sampling
        self._rollout_id = rollout_id
        self._numbers = CallIdAllocator()

    async def generate_turn(self, view: Sequence[Message], *, max_tokens: int | None = None) -> AssistantTurn | None:
        """Send the view and parse the answer."""
        agent = self._agent
        limits = [max_tokens or self._sampling.max_tokens]
        if agent.max_sequence_tokens is not None and len(view) > self._seen:  # else the memory has shortened it
            limits.append(agent.max_sequence_tokens - self._recorder.length)
        if agent.max_sampled_tokens is not None:
            limits.append(agent.max_sampled_tokens - self._recorder.sampled_count)
        if min(limits) < 1:
            return None
        sampling = replace(self._sampling, max_tokens=min(limits))
        started = time.perf_counter()
        try:
            generation = await self._policy.chat(view, agent.tools_for_template, sampling, rollout_id=self._rollout_id)
        except PromptTooLong:
            return None
        seconds = time.perf_counter() - started
        self._seen = len(view)
        stopped = generation.finish_reason == "stop"
        calls = self._numbers.assign_ids(self._calls_in(generation)) if stopped else ()
        return AssistantTurn(
            message=self._message(generation, calls),
            text=generation.content,
            content=generation.content,
            reasoning=generation.reasoning,
            calls=calls,
            ended_by_model=stopped,
            token_span=self._recorded(generation, view),
            prompt_tokens=generation.prompt_tokens,
            sampled_tokens=generation.sampled_tokens,
            seconds=seconds,
        )

    def count_tokens(self, view: Sequence[Message]) -> None:
        """Return None: the length is not known before the view is sent."""

    def finish(self) -> None:
        """Check all invariants of the reported tokens and freeze the sequences."""
        self._recorder.finish()

    def _calls_in(self, generation: ChatGeneration) -> tuple[ToolCall, ...]:
        agent = self._agent
        if agent.format.uses_chat_template:
            return generation.calls if agent.tools else ()
        calls = agent.parse_calls(generation.content, first_call=self._numbers.next)
        if generation.calls and not calls and agent.tools:
            raise PolicyError(
                f"The endpoint parsed a call of {generation.calls[0].name!r} itself and did not return its text, which "
                f"the tool-call format {agent.format.name!r} needs. Set Agent(tool_call_format='model'), so that the "
                "endpoint gets the tools and parses their calls."
            )
        return calls

    def _message(self, generation: ChatGeneration, calls: Sequence[ToolCall]) -> Message:
        """Return the turn as it is sent back."""
        if self._agent.format.uses_chat_template:
            return turn_message(generation.content, generation.reasoning, calls)
        message = self._agent.assistant_message(generation.content, calls)
        if generation.reasoning is not None:
            message["reasoning_content"] = generation.reasoning
        return message

    def _recorded(self, generation: ChatGeneration, view: Sequence[Message]) -> TokenSpan | None:
        """Record the token ids if they are reported and there are no images, whose tokens are never reported."""
        if generation.prompt_ids is None or generation.ids is None:
            return None
        if any(images_of(message["content"]) for message in view):
            return None
        self._put(RenderedTokens(generation.prompt_ids))
        self._recorder.prompt_ids()
        return self._recorder.append_sampled(
            Generation(generation.ids, generation.logprobs, generation.finish_reason, generation.version)
        )
