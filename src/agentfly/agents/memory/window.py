"""Window: a memory of the task and the last turns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from agentfly.agents.memory.memory import Past
from agentfly.durations import require_whole
from agentfly.messages import Message


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
