"""TokenSequence: the token ids of a rollout, and what is known of each.

Token ids, not text, are the unit of exchange between sampling and training. A sequence only grows at its end, and
all that is known per token (where it came from, its log-prob, the policy version that sampled it) grows and is cut
together, so that no array can get out of step with the ids.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from agentfly.errors import TokenInvariantError

NO_VERSION = -1
"""The policy version of a token that no policy sampled."""


class Origin(IntEnum):
    """Where a token came from. Only sampled tokens are trained."""

    PROMPT = 0
    SAMPLED = 1
    OBSERVATION = 2


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens ``start`` to ``stop`` (exclusive) of a sequence, all of one origin."""

    origin: Origin
    start: int
    stop: int


class TokenSequence:
    """Token ids with, per token, where it came from, its log-prob and the policy version that sampled it.

    Attributes:
        ids: token ids, ``array('i')`` of length T.
        origins: `Origin` per token, ``array('b')`` of length T.
        logprobs: log-probability under which a token was sampled, ``array('d')`` of length T; NaN where none is known.
        versions: policy version that sampled a token, ``array('i')`` of length T; `NO_VERSION` for rendered tokens.
        truncated: whether tokens were cut off the end.
    """

    __slots__ = ("_frozen", "ids", "logprobs", "origins", "truncated", "versions")

    def __init__(self) -> None:
        self.ids = array("i")
        self.origins = array("b")
        self.logprobs = array("d")
        self.versions = array("i")
        self.truncated = False
        self._frozen = False

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenSequence) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def append_prompt(self, ids: Sequence[int]) -> None:
        """Add rendered tokens that stand before the first sampled one."""
        if Origin.SAMPLED in self.origins:
            raise TokenInvariantError("Prompt tokens cannot follow sampled tokens in one sequence.")
        self._append_rendered(ids, Origin.PROMPT)

    def append_observation(self, ids: Sequence[int]) -> None:
        """Add rendered tokens that answer a generation: an unsampled end of turn, tool results, the next header."""
        self._append_rendered(ids, Origin.OBSERVATION)

    def append_sampled(self, ids: Sequence[int], logprobs: Sequence[float] | None, version: int) -> None:
        """Add sampled tokens exactly as the policy returned them.

        Args:
            ids: the sampled ids, the end-of-turn token included if it was sampled.
            logprobs: the log-prob of each id under the distribution it was sampled from, or None where unknown.
            version: the version of the policy that sampled them.

        Raises:
            TokenInvariantError: there is not exactly one finite log-prob for each id.
        """
        if logprobs is not None:
            if len(logprobs) != len(ids):
                raise TokenInvariantError(f"{len(ids)} sampled ids came with {len(logprobs)} log-probs; refusing them.")
            if not all(math.isfinite(value) and value <= 1e-6 for value in logprobs):
                raise TokenInvariantError("A log-prob of a sampled token is not a finite number of at most 0.")
        self._require_open()
        count = len(ids)
        self.ids.extend(ids)
        self.origins.extend(itertools.repeat(Origin.SAMPLED, count))
        self.logprobs.extend(logprobs if logprobs is not None else itertools.repeat(math.nan, count))
        self.versions.extend(itertools.repeat(version, count))

    def cut(self, length: int) -> None:
        """Cut ids and all that is known of them at one index, and flag the sequence as truncated."""
        self._require_open()
        if length < len(self.ids):
            for values in (self.ids, self.origins, self.logprobs, self.versions):
                del values[length:]
            self.truncated = True

    def freeze(self) -> TokenSequence:
        """Refuse every later change. Called when the rollout ends."""
        self.check()
        self._frozen = True
        return self

    def check(self) -> None:
        """Raise TokenInvariantError unless ids, origins, log-probs and versions have one length."""
        lengths = {len(self.ids), len(self.origins), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise TokenInvariantError(
                f"Ids, origins, log-probs and versions have different lengths: {sorted(lengths)}."
            )

    @property
    def loss_mask(self) -> list[int]:
        """1 exactly on sampled tokens, 0 on everything rendered; length T."""
        return [int(origin == Origin.SAMPLED) for origin in self.origins]

    @property
    def sampled_count(self) -> int:
        """The number of sampled tokens."""
        return self.origins.count(Origin.SAMPLED)

    @property
    def spans(self) -> list[Span]:
        """The sequence as runs of one origin, in order."""
        spans = []
        start = 0
        for origin, run in itertools.groupby(self.origins):
            stop = start + sum(1 for _ in run)
            spans.append(Span(Origin(origin), start, stop))
            start = stop
        return spans

    def to_json(self) -> dict[str, Any]:
        """A JSON-able value that `from_json` turns back into an equal sequence."""
        return {
            "ids": self.ids.tolist(),
            "spans": [[span.origin.name.lower(), span.stop - span.start] for span in self.spans],
            "logprobs": [
                None if math.isnan(value) else value
                for value, origin in zip(self.logprobs, self.origins, strict=True)
                if origin == Origin.SAMPLED
            ],
            "versions": [
                [version, sum(1 for _ in run)]
                for version, run in itertools.groupby(
                    version
                    for version, origin in zip(self.versions, self.origins, strict=True)
                    if origin == Origin.SAMPLED
                )
            ],
            "truncated": self.truncated,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TokenSequence:
        """The inverse of `to_json`; the sequence comes back frozen.

        Raises:
            TokenInvariantError: the parts do not fit together.
        """
        sequence = cls()
        ids = iter(value["ids"])
        logprobs = iter(value["logprobs"])
        versions = itertools.chain.from_iterable(
            itertools.repeat(version, count) for version, count in value["versions"]
        )
        try:
            for name, count in value["spans"]:
                origin = Origin[name.upper()]
                for _ in range(count):
                    sampled = origin == Origin.SAMPLED
                    sequence.ids.append(next(ids))
                    sequence.origins.append(origin)
                    logprob = next(logprobs) if sampled else None
                    sequence.logprobs.append(math.nan if logprob is None else logprob)
                    sequence.versions.append(next(versions) if sampled else NO_VERSION)
        except (StopIteration, KeyError) as error:
            raise TokenInvariantError(
                "A stored token sequence is damaged: its parts have different lengths."
            ) from error
        nothing = object()
        if any(next(rest, nothing) is not nothing for rest in (ids, logprobs, versions)):
            raise TokenInvariantError("A stored token sequence is damaged: its parts have different lengths.")
        sequence.truncated = value["truncated"]
        return sequence.freeze()

    def _append_rendered(self, ids: Sequence[int], origin: Origin) -> None:
        self._require_open()
        count = len(ids)
        self.ids.extend(ids)
        self.origins.extend(itertools.repeat(origin, count))
        self.logprobs.extend(itertools.repeat(math.nan, count))
        self.versions.extend(itertools.repeat(NO_VERSION, count))

    def _require_open(self) -> None:
        if self._frozen:
            raise TokenInvariantError("This token sequence is finished and cannot be changed.")
