"""Memory: the part of its conversation that an agent sees at its next turn. Full history, window or summary."""

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
        messages: the whole conversation. Read-only.
        opening: its first messages: the system prompt and the task.
        exchanges: the turns of the model in order. Each is a list of the turn's message and the messages that answer
            it. A memory keeps or drops a whole exchange, so that no tool result is separated from its call.
        context: the rollout's context: ids, the task, resources.
        state: data that the memory keeps between turns of this conversation; empty at first.

    Args:
        ask: generates the model's answer to a view, with a maximum number of tokens.
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
        """Generate the model's answer to ``view``, and return it without its reasoning.

        The generation is a turn of the kind ``memory``. Its tokens are recorded and trained like any other. Tool calls
        in it are not executed.

        Args:
            view: the messages for the model. A view that extends the last one is cheapest.
            max_tokens: maximum number of tokens of the answer; by default the agent's ``max_tokens_per_turn``.

        Raises:
            PromptTooLong: the view leaves no room for an answer. If not caught, the rollout ends with ``length``.
            UsageError: the view is invalid, or ``max_tokens`` is below 1.
        """
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"past.ask(…, max_tokens={max_tokens}): it must be at least 1, or None.")
        return await self._ask(view, max_tokens)

    def tokens(self, view: Sequence[Message]) -> int | None:
        """Return the number of tokens in ``view``; None where it cannot be counted."""
        return self._tokens(view)

    def append_turn(self, message: Message) -> None:
        """Append a turn of the model. Called by the rollout layer."""
        self.messages.append(message)
        self.exchanges.append([message])

    def append_results(self, messages: Iterable[Message]) -> None:
        """Append the answers to the last turn. Called by the rollout layer."""
        answers = list(messages)
        self.messages.extend(answers)
        self.exchanges[-1].extend(answers)


@runtime_checkable
class Memory(Protocol):
    """Selects the part of a conversation that the model sees. One object serves all rollouts; use `Past.state`."""

    async def recall(self, past: Past) -> Sequence[Message]:
        """Return the messages that the model sees at its next turn.

        Under the strategy ``chain`` a view that extends the last one continues the token sequence. Any other view
        begins a new one. Under ``step`` every view begins a new one.
        """
        ...


@dataclass(frozen=True)
class FullHistory:
    """Shows the whole conversation."""

    async def recall(self, past: Past) -> Sequence[Message]:
        """The whole conversation."""
        return past.messages


def with_note(messages: Iterable[Message], note: str) -> list[Message]:
    """Return the messages with a note appended to the last user message, or as a new user message.

    The note joins an existing user message because some chat templates reject two user messages in a row.
    """
    noted = list(messages)
    last = noted[-1] if noted else None
    if last is None or last["role"] != "user":
        return [*noted, {"role": "user", "content": note}]
    return [*noted[:-1], {**last, "content": concat_content(last["content"], f"\n\n{note}")}]


async def recall_view(memory: Memory, past: Past) -> Sequence[Message]:
    """Call a memory and validate its view.

    Raises:
        UsageError: the view is invalid, or the memory tried to end more than its rollout.
        Exception: any exception that the memory raises.
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
        view: the view that a memory returned, or passed to `Past.ask`.
        memory: the memory.
        exchanges: the turns of the conversation, each with its answers.

    Raises:
        UsageError: the view is not a sequence of messages, is empty, or separates tool results from their calls or
            from the other results of the turn.
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
            f"({truncate_middle(parted, 60)!r}), which chat templates refuse. Take whole exchanges: "
            "past.exchanges[-3:]."
        )


def _fault(message: object) -> str | None:
    """Return what is wrong with a message; None if it is valid."""
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
    """Return the text of a tool result that is misplaced or missing; None if there is none."""
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
    """Shows the task and the last turns, each with the results of its calls.

    Once the window drops a turn, each further turn begins a new token sequence, also under the strategy ``chain``.

    Args:
        turns: number of turns in the window.

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
"""Summarises the messages that the model sees. A sync function runs on a thread."""

INSTRUCTION = (
    "Your memory is almost full. Write down what was done and found out so far and what is still to do, so that the "
    "work can go on from your words and the task alone. Call no tool now."
)
HEADING = "What was done so far:"

_FOLDED, _SUMMARY = "folded", "summary"


@dataclass(frozen=True, kw_only=True)
class SummaryFolding:
    """Shows everything up to a limit; then a summary replaces the past turns, and a new token sequence begins.

    The model writes the summary in a turn of the kind ``memory``, which is trained like any other, unless ``summarise``
    is given.

    Args:
        after_tokens: fold once the view has more tokens. Leave room for one more observation and the summary below the
            agent's ``max_sequence_tokens``. No effect for a policy that takes messages.
        after_turns: fold once the view has more turns.
        keep_turns: number of last turns kept verbatim after the summary.
        max_summary_tokens: maximum number of tokens of the model's summary. A longer one is truncated.
        instruction: the request for a summary.
        summarise: makes the summary instead of the model, from the view and the rollout's context.

    Raises:
        ConfigError: neither ``after_tokens`` nor ``after_turns`` is given, or the numbers contradict each other.
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
        """Return the task with the summary of folded turns, and the turns that are not folded."""
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
        return summary.encode("utf-8", errors="replace").decode()  # a lone surrogate cannot be tokenized


_KINDS: dict[str, type[Memory]] = {"full": FullHistory, "window": Window, "summary": SummaryFolding}


def make_memory(kind: str, settings: Mapping[str, Any]) -> Memory:
    """Make a memory of a kind (``full``, ``window`` or ``summary``) with settings.

    Raises:
        ConfigError: the kind or a setting is unknown, or a setting has an invalid value.
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
