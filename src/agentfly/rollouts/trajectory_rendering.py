"""Rendering of trajectories as token ids of a model that did not sample them.

An oracle, or another model behind an endpoint, does not produce token ids of the model that learns from it. Its
conversation is rendered with the same chat format, strategy and recorder as in a rollout. Each turn gets the ids with
which the model would write it. So prompts, breaks and masks equal those of the model's own rollout: the mask is 1
exactly on the turns, their ends included.

Token limits do not apply to a script, because it samples no tokens. `TokenRequirement` says whether a model could
generate the same within the agent's limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agentfly.agents.agent import Agent, Subagent
from agentfly.agents.memory import FullHistory
from agentfly.core.errors import ConfigError
from agentfly.core.messages import Message, ToolCall, images_of
from agentfly.core.tokens import TokenSequence
from agentfly.core.trajectory import Trajectory, Turn
from agentfly.formats.chat.template_format import TemplateChatFormat
from agentfly.formats.reasoning import REASONING_MARKERS
from agentfly.policies.policy import Generation, Tokenizer
from agentfly.rollouts.agent_runtime import resolve_chat_format
from agentfly.rollouts.token_recorder import NO_TOKENS, STRATEGIES, TokenRecorder, TokenSpan, require_strategy


class CannotRender(ConfigError):
    """A conversation that cannot be rendered in the chat format of another model.

    Attributes:
        cause: the reason: ``images``, ``too_long``, ``other_call_format`` or ``no_turns``.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class _RenderedAgent:
    """One agent of a rollout, with the chat format in which its model converses."""

    agent: Agent
    chat: TemplateChatFormat


class TrajectoryRenderer:
    """Renders the conversations of an agent's rollouts for one model.

    Args:
        agent: the agent, with the model that learns.
        tokenizer: the tokenizer of that model.
        strategy: how turns become token sequences.
        max_tokens: maximum number of tokens in a sequence.

    Raises:
        ConfigError: the strategy is unknown; or the agent's memory shows its model something other than the
            conversation, so that the trajectory does not contain what the model saw.
        ChatFormatError: the model's chat template cannot render the agent's conversations.
    """

    def __init__(self, agent: Agent, tokenizer: Tokenizer, *, strategy: str = "chain", max_tokens: int) -> None:
        require_strategy(strategy)
        self._strategy = strategy
        self._max_tokens = max_tokens
        self._parts = dict(_parts(agent, tokenizer, str(agent.model), ""))

    def render(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with token ids of this model, which replace any that it has.

        Turns of subagents with another model have none.

        Raises:
            CannotRender: it cannot be rendered for this model; the message says why.
        """
        sequences: list[TokenSequence] = []
        spans: dict[int, TokenSpan] = {}
        conversations: dict[str, list[Turn]] = {}
        for turn in trajectory.turns:
            if not turn.other_model:
                conversations.setdefault(turn.conversation, []).append(turn)
        if not conversations:
            raise CannotRender("no_turns", f"The rollout {trajectory.rollout_id} ended before its first turn.")
        for name, turns in conversations.items():
            asked = _asked_of_subagent(trajectory.subagents[name]) if name else trajectory.task.messages
            spans |= self._conversation(asked, turns, sequences)
        placed = [_placed(turn, spans.get(turn.index, NO_TOKENS)) for turn in trajectory.turns]
        return replace(trajectory, turns=placed, sequences=sequences)

    def _conversation(
        self, asked: Sequence[Message], turns: Sequence[Turn], sequences: list[TokenSequence]
    ) -> dict[int, TokenSpan]:
        part = self._parts[turns[0].agent]
        agent, chat = part.agent, part.chat
        recorder = TokenRecorder(sequences, max_tokens=self._max_tokens, stop_ids=chat.stop_ids)
        strategy = STRATEGIES[self._strategy](chat, recorder)
        system = agent.system_message()
        messages: list[Message] = [{"role": "system", "content": system}, *asked] if system else [*asked]
        _require_no_images(messages, turns)
        spans = {}
        for turn in turns:
            strategy.render_view(messages, agent.tools_for_template)
            calls = tuple(result.call for result in turn.tool_results)
            answers = [agent.result_message(result.call, result.observation) for result in turn.tool_results]
            text = _text(agent, turn, calls)
            reasoning = turn.reasoning if turn.content is None else None
            ids = chat.encode_turn(text, reasoning=reasoning, answers=answers, tools=agent.tools_for_template)
            generation = (
                Generation(ids, None, "stop", 0) if turn.ended_by_model else Generation(ids[:-1], None, "length", 0)
            )
            if recorder.remaining < len(generation.ids):
                raise CannotRender(
                    "too_long",
                    f"A conversation of more than {self._max_tokens} tokens does not fit into the model's context.",
                )
            recorder.prompt_ids()
            spans[turn.index] = recorder.append_sampled(generation)
            reply = chat.parse_reply(generation.ids)
            reply_message = agent.assistant_message(reply.text, calls, opened=reply.opened)
            strategy.add_reply(reply_message)
            messages += [reply_message, *answers]
        recorder.finish()
        return spans


def _parts(agent: Agent, tokenizer: Tokenizer, model: str, path: str) -> Iterator[tuple[str, _RenderedAgent]]:
    if not isinstance(agent.memory, FullHistory):
        raise ConfigError(
            f"The agent's memory is {type(agent.memory).__name__}. Only the token ids of the model that sampled show "
            "what this memory recalled, and they are not this model's. Learn from rollouts of the model itself, or "
            "from an agent with the full history."
        )
    settled, chat = resolve_chat_format(replace(agent, chat_format="template"), tokenizer)
    assert isinstance(chat, TemplateChatFormat)
    yield path, _RenderedAgent(settled, chat)
    for tool in agent.tools:
        if isinstance(tool, Subagent) and str(tool.agent.model) == model:
            yield from _parts(tool.agent, tokenizer, model, "/".join(filter(None, (path, tool.name))))


def _asked_of_subagent(messages: Sequence[Message]) -> list[Message]:
    """Return the prompt of a subagent: its one user message."""
    return [message for message in messages if message["role"] == "user"][:1]


def _opened(turn: Turn) -> str:
    """Return the reasoning marker with which the prompt of a turn ended, if its text closes but does not open one."""
    if turn.reasoning is None or turn.content is None or turn.text.lstrip().startswith(tuple(REASONING_MARKERS)):
        return ""
    return next((opener for opener, closer in REASONING_MARKERS.items() if closer in turn.text), "<think>")


def _text(agent: Agent, turn: Turn, calls: Sequence[ToolCall]) -> str:
    """Return the text of a turn with its calls in the agent's tool-call format.

    Raises:
        CannotRender: the text contains its calls in another format.
    """
    if not turn.ended_by_model or [
        (one.name, one.arguments) for one in agent.parse_calls(turn.text, opened=_opened(turn))
    ] == [(one.name, one.arguments) for one in calls]:
        return turn.text
    if turn.sequence >= 0 or any(call.arguments is None for call in calls):
        raise CannotRender(
            "other_call_format",
            f"The calls of turn {turn.index} are not in the tool-call format {agent.format.name!r} of this model. Give "
            "the agent a format that both models support, for instance tool_call_format='hermes'.",
        )
    written = [agent.format.write(call.name, call.arguments or {}) for call in calls]
    return "\n".join(filter(None, [turn.text, *written]))


def _require_no_images(messages: Sequence[Message], turns: Sequence[Turn]) -> None:
    shown = any(images_of(message["content"]) for message in messages)
    if shown or any(result.images for turn in turns for result in turn.tool_results):
        raise CannotRender("images", "A conversation with images cannot be learned from: the learner takes only text.")


def _placed(turn: Turn, span: TokenSpan) -> Turn:
    return replace(turn, sequence=span.sequence, start=span.start, stop=span.stop)


@dataclass(frozen=True)
class TokenRequirement:
    """The number of tokens that a model needs to generate the same rollout as a script.

    Attributes:
        turn: length of the longest turn, its end included.
        sequence: length of the longest sequence: prompt, turns and observations.
        exceeded_limits: a message for each limit of the agent that is too low.
    """

    turn: int
    sequence: int
    exceeded_limits: tuple[str, ...]

    @classmethod
    def count(
        cls, trajectory: Trajectory, agent: Agent, tokenizer: Tokenizer, *, strategy: str, context_length: int
    ) -> TokenRequirement:
        """Count the tokens of a rollout in a model's chat format.

        Args:
            trajectory: the rollout.
            agent: the agent that was rolled out, with the model.
            tokenizer: the model's tokenizer.
            strategy: how turns become token sequences.
            context_length: context length of the model, in tokens.

        Raises:
            CannotRender: the conversation cannot be rendered for the model; the message says why.
            ConfigError: the agent's memory shows its model something other than the conversation.
            ChatFormatError: the model's chat template cannot render the agent's conversations.
        """
        rendered = TrajectoryRenderer(agent, tokenizer, strategy=strategy, max_tokens=context_length).render(trajectory)
        limits = dict(_agents(agent, ""))
        generated = [turn for turn in rendered.turns if turn.sequence >= 0]
        exceeded: dict[str, str] = {}
        sampled: dict[str, int] = {}
        for turn in generated:
            own, tokens = limits[turn.agent], turn.stop - turn.start
            whole = len(rendered.sequences[turn.sequence])
            sampled[turn.conversation] = sampled.get(turn.conversation, 0) + tokens
            for name, limit, needed, what in (
                ("max_tokens_per_turn", own.max_tokens_per_turn, tokens, f"turn {turn.index + 1} takes"),
                ("max_sequence_tokens", own.max_sequence_tokens, whole, "the conversation takes"),
                ("max_sampled_tokens", own.max_sampled_tokens, sampled[turn.conversation], "the turns take"),
            ):
                if limit is not None and needed > limit:
                    exceeded[name] = f"{what} {needed} tokens of the model, and {name} is {limit}"
        return cls(
            max((turn.stop - turn.start for turn in generated), default=0),
            max(map(len, rendered.sequences), default=0),
            tuple(exceeded.values()),
        )

    def require_within_limits(self) -> None:
        """Check the rollout against the agent's limits.

        Raises:
            ConfigError: a limit is too low.
        """
        if self.exceeded_limits:
            raise ConfigError(
                f"The model could not generate what the oracle writes: {'; '.join(self.exceeded_limits)}. Raise the "
                "limit, or shorten the oracle."
            )


def _agents(agent: Agent, path: str) -> Iterator[tuple[str, Agent]]:
    """Yield the agent and its subagents with the paths that turns refer to."""
    yield path, agent
    for tool in agent.tools:
        if isinstance(tool, Subagent):
            yield from _agents(tool.agent, "/".join(filter(None, (path, tool.name))))
