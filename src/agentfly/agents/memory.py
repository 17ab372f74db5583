"""Memory: what an agent recalls of its conversation when it speaks next.

Memory: what an agent recalls of its conversation when it speaks next.

Window: a memory of the task and the last turns.

SummaryFolding: a memory that writes down what has happened, and goes on from there.

The memories by name, as a configuration writes them.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, get_args, runtime_checkable

from agentfly.agents.invocation import FunctionFailed, call_user_function
from agentfly.contexts.context import Context
from agentfly.core.errors import ConfigError, UsageError, suggest_name, type_of
from agentfly.core.messages import Message, Role, concat_content, text_of
from agentfly.core.numbers import require_whole
from agentfly.core.truncation import truncate_middle

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

    def append_turn(self, message: Message) -> None:
        """The model has taken a turn. Called by the rollout layer."""
        self.messages.append(message)
        self.exchanges.append([message])

    def append_results(self, messages: Iterable[Message]) -> None:
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
    return [*noted[:-1], {**last, "content": concat_content(last["content"], f"\n\n{note}")}]


async def recall_view(memory: Memory, past: Past) -> Sequence[Message]:
    """What a memory recalls, checked.

    Raises:
        UsageError: it is no view that a model could be shown, or the memory tried to end more than its rollout.
        Exception: what the memory raises.
    """
    try:
        view = await call_user_function(partial(memory.recall, past), {}, timeout_s=None, context=past.context)
    except FunctionFailed as failed:
        failed.reraise_for(f"the memory {type(memory).__name__}")
    validate_view(view, memory, past.exchanges)
    return view  # type: ignore[no-any-return]


def validate_view(view: object, memory: Memory, exchanges: Sequence[Sequence[Message]]) -> None:
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
            raise UsageError(
                f"{name} holds {truncate_middle(repr(message), 200)}, {fault}. Take messages as in {_VIEW}."
            )
    parted = _parted(view, exchanges)
    if parted is not None:
        raise UsageError(
            f"{name} parts the result of a tool from its call or from the other results of that turn "
            f"({truncate_middle(parted, 60)!r}), which chat templates refuse. Take whole exchanges: past.exchanges[-3:]."
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


@dataclass(frozen=True)
class Window:
    """Recalls the task and the last turns, each with the results of its calls.

    Once turns fall out of the window, every further one begins a new token sequence, under the strategy ``chain`` too.

    Args:
        turns: how many turns it holds.

    Raises:
        ConfigError: ``turns`` is not a whole number of at least 1.
    """

    turns: int

    def __post_init__(self) -> None:
        require_whole("Window", turns=self.turns)

    async def recall(self, past: Past) -> Sequence[Message]:
        """The opening and the last exchanges."""
        return [*past.opening, *itertools.chain.from_iterable(past.exchanges[-self.turns :])]


Summarise = Callable[[Sequence[Message], Context], str | Awaitable[str]]
"""Makes a summary of the messages that the model sees. A sync one runs on a thread."""

INSTRUCTION = (
    "Your memory is almost full. Write down what was done and found out so far and what is still to do, so that the "
    "work can go on from your words and the task alone. Call no tool now."
)
HEADING = "What was done so far:"

_FOLDED, _SUMMARY = "folded", "summary"


@dataclass(frozen=True, kw_only=True)
class SummaryFolding:
    """Recalls everything until that is too much; then the past is summarised, and the summary stands for it.

    The summary is a turn of the model of its own, of the kind ``memory``, and is trained like any other; unless
    ``summarise`` makes it. A new token sequence begins then.

    Args:
        after_tokens: fold once the model would see more tokens than that. Leave room for one more observation and the
            summary below the agent's ``max_sequence_tokens``. Without effect for a policy that takes messages.
        after_turns: fold once the model would see more turns than that.
        keep_turns: how many of the last turns are kept as they were, after the summary.
        max_summary_tokens: the most tokens of a summary by the model. A longer one is used as far as it goes.
        instruction: what the model is asked.
        summarise: makes the summary instead of the model, from what the model sees and the rollout's context.

    Raises:
        ConfigError: nothing says when to fold, or the numbers contradict one another.
    """

    after_tokens: int | None = None
    after_turns: int | None = None
    keep_turns: int = 0
    max_summary_tokens: int = 256
    instruction: str = INSTRUCTION
    summarise: Summarise | None = None

    def __post_init__(self) -> None:
        if self.after_tokens is None and self.after_turns is None:
            raise ConfigError("SummaryFolding(): say when to fold, by after_tokens=… or after_turns=….")
        for name, least in (("after_tokens", 1), ("after_turns", 1), ("keep_turns", 0), ("max_summary_tokens", 1)):
            number = getattr(self, name)
            if number is not None or not name.startswith("after_"):
                require_whole("SummaryFolding", least=least, **{name: number})
        if not isinstance(self.instruction, str) or not self.instruction:
            raise ConfigError(f"SummaryFolding(instruction={self.instruction!r:.100}): it must be a text.")
        if self.summarise is not None and not callable(self.summarise):
            raise ConfigError(f"SummaryFolding(summarise={self.summarise!r:.100}): it must be a function, or None.")
        if self.after_turns is not None and self.keep_turns >= self.after_turns:
            raise ConfigError(
                f"SummaryFolding(after_turns={self.after_turns}, keep_turns={self.keep_turns}): what is kept would be "
                "too much again at once. Keep fewer turns."
            )

    async def recall(self, past: Past) -> Sequence[Message]:
        """What has not been folded, after the task and the summary of what has."""
        view = self._view(past)
        foldable = len(past.exchanges) - self.keep_turns
        if foldable > past.state.get(_FOLDED, 0) and self._is_too_much(past, view):
            past.state[_SUMMARY] = await self._summary(past, view)
            past.state[_FOLDED] = foldable
            view = self._view(past)
        return view

    def _view(self, past: Past) -> list[Message]:
        folded = past.state.get(_FOLDED, 0)
        opening = with_note(past.opening, f"{HEADING}\n{past.state[_SUMMARY]}") if folded else past.opening
        return [*opening, *itertools.chain.from_iterable(past.exchanges[folded:])]

    def _is_too_much(self, past: Past, view: Sequence[Message]) -> bool:
        turns = len(past.exchanges) - past.state.get(_FOLDED, 0)
        if self.after_turns is not None and turns > self.after_turns:
            return True
        if self.after_tokens is None:
            return False
        tokens = past.tokens(view)
        return tokens is not None and tokens > self.after_tokens

    async def _summary(self, past: Past, view: Sequence[Message]) -> str:
        if self.summarise is None:
            return await past.ask(with_note(view, self.instruction), max_tokens=self.max_summary_tokens)
        work = partial(self.summarise, tuple(view), past.context)
        try:
            summary = await call_user_function(work, {}, timeout_s=None, context=past.context)
        except FunctionFailed as failed:
            failed.reraise_for("SummaryFolding(summarise=…)")
        if not isinstance(summary, str):
            raise UsageError(f"SummaryFolding(summarise=…) returned {type_of(summary)}; it must return a text.")
        return summary.encode("utf-8", errors="replace").decode()  # half of a surrogate pair could not be tokenized


_KINDS: dict[str, type[Memory]] = {"full": FullHistory, "window": Window, "summary": SummaryFolding}


def make_memory(kind: str, settings: Mapping[str, Any]) -> Memory:
    """A memory of a kind: ``full``, ``window`` or ``summary``, with its settings.

    Raises:
        ConfigError: there is no such kind, it has no such setting, or a setting has a value that it cannot have.
    """
    if kind not in _KINDS:
        raise ConfigError(f"There is no memory {kind!r}. {suggest_name(kind, _KINDS)}")
    made = _KINDS[kind]
    known = inspect.signature(made).parameters
    for name in settings:
        if name not in known:
            raise ConfigError(f"The memory {kind!r} has no setting {name!r}. {suggest_name(name, known)}")
    try:
        return made(**settings)
    except TypeError as error:
        raise ConfigError(f"The memory {kind!r} cannot be made of {dict(settings)!r}: {error}.") from None
