"""CallLog: which calls of a program wait for an answer, and what became of the last one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from agentfly.errors import Boundary
from agentfly.trajectory import Failure


class CallLog:
    """The calls of one rollout's program, as far as they say how the rollout ended.

    Attributes:
        failure: why the last call failed; None if it did not.
        refusal: why the last call that was refused was.
    """

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.refusal = ""
        self._begun = 0
        self._waiting: set[int] = set()
        self._begun_before_answer = 0  # how many calls had begun when the last answer arrived
        self._given_up = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call waits for its answer within."""
        self._begun += 1
        number = self._begun
        self._waiting.add(number)
        try:
            yield
        except asyncio.CancelledError:
            self._given_up = self._given_up or self._is_last(number)
            raise
        finally:
            self._waiting.discard(number)

    def delivered(self) -> None:
        """The program has an answer. It makes up for the calls before it."""
        self._given_up, self._begun_before_answer = False, self._begun

    def lost(self) -> None:
        """The program was not there any more when an answer was."""
        self._given_up = True

    @property
    def given_up(self) -> bool:
        """Whether the program does not wait for its last answer any more, or must not as of now.

        A call that was made before another one was answered does not count: the program had no more need of it.
        """
        return self._given_up or any(map(self._is_last, self._waiting))

    def without_answer(self) -> Failure:
        """Why a rollout in which no call was answered counts as failed: the policy had no part in it."""
        if self.given_up:
            told = "It gave up its last call before the model had answered."
        elif self.refusal:
            told = f"Its last call was refused: {self.refusal:.500}"
        else:
            told = "It made no call: was it told the base URL and the key of its rollout?"
        message = f"No call of the program was answered, so the model had no part in the rollout. {told}"
        return Failure(Boundary.USAGE, "NoModelCalls", message, by_policy=False)

    def _is_last(self, number: int) -> bool:
        return number > self._begun_before_answer
