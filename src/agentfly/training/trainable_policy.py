"""TrainablePolicy: what the trainer needs of a policy."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from transformers import PreTrainedModel

from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.policies.policy import Policy


@runtime_checkable
class TrainablePolicy(Policy, Protocol):
    """A policy whose weights are in this process, to be changed in place."""

    @property
    def tokenizer(self) -> HFTokenizer:
        """The tokenizer of the model."""
        ...

    @property
    def model(self) -> PreTrainedModel:
        """The model that it samples from."""
        ...

    @property
    def in_use(self) -> bool:
        """Whether it has been entered and not left."""
        ...

    def exclusive(self) -> AbstractAsyncContextManager[object]:
        """The weights may be changed in the block: nothing is sampled by weights that are half changed."""
        ...

    def weights_updated(self, version: int | None = None) -> None:
        """The weights have changed: forget what was computed with the old ones.

        Called inside `exclusive`. The version becomes ``version``, or one more than it was.
        """
        ...
