"""SummaryFolding: a memory that writes down what has happened, and goes on from there."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from agentfly.agents.invocation import FunctionFailed, invoke
from agentfly.agents.memory.memory import Past, with_note
from agentfly.contexts.context import Context
from agentfly.durations import require_whole
from agentfly.errors import ConfigError, UsageError, type_of
from agentfly.messages import Message

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
            summary = await invoke(work, {}, timeout_s=None, context=past.context)
        except FunctionFailed as failed:
            failed.raise_as_of("SummaryFolding(summarise=…)")
        if not isinstance(summary, str):
            raise UsageError(f"SummaryFolding(summarise=…) returned {type_of(summary)}; it must return a text.")
        return summary.encode("utf-8", errors="replace").decode()  # half of a surrogate pair could not be tokenized
