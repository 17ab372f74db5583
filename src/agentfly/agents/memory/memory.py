"""Memory: what an agent recalls of its conversation when it speaks next."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from agentfly.contexts.context import Context
from agentfly.errors import UsageError
from agentfly.messages import Message, text_of


class Past:
    """One conversation so far, as the agent's memory sees it.

    Attributes:
        messages: the whole conversation. Read it; never write to it.
        opening: its beginning: the system prompt and the task.
        exchanges: the turns of the model in order, each a list of the turn's message and those that answer it. A memory
            takes them or leaves them whole, so that no result of a tool is parted from its call.
        context: the rollout's context: ids, the task, resources.
        state: a place for what the memory wants to keep from turn to turn; empty at first, and of this conversation
            alone.

    Args:
        ask: has the model answer a view, in at most so many tokens.
        tokens: counts the tokens of a view.
    """

    def __init__(
        self,
        messages: list[Message],
        context: Context,
        ask: Callable[[Sequence[Message], int | None], Awaitable[str]],
        tokens: Callable[[Sequence[Message]], int | None],
    ) -> None:
        self.messages = messages
        self.opening = tuple(messages)
        self.exchanges: list[list[Message]] = []
        self.context = context
        self.state: dict[str, Any] = {}
        self._ask = ask
        self._tokens = tokens

    async def ask(self, view: Sequence[Message], *, max_tokens: int | None = None) -> str:
        """Have the agent's own model answer ``view``, and get what it says, without its thoughts.

        The generation is a turn of the kind ``memory``: its tokens are recorded, and trained like any other. Tool calls
        in it are not executed.

        Args:
            view: what the model is shown. One that goes on from what it was shown last costs least.
            max_tokens: the most tokens of the answer; the agent's ``max_tokens_per_turn`` if not given.

        Raises:
            PromptTooLong: no token of an answer would fit. Left alone, it ends the rollout as ``length``.
        """
        return await self._ask(view, max_tokens)

    def tokens(self, view: Sequence[Message]) -> int | None:
        """How many tokens the model would see if it were shown ``view``; None where nobody can tell."""
        return self._tokens(view)

    def said(self, message: Message) -> None:
        """The model has taken a turn. Called by the rollout layer."""
        self.messages.append(message)
        self.exchanges.append([message])

    def answered(self, messages: Iterable[Message]) -> None:
        """The last turn was answered. Called by the rollout layer."""
        answers = list(messages)
        self.messages.extend(answers)
        self.exchanges[-1].extend(answers)


@runtime_checkable
class Memory(Protocol):
    """What an agent recalls. One object serves all rollouts, so what it keeps of one stands in `Past.state`."""

    async def recall(self, past: Past) -> Sequence[Message]:
        """The conversation as the model is to see it before its next turn.

        Under the strategy ``chain`` a view that goes on from the last one continues the token sequence, and any other
        begins a new one. Under ``step`` every view begins one.
        """
        ...


@dataclass(frozen=True)
class FullHistory:
    """Recalls everything."""

    async def recall(self, past: Past) -> Sequence[Message]:
        """The whole conversation."""
        return past.messages


def with_note(messages: Iterable[Message], note: str) -> list[Message]:
    """The messages with a note below the last one, which is the user's; in a user message of its own if it is not.

    Two user messages in a row are more than the chat templates of some models put up with.
    """
    noted = list(messages)
    last = noted[-1] if noted else None
    if last is None or last["role"] != "user":
        return [*noted, {"role": "user", "content": note}]
    content = last["content"]
    if isinstance(content, str):
        return [*noted[:-1], {**last, "content": f"{content}\n\n{note}"}]
    return [*noted[:-1], {**last, "content": [*content, {"type": "text", "text": f"\n\n{note}"}]}]


def require_whole(view: Sequence[Message], memory: Memory) -> None:
    """Raise unless a view can be shown to a model.

    Raises:
        UsageError: it is empty, or holds a tool's result without the turn that called the tool.
    """
    name = type(memory).__name__
    if not view:
        raise UsageError(f"The memory {name} recalls nothing at all. Keep at least past.opening, which has the task.")
    before = ""
    for message in view:
        if message["role"] == "tool" and before not in ("assistant", "tool"):
            raise UsageError(
                f"The memory {name} recalls the result of a tool ({text_of(message['content'])[:60]!r}) without the "
                "turn that called it, which chat templates refuse. Take whole exchanges: past.exchanges[-3:]."
            )
        before = message["role"]
