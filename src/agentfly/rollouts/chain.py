"""The chain strategy: one growing conversation, all its turns trained on one sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from agentfly.errors import TokenInvariantError
from agentfly.messages import Message
from agentfly.policies.policy import Generation
from agentfly.rollouts.chat.chat_format import ChatFormat
from agentfly.tokens import Origin, TokenSequence


class Chain:
    """One token sequence that only grows, with its invariants checked while it does.

    Held at every turn: the ids sent start with the ids sent one turn earlier plus the ids sampled then. Held at the
    end: the mask is 1 exactly on what the policy returned, and nothing rendered carries a log-prob.

    Args:
        chat: renders what is not sampled.
        max_total_tokens: the most tokens the sequence may hold. What does not fit is cut, at one index.
    """

    def __init__(self, chat: ChatFormat, max_total_tokens: int) -> None:
        self._chat = chat
        self._limit = max_total_tokens
        self._sequence = TokenSequence()
        self._sent = array("i")
        self._returned: array[int] = array("i")
        self._ended = True
        self._turns: list[tuple[int, int]] = []

    @property
    def sequences(self) -> list[TokenSequence]:
        """The one sequence."""
        return [self._sequence]

    @property
    def room(self) -> int:
        """How many more tokens the sequence may hold."""
        return self._limit - len(self._sequence)

    def begin(self, messages: Sequence[Message]) -> None:
        """Render the conversation that the rollout starts from."""
        self._sequence.append_prompt(self._chat.prompt(messages))

    def prompt(self) -> Sequence[int]:
        """The ids so far."""
        ids = self._sequence.ids[:]
        grown_from = len(self._sent) + len(self._returned)
        if ids[: len(self._sent)] != self._sent or ids[len(self._sent) : grown_from] != self._returned:
            raise TokenInvariantError(
                "The ids of this turn do not start with the ids sent and sampled one turn earlier. "
                "This is a bug in the strategy; the rollout is refused."
            )
        self._sent = ids
        self._returned = array("i")
        return ids

    def sampled(self, generation: Generation) -> tuple[int, int, int]:
        """Append the sampled ids exactly as they came."""
        if not generation.ids:
            raise TokenInvariantError("The policy returned no token at all; a generation has at least one.")
        if any(stop in generation.ids[:-1] for stop in self._chat.stop_ids):
            raise TokenInvariantError("The policy sampled on after the end of a turn; refusing what it returned.")
        start = len(self._sequence)
        self._sequence.append_sampled(generation.ids, generation.logprobs, generation.version)
        self._returned = array("i", generation.ids)
        self._ended = generation.ids[-1] in self._chat.stop_ids
        self._turns.append((start, len(self._sequence)))
        if generation.finish == "length":
            self._sequence.truncated = True
        return 0, start, len(self._sequence)

    def observed(self, messages: Sequence[Message]) -> None:
        """Render the answer to the generation alone and append it, as far as there is room."""
        self._sequence.append_observation(self._chat.continuation(messages, ended=self._ended))
        if self.room < 0:
            self._sequence.cut(self._limit)

    def finish(self) -> None:
        """Check that the mask covers exactly the sampled turns, and freeze the sequence."""
        origins = self._sequence.origins
        counted = sum(stop - start for start, stop in self._turns)
        exact = all(origins[i] == Origin.SAMPLED for start, stop in self._turns for i in range(start, stop))
        if not exact or counted != self._sequence.sampled_count:
            raise TokenInvariantError("The loss mask does not cover exactly the sampled tokens. This is a bug.")
        self._sequence.freeze()
