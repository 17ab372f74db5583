"""TokenSequence: the token ids of a rollout, with the origin, log-prob and policy version of each.

Token ids, not text, are the unit of exchange between sampling and training. A sequence only grows at its end. All data
per token grows and is cut together with the ids, so that no array can get out of step.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from agentfly.core.errors import TokenInvariantError
from agentfly.core.messages import Image, PlacedImage

NO_VERSION = -1
"""The policy version of a token that no policy sampled."""

_UNKNOWN = array("d", [math.nan])
_NO_VERSIONS = array("i", [NO_VERSION])


class Origin(IntEnum):
    """The origin of a token. Only sampled tokens are trained."""

    PROMPT = 0
    SAMPLED = 1
    OBSERVATION = 2


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens ``start`` to ``stop`` (exclusive) of a sequence, all of one origin."""

    origin: Origin
    start: int
    stop: int


def sampled_ids(values: Sequence[int]) -> array[int]:
    """The ids that a policy has sampled.

    Raises:
        TokenInvariantError: they are no row of 32-bit integers.
    """
    try:
        return array("i", values)
    except (TypeError, OverflowError) as error:
        raise TokenInvariantError(f"Sampled ids are to be one row of 32-bit integers: {error}.") from error


def _are_logprobs(values: Sequence[float]) -> bool:
    try:
        return math.isfinite(sum(values)) and max(values) <= 1e-6
    except (TypeError, ValueError):  # rows of numbers, say, or None among them
        return False


_ORIGINS = {origin: array("b", [origin]) for origin in Origin}


class TokenSequence:
    """Token ids with the origin, the log-prob and the policy version of each token.

    Attributes:
        ids: token ids, ``array('i')`` of length T.
        origins: `Origin` per token, ``array('b')`` of length T.
        logprobs: log-probability under which a token was sampled, ``array('d')`` of length T; NaN where unknown.
        raw_logprobs: the same at temperature 1 and without cuts (top-p, top-k), ``array('d')`` of length T.
        versions: policy version that sampled a token, ``array('i')`` of length T; `NO_VERSION` for rendered tokens.
        images: the images whose placeholder tokens are in it, in order. A cut never splits one of them.
        truncated: whether tokens were cut off the end.
    """

    __slots__ = ("_frozen", "ids", "images", "logprobs", "origins", "raw_logprobs", "truncated", "versions")

    def __init__(self) -> None:
        self.ids = array("i")
        self.origins = array("b")
        self.logprobs = array("d")
        self.raw_logprobs = array("d")
        self.versions = array("i")
        self.images: list[PlacedImage] = []
        self.truncated = False
        self._frozen = False

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        """A line: its ids would fill the screen."""
        cut = ", truncated" if self.truncated else ""
        return f"TokenSequence({len(self)} tokens, {self.sampled_count} of them sampled{cut})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenSequence) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def append_prompt(self, ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> None:
        """Add rendered tokens that stand before the first sampled one. Places of images are within ``ids``."""
        if Origin.SAMPLED in self.origins:
            raise TokenInvariantError("Prompt tokens cannot follow sampled tokens in one sequence.")
        self._append_rendered(ids, images, Origin.PROMPT)

    def append_observation(self, ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> None:
        """Add rendered tokens that answer a generation: an unsampled end of turn, tool results, the next header."""
        self._append_rendered(ids, images, Origin.OBSERVATION)

    def append_sampled(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float] | None,
        version: int | Sequence[int],
        raw_logprobs: Sequence[float] | None = None,
    ) -> None:
        """Add sampled tokens exactly as the policy returned them.

        Args:
            ids: the sampled ids, the end-of-turn token included if it was sampled.
            logprobs: the log-prob of each id under the distribution it was sampled from, or None where unknown.
            version: the version of the policy that sampled them; one for each id where the weights changed meanwhile.
            raw_logprobs: the log-prob of each id at temperature 1 and without cuts, or None where unknown.

        Raises:
            TokenInvariantError: there is not exactly one version, and one finite log-prob, for each id.
        """
        self._require_open()
        new = sampled_ids(ids)
        count = len(new)
        try:
            versions = array("i", [version]) * count if isinstance(version, int) else array("i", version)
        except (TypeError, OverflowError) as error:
            raise TokenInvariantError(f"Versions of sampled ids are to be 32-bit integers: {error}.") from error
        for values in (logprobs, raw_logprobs):
            if values is not None and len(values) != count:
                raise TokenInvariantError(f"{count} sampled ids came with {len(values)} log-probs; refusing them.")
            if values is not None and count and not _are_logprobs(values):
                raise TokenInvariantError("A log-prob of a sampled token is not a finite number of at most 0.")
        if len(versions) != count:
            raise TokenInvariantError(f"{count} sampled ids came with {len(versions)} versions; refusing them.")
        self.ids.extend(new)
        self.origins.extend(_ORIGINS[Origin.SAMPLED] * count)
        self.logprobs.extend(logprobs if logprobs is not None else _UNKNOWN * count)
        self.raw_logprobs.extend(raw_logprobs if raw_logprobs is not None else _UNKNOWN * count)
        self.versions.extend(versions)

    def truncate(self, length: int) -> None:
        """Truncate the ids and all per-token data to one length, and mark the sequence as truncated.

        An image that this would split is left out, so the sequence may be shorter than ``length``.
        """
        self._require_open()
        if length >= len(self.ids):
            return
        parted = [image.start for image in self.images if image.start < length < image.stop]
        length = min([length, *parted])
        for values in self._columns:
            del values[length:]
        self.images = [image for image in self.images if image.stop <= length]
        self.truncated = True

    def freeze(self) -> TokenSequence:
        """Refuse every later change. Called when the rollout ends."""
        self.check()
        self._frozen = True
        return self

    def check(self) -> None:
        """Raise TokenInvariantError unless all per-token data have one length and all images are within it."""
        lengths = {len(values) for values in self._columns}
        if any(not 0 <= image.start < image.stop <= len(self.ids) for image in self.images):
            raise TokenInvariantError("An image stands where the sequence has no tokens for it.")
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
            "logprobs": self._of_sampled(self.logprobs),
            "raw_logprobs": self._of_sampled(self.raw_logprobs),
            "versions": [
                [version, sum(1 for _ in run)]
                for version, run in itertools.groupby(
                    version
                    for version, origin in zip(self.versions, self.origins, strict=True)
                    if origin == Origin.SAMPLED
                )
            ],
            "images": [[image.image.url, image.start, image.stop] for image in self.images],
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
        logprobs, raw_logprobs = iter(value["logprobs"]), iter(value["raw_logprobs"])
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
                    for column, stored in ((sequence.logprobs, logprobs), (sequence.raw_logprobs, raw_logprobs)):
                        logprob = next(stored) if sampled else None
                        column.append(math.nan if logprob is None else logprob)
                    sequence.versions.append(next(versions) if sampled else NO_VERSION)
        except (StopIteration, KeyError) as error:
            raise TokenInvariantError(
                "A stored token sequence is damaged: its parts have different lengths."
            ) from error
        nothing = object()
        if any(next(rest, nothing) is not nothing for rest in (ids, logprobs, raw_logprobs, versions)):
            raise TokenInvariantError("A stored token sequence is damaged: its parts have different lengths.")
        sequence.images = [PlacedImage(Image.from_url(url), start, stop) for url, start, stop in value["images"]]
        sequence.truncated = value["truncated"]
        return sequence.freeze()

    @property
    def _columns(self) -> tuple[array[Any], ...]:
        return self.ids, self.origins, self.logprobs, self.raw_logprobs, self.versions

    def _of_sampled(self, values: Sequence[float]) -> list[float | None]:
        return [
            None if math.isnan(value) else value
            for value, origin in zip(values, self.origins, strict=True)
            if origin == Origin.SAMPLED
        ]

    def _append_rendered(self, ids: Sequence[int], images: Sequence[PlacedImage], origin: Origin) -> None:
        self._require_open()
        count = len(ids)
        self.images.extend(image.shifted(len(self.ids)) for image in images)
        self.ids.extend(ids)
        self.origins.extend(_ORIGINS[origin] * count)
        self.logprobs.extend(_UNKNOWN * count)
        self.raw_logprobs.extend(_UNKNOWN * count)
        self.versions.extend(_NO_VERSIONS * count)

    def _require_open(self) -> None:
        if self._frozen:
            raise TokenInvariantError("This token sequence is finished and cannot be changed.")
