"""Vision: which tokens a model sees in place of an image."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from agentfly.images import Image


class Vision(Protocol):
    """How a model that sees images is shown them: as placeholder tokens, whose places its image encoder fills."""

    @property
    def placeholder(self) -> str:
        """The control token that the model's chat template writes once for each image."""
        ...

    @property
    def reserved_ids(self) -> Collection[int]:
        """The ids that only images may have, so that a model must never sample them."""
        ...

    def ids(self, image: Image) -> Sequence[int]:
        """What stands in place of the template's placeholder for one image: as many ids as the encoder fills.

        Raises:
            UsageError: it is no picture that can be read.
            PrerequisiteError: what reads images is not installed, or the model lacks its settings.
        """
        ...


def barred_ids(vision: Vision | None) -> tuple[int, ...]:
    """The ids that a model with this vision must not sample."""
    return tuple(vision.reserved_ids) if vision is not None else ()
