"""Rendering: the conversations of a rollout as token ids of a model that did not sample them.

What an oracle has said, or another model behind an endpoint, has no token ids of the model that is to learn from it.
Its conversation is put together again by what rollouts are made with (the same chat format, strategy and tape), with
the ids that the model would sample to say each turn in the place of those that it samples. So prompts, breaks and
masks are what they would be in a rollout of its own: the mask is 1 exactly on the turns, their ends included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agentfly.agents.agent import Agent
from agentfly.agents.memory.memory import FullHistory
from agentfly.agents.subagent import Subagent
from agentfly.errors import ConfigError
from agentfly.messages import Message, ToolCall, images_of
from agentfly.policies.policy import Generation, Tokenizer
from agentfly.rollouts.chat.agent_format import settle
from agentfly.rollouts.chat.template_format import TemplateChatFormat
from agentfly.rollouts.chat.thoughts import OPENERS
from agentfly.rollouts.strategy import STRATEGIES, require_strategy
from agentfly.rollouts.tape import NO_PLACE, Place, Tape
from agentfly.tokens import TokenSequence
from agentfly.trajectory import Trajectory, Turn


class NotRendered(ConfigError):
    """A conversation that cannot be written in the chat format of another model.

    Attributes:
        cause: why, in a word: ``images``, ``too_long``, ``other_call_format``, ``no_turns``.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class _Part:
    """One agent of a rollout, with the chat format in which its model converses."""

    agent: Agent
    chat: TemplateChatFormat


class Renderer:
    """Renders the conversations of an agent's rollouts for one model.

    Args:
        agent: the agent, with the model that is to learn.
        tokenizer: that model's.
        strategy: how turns become token sequences.
        max_tokens: the most tokens that a sequence may hold.

    Raises:
        ConfigError: there is no such strategy; or the agent's memory shows its model something else than the
            conversation, which only the rollout itself could tell.
        ChatFormatError: the model's chat template cannot carry the agent's conversations.
    """

    def __init__(self, agent: Agent, tokenizer: Tokenizer, *, strategy: str = "chain", max_tokens: int) -> None:
        require_strategy(strategy)
        self._strategy = strategy
        self._max_tokens = max_tokens
        self._parts = dict(_parts(agent, tokenizer, str(agent.model), ""))

    def render(self, trajectory: Trajectory) -> Trajectory:
        """The same trajectory, with the ids of this model in place of those it may have.

        Turns of subagents with a model of their own have none.

        Raises:
            NotRendered: it cannot be written for this model; the message says why.
        """
        sequences: list[TokenSequence] = []
        places: dict[int, Place] = {}
        conversations: dict[str, list[Turn]] = {}
        for turn in trajectory.turns:
            if not turn.policy:
                conversations.setdefault(turn.conversation, []).append(turn)
        if not conversations:
            raise NotRendered("no_turns", f"The rollout {trajectory.rollout_id} ended before its first turn.")
        for name, turns in conversations.items():
            asked = _asked_of_subagent(trajectory.subagents[name]) if name else trajectory.task.messages
            places |= self._conversation(asked, turns, sequences)
        placed = [_placed(turn, places.get(turn.index, NO_PLACE)) for turn in trajectory.turns]
        return replace(trajectory, turns=placed, sequences=sequences)

    def _conversation(
        self, asked: Sequence[Message], turns: Sequence[Turn], sequences: list[TokenSequence]
    ) -> dict[int, Place]:
        part = self._parts[turns[0].agent]
        agent, chat = part.agent, part.chat
        tape = Tape(sequences, max_tokens=self._max_tokens, stop_ids=chat.stop_ids)
        strategy = STRATEGIES[self._strategy](chat, tape)
        system = agent.system_message()
        messages: list[Message] = [{"role": "system", "content": system}, *asked] if system else [*asked]
        _require_no_images(messages, turns)
        places = {}
        for turn in turns:
            strategy.show(messages, agent.template_tools)
            calls = tuple(result.call for result in turn.results)
            answers = [agent.result_message(result.call, result.observation) for result in turn.results]
            text = _text(agent, turn, calls)
            reasoning = turn.reasoning if turn.content is None else None
            ids = chat.spoken(text, reasoning=reasoning, answers=answers, tools=agent.template_tools)
            generation = Generation(ids, None, "stop", 0) if turn.stopped else Generation(ids[:-1], None, "length", 0)
            if tape.room < len(generation.ids):
                raise NotRendered(
                    "too_long",
                    f"A conversation of more than {self._max_tokens} tokens does not fit into the model's context.",
                )
            tape.prompt()
            places[turn.index] = tape.sampled(generation)
            reply = chat.reply(generation.ids)
            said = agent.said(reply.text, calls, opened=reply.opened)
            strategy.replied(said)
            messages += [said, *answers]
        tape.finish()
        return places


def _parts(agent: Agent, tokenizer: Tokenizer, model: str, path: str) -> Iterator[tuple[str, _Part]]:
    if not isinstance(agent.memory, FullHistory):
        raise ConfigError(
            f"The agent remembers by {type(agent.memory).__name__}, and what that showed its model is told by the ids "
            "of the model that sampled alone. Learn from rollouts of the model itself, or from an agent with the full "
            "history."
        )
    settled, chat = settle(replace(agent, chat_format="template"), tokenizer)
    assert isinstance(chat, TemplateChatFormat)
    yield path, _Part(settled, chat)
    for tool in agent.tools:
        if isinstance(tool, Subagent) and str(tool.agent.model) == model:
            yield from _parts(tool.agent, tokenizer, model, "/".join(filter(None, (path, tool.name))))


def _asked_of_subagent(messages: Sequence[Message]) -> list[Message]:
    """What a subagent was asked: the one message of its prompt."""
    return [message for message in messages if message["role"] == "user"][:1]


def _opened(turn: Turn) -> str:
    """The marker by which the prompt of a turn had opened thinking; its text has thoughts that it does not open."""
    if turn.reasoning is None or turn.content is None or turn.text.lstrip().startswith(tuple(OPENERS)):
        return ""
    return next((opener for opener, closer in OPENERS.items() if closer in turn.text), "<think>")


def _text(agent: Agent, turn: Turn, calls: Sequence[ToolCall]) -> str:
    """What the turn says in the agent's tool-call format.

    Raises:
        NotRendered: its calls are written in another format within the text.
    """
    if not turn.stopped or [(one.name, one.arguments) for one in agent.calls_in(turn.text, opened=_opened(turn))] == [
        (one.name, one.arguments) for one in calls
    ]:
        return turn.text
    if turn.sequence >= 0 or any(call.arguments is None for call in calls):
        raise NotRendered(
            "other_call_format",
            f"The calls of turn {turn.index} are not in the tool-call format {agent.format.name!r} of this model. Give "
            "the agent one that both models have, for instance tool_call_format='hermes'.",
        )
    written = [agent.format.write(call.name, call.arguments or {}) for call in calls]
    return "\n".join(filter(None, [turn.text, *written]))


def _require_no_images(messages: Sequence[Message], turns: Sequence[Turn]) -> None:
    shown = any(images_of(message["content"]) for message in messages)
    if shown or any(result.images for turn in turns for result in turn.results):
        raise NotRendered("images", "A conversation with images cannot be learned from: the learner has no eyes.")


def _placed(turn: Turn, place: Place) -> Turn:
    return replace(turn, sequence=place.sequence, start=place.start, stop=place.stop)
