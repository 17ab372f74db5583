"""Proof: that servers serve the weights they were given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentfly.errors import WeightMismatch

PROBE = (
    "The little girl walked to the house of her grandmother, who lived on the other side of the forest. On the way she "
    "met a wolf. He asked her where she was going, and she told him that her grandmother was ill."
)
"""The text that is scored on both sides: plain words, because rounding shows most where a model is at a loss."""

PROBE_TOKENS = 32
"""At most so many tokens of it."""

TOLERANCES = {"float32": 0.002}
"""Mean distance in nats a token that is taken for rounding, by the type that the server computes in."""

LOW_PRECISION = 0.06
"""The same for every other type; served in bfloat16, a model of 135 million weights is 0.04 from float32."""

_MOVED = 1e-4  # nats: a reference that changed by more than this should change what is served


@dataclass(frozen=True, slots=True)
class Proof:
    """Compares what is served with a reference, on one probe.

    Attributes:
        ids: token ids of the probe.
        tolerance: mean distance in nats a token that is taken for rounding.
    """

    ids: tuple[int, ...]
    tolerance: float

    def require(
        self,
        server: str,
        served: Sequence[float],
        expected: Sequence[float],
        before: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> float:
        """The mean distance between the log-probs on both sides.

        Args:
            server: what messages call the server.
            served: log-probs of the probe's ids but the first, by the server.
            expected: the same by the reference.
            before: what both were before the update, where that is known.

        Raises:
            WeightMismatch: they are further apart than rounding, or the server did not change at all.
        """
        distance = mean_distance(served, expected)
        if not distance <= self.tolerance:  # and so also if it is not a number
            raise WeightMismatch(
                f"{server} does not serve the weights it was given: the log-probs of a probe of {len(self.ids)} tokens "
                f"are {distance:.3g} nats a token from the reference's, and rounding would explain {self.tolerance:g}. "
                "Nothing is sampled until an update succeeds. If the update was made by vLLM's own reload_weights, use "
                "the worker extension agentfly_weights; if the reference computes in another precision, give a "
                "tolerance."
            )
        if before is not None:
            was_served, was_expected = before
            moved = mean_distance(expected, was_expected)
            if moved > _MOVED and list(served) == list(was_served):
                raise WeightMismatch(
                    f"The update had no effect on {server}: by the reference it changes the log-probs of a probe by "
                    f"{moved:.3g} nats a token, and what is served is the same as before to the last bit."
                )
        return distance


def mean_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """The mean distance of two sequences of numbers.

    Raises:
        WeightMismatch: they are not of one length.
    """
    if len(one) != len(other):
        raise WeightMismatch(
            f"One side scored {len(one)} tokens of the probe and the other {len(other)}. A reference returns the "
            "log-prob of each id but the first."
        )
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
