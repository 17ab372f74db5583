"""Memory: what an agent recalls of its conversation when it speaks next."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, get_args, runtime_checkable

from agentfly.agents.excerpt import excerpt
from agentfly.agents.invocation import FunctionFailed, invoke
from agentfly.contexts.context import Context
from agentfly.errors import UsageError, type_of
from agentfly.messages import Message, Role, joined, text_of

_VIEW = "[*past.opening, *past.exchanges[-1]]"


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
            UsageError: the view cannot be shown to a model, or ``max_tokens`` is below 1.
        """
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"past.ask(…, max_tokens={max_tokens}): it must be at least 1, or None.")
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
    return [*noted[:-1], {**last, "content": joined(last["content"], f"\n\n{note}")}]


async def recall(memory: Memory, past: Past) -> Sequence[Message]:
    """What a memory recalls, checked.

    Raises:
        UsageError: it is no view that a model could be shown, or the memory tried to end more than its rollout.
        Exception: what the memory raises.
    """
    try:
        view = await invoke(partial(memory.recall, past), {}, timeout_s=None, context=past.context)
    except FunctionFailed as failed:
        failed.raise_as_of(f"the memory {type(memory).__name__}")
    require_view(view, memory, past.exchanges)
    return view  # type: ignore[no-any-return]


def require_view(view: object, memory: Memory, exchanges: Sequence[Sequence[Message]]) -> None:
    """Raise unless a view can be shown to a model.

    Args:
        view: what a memory recalls, or asks about.
        memory: the memory.
        exchanges: the turns of the conversation, each with what answers it.

    Raises:
        UsageError: it is no sequence of messages, or empty, or parts the results of tools from their calls or from one
            another.
    """
    name = f"The view that the memory {type(memory).__name__} gives"
    if isinstance(view, (str, bytes)) or not isinstance(view, Sequence):
        raise UsageError(f"{name} is {type_of(view)}. It must be a list of messages, for instance {_VIEW}.")
    if not view:
        raise UsageError(f"{name} is empty. Keep at least past.opening, which has the task.")
    for message in view:
        if fault := _fault(message):
            raise UsageError(f"{name} holds {excerpt(repr(message), 200)}, {fault}. Take messages as in {_VIEW}.")
    parted = _parted(view, exchanges)
    if parted is not None:
        raise UsageError(
            f"{name} parts the result of a tool from its call or from the other results of that turn "
            f"({excerpt(parted, 60)!r}), which chat templates refuse. Take whole exchanges: past.exchanges[-3:]."
        )


def _fault(message: object) -> str | None:
    """What is wrong with one message."""
    if not isinstance(message, Mapping) or message.get("role") not in get_args(Role):
        return f"which is no message with a role: {', '.join(get_args(Role))}"
    content = message.get("content")
    parts = [] if isinstance(content, str) else content
    if not isinstance(parts, (list, tuple)):
        return "whose content is neither text nor a list of texts and images"
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "image") or kind not in part:
            return "whose content holds something that is neither a text nor an image"
    return None


def _parted(view: Sequence[Message], exchanges: Sequence[Sequence[Message]]) -> str | None:
    """The text of a result that stands, or is missing, where it must not."""
    before = ""
    for message in view:
        if message["role"] == "tool" and before not in ("assistant", "tool"):
            return text_of(message["content"])
        before = message["role"]
    shown = {message.get("tool_call_id") for message in view if message["role"] == "tool"}
    called = {call.get("id") for message in view for call in message.get("tool_calls", ())}
    for exchange in exchanges:
        results = {message.get("tool_call_id"): message for message in exchange if message["role"] == "tool"}
        missing = [one for one in results if one not in shown]
        if missing and (len(missing) < len(results) or not called.isdisjoint(missing)):
            return text_of(results[missing[0]]["content"])
    return None
