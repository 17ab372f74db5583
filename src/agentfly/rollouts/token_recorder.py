"""Token recorder: the append-only token sequences of a conversation, and the strategies that build them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentfly.core.errors import ConfigError, TokenInvariantError, suggest_name
from agentfly.core.messages import Message, PlacedImage
from agentfly.core.tokens import Origin, TokenSequence, sampled_ids
from agentfly.formats.chat.chat_format import ChatFormat, RenderedTokens, ToolDefinitions
from agentfly.policies.policy import Generation


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """The position of a turn's tokens: ``start`` to ``stop`` (exclusive) of a sequence of the trajectory."""

    sequence: int
    start: int
    stop: int


NO_TOKENS = TokenSpan(-1, 0, 0)
"""The span of a turn whose tokens are not known."""


class TokenRecorder:
    """Records the token sequences of one conversation and checks their invariants.

    Invariants at every turn: the ids sent start with the ids sent one turn earlier in the same sequence, followed by
    the ids sampled then. Each sampled id has a token and is not reserved for images. Invariants at the end: the mask is
    1 exactly on what the policy returned, and rendered tokens carry no log-probs.

    Args:
        sequences: the trajectory's sequences, to which those of this conversation are added.
        max_tokens: maximum number of tokens in one sequence. A longer prompt or observation is cut there, which ends
            the sequence. An image that the cut would split is left out with all its tokens.
        stop_ids: the ids that end a generation.
        token_ids: the ids that the policy's tokenizer has a token for; None if they are not known. A generation may
            not contain other ids, because they stand for no text.
        barred_ids: further ids that no generation may contain, such as those of images.
    """

    def __init__(
        self,
        sequences: list[TokenSequence],
        *,
        max_tokens: int,
        stop_ids: Sequence[int],
        token_ids: Collection[int] | None = None,
        barred_ids: Sequence[int] = (),
    ) -> None:
        self._sequences = sequences
        self._limit = max_tokens
        self._stop_ids = frozenset(stop_ids)
        self._token_ids = token_ids
        self._barred_ids = frozenset(barred_ids)
        self._full = False  # nothing more can be sampled in the current sequence
        self._current: int | None = None
        self._sent = array("i")
        self._returned = array("i")
        self._spans: list[TokenSpan] = []

    @property
    def ids(self) -> Sequence[int]:
        """All ids sent and sampled in the current sequence. Do not change them."""
        return self._sequence.ids

    @property
    def images(self) -> Sequence[PlacedImage]:
        """The images of the current sequence."""
        return tuple(self._sequence.images)

    @property
    def length(self) -> int:
        """Number of tokens in the current sequence; 0 before the first."""
        return len(self._sequence) if self._current is not None else 0

    @property
    def sampled_count(self) -> int:
        """Number of tokens sampled in all sequences."""
        return sum(span.stop - span.start for span in self._spans)

    @property
    def remaining(self) -> int:
        """Number of tokens that the current sequence has room for; below 1 after a rendered part was cut."""
        return 0 if self._full else self._limit - self.length

    def begin_sequence(self, prompt: RenderedTokens) -> None:
        """Begin a sequence with a prompt."""
        unanswered = self._unanswered()
        if unanswered and not self._full:
            raise TokenInvariantError("A sequence began before the previous one had a generation. This is a bug.")
        if self._current is not None and unanswered:
            self._sequences[self._current] = TokenSequence()
        else:
            self._current = len(self._sequences)
            self._sequences.append(TokenSequence())
        self._full = False
        self._sent, self._returned = array("i"), array("i")
        self._sequence.append_prompt(prompt.ids, prompt.images)
        self._cut()

    def append_rendered(self, rendered: RenderedTokens) -> None:
        """Continue the current sequence with the rendered answer to its last generation."""
        self._sequence.append_observation(rendered.ids, rendered.images)
        self._cut()

    def continue_or_begin(self, prompt: RenderedTokens) -> None:
        """Record a whole prompt. It continues the current sequence if it starts with it, else it begins a new one."""
        known = self.length
        if known and len(prompt.ids) > known and self._starts(prompt, known):
            rest = tuple(placed.shifted(-known) for placed in prompt.images if placed.start >= known)
            self.append_rendered(RenderedTokens(prompt.ids[known:], rest))
        else:
            self.begin_sequence(prompt)

    def mark_full(self) -> None:
        """Mark the current sequence as full. The next one replaces it if it has no generation."""
        self._full = True

    def prompt_ids(self) -> Sequence[int]:
        """Return the ids to send, after a check that earlier ids are unchanged.

        Raises:
            TokenInvariantError: they do not start with the ids sent and sampled before.
        """
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

    def append_sampled(self, generation: Generation) -> TokenSpan:
        """Append the sampled ids exactly as the policy returned them.

        Raises:
            TokenInvariantError: there is no id, an id after a stop id, a barred id, or an id without a token.
        """
        ids = sampled_ids(generation.ids)
        if not ids:
            raise TokenInvariantError("The policy returned no tokens; a generation has at least one.")
        if not self._stop_ids.isdisjoint(ids[:-1]):
            raise TokenInvariantError("The policy sampled on after the end of a turn; refusing what it returned.")
        if not self._barred_ids.isdisjoint(ids):
            raise TokenInvariantError(
                "The policy sampled a token that is reserved for images; refusing what it returned. A policy must not "
                "sample SamplingParams.suppressed_ids."
            )
        self._require_tokens(ids)
        sequence = self._sequence
        start = len(sequence)
        sequence.append_sampled(ids, generation.logprobs, generation.version, generation.raw_logprobs)
        self._returned = ids
        if generation.finish_reason == "length":
            sequence.truncated = True
        assert self._current is not None
        span = TokenSpan(self._current, start, len(sequence))
        self._spans.append(span)
        return span

    def finish(self) -> None:
        """Check that the mask covers exactly what was sampled, and freeze the sequences."""
        within: dict[int, list[TokenSpan]] = {index: [] for index in self._unanswered()}
        for span in self._spans:
            within.setdefault(span.sequence, []).append(span)
        for index, spans in within.items():
            sequence = self._sequences[index]
            counted = sum(span.stop - span.start for span in spans)
            masked = sum(sequence.origins[span.start : span.stop].count(Origin.SAMPLED) for span in spans)
            if not masked == counted == sequence.sampled_count:
                raise TokenInvariantError("The loss mask does not cover exactly the sampled tokens. This is a bug.")
            sequence.freeze()

    def _require_tokens(self, ids: Sequence[int]) -> None:
        known = self._token_ids
        if known is None or _holds_all(known, ids):
            return
        if (unknown := next((one for one in ids if one not in known), None)) is not None:
            raise TokenInvariantError(
                f"The policy sampled the id {unknown}, which no token of its tokenizer has: it is padding of the "
                "model's output layer and is not visible in the text. The rollout is refused. A policy must not sample "
                "such ids (agentfly.policies.policy.unsampleable_ids)."
            )

    def _unanswered(self) -> set[int]:
        """Return the current sequence's index if nothing was sampled in it, as a set."""
        if self._current is None or (self._spans and self._spans[-1].sequence == self._current):
            return set()
        return {self._current}

    @property
    def _sequence(self) -> TokenSequence:
        if self._current is None:
            raise TokenInvariantError("There is no sequence yet, because no prompt was recorded.")
        return self._sequences[self._current]

    def _starts(self, prompt: RenderedTokens, known: int) -> bool:
        """Whether a prompt starts with the current sequence, its images included."""
        before = [placed for placed in prompt.images if placed.start < known]
        return array("i", prompt.ids[:known]) == self._sequence.ids and before == self._sequence.images

    def _cut(self) -> None:
        if self.length > self._limit:
            self._sequence.truncate(self._limit)
            self._full = True  # also if the result is shorter, because the cut would have split an image


def _holds_all(known: Collection[int], ids: Sequence[int]) -> bool:
    """Return whether all ids are known, without checking each where possible. False may be wrong; True never is."""
    if isinstance(known, range):
        return known.step == 1 and known.start <= min(ids) and max(ids) < known.stop
    return isinstance(known, (set, frozenset)) and known.issuperset(ids)


class ChainStrategy:
    """Continues the sequence as long as the conversation only grows.

    Otherwise it begins a new sequence: the agent's memory has shortened the past, or the chat format would render it
    differently (``history="rewrite"``).

    Args:
        chat: renders the messages that are not sampled.
        recorder: records what is sent.
    """

    def __init__(self, chat: ChatFormat, recorder: TokenRecorder) -> None:
        self._chat = chat
        self._recorder = recorder
        self._known: list[Message] = []

    def render_view(self, view: Sequence[Message], tools: ToolDefinitions = ()) -> None:
        """Record the new messages of ``view``, or all of them if it is not a continuation."""
        continuation = self._continuation(view, tools)
        if continuation is None:
            self._recorder.begin_sequence(self._chat.render_prompt(view, tools))
        else:
            self._recorder.append_rendered(continuation)
        self._known = list(view)

    def count_tokens(self, view: Sequence[Message], tools: ToolDefinitions = ()) -> int:
        """Return the length of the sequence with the new messages, or of the new sequence that ``view`` would begin."""
        continuation = self._continuation(view, tools)
        if continuation is None:
            return len(self._chat.render_prompt(view, tools).ids)
        return self._recorder.length + len(continuation.ids)

    def add_reply(self, message: Message) -> None:
        """Note the generated turn, with which the next view must continue."""
        self._known.append(message)

    def _continuation(self, view: Sequence[Message], tools: ToolDefinitions) -> RenderedTokens | None:
        known = len(self._known)
        if not known or len(view) <= known or list(view[:known]) != self._known:
            return None
        return self._chat.render_continuation(view[known:], after=self._recorder.ids, conversation=view, tools=tools)


class StepStrategy:
    """Begins a new sequence at every turn, from the view that the agent's memory recalls.

    Args:
        chat: renders the conversation.
        recorder: records what is sent.
    """

    def __init__(self, chat: ChatFormat, recorder: TokenRecorder) -> None:
        self._chat = chat
        self._recorder = recorder

    def render_view(self, view: Sequence[Message], tools: ToolDefinitions = ()) -> None:
        """Record the whole ``view`` as a new sequence."""
        self._recorder.begin_sequence(self._chat.render_prompt(view, tools))

    def count_tokens(self, view: Sequence[Message], tools: ToolDefinitions = ()) -> int:
        """Return the length of the whole ``view`` in tokens."""
        return len(self._chat.render_prompt(view, tools).ids)

    def add_reply(self, message: Message) -> None:
        """Do nothing, because no sequence is continued."""


class SequenceStrategy(Protocol):
    """Decides which token sequence the next turn of one conversation continues or begins."""

    def render_view(self, view: Sequence[Message], tools: ToolDefinitions = ()) -> None:
        """Record the tokens that the policy sees before its next turn.

        Args:
            view: the conversation as the agent's memory recalls it.
            tools: the tools that the chat format describes.
        """
        ...

    def count_tokens(self, view: Sequence[Message], tools: ToolDefinitions = ()) -> int:
        """Return how many tokens the policy would see for ``view``. Nothing is recorded."""
        ...

    def add_reply(self, message: Message) -> None:
        """Note the policy's answer to the last view; ``message`` is the answer as a message of the conversation."""
        ...


STRATEGIES: Mapping[str, Callable[[ChatFormat, TokenRecorder], SequenceStrategy]] = {
    "chain": ChainStrategy,
    "step": StepStrategy,
}
"""The strategies by name."""


def require_strategy(name: str) -> None:
    """Check the name of a strategy.

    Raises:
        ConfigError: there is no strategy of this name.
    """
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ConfigError(f"strategy={name!r}: there is no such strategy. {suggest_name(str(name), STRATEGIES)}")
