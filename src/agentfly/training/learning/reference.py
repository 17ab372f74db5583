"""Reference: the policy before training."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from agentfly.training.learning.adapters import adapters_disabled


class Reference:
    """The policy before training, from which its divergence is measured.

    Where adapters are trained, it is the trained model with the adapters disabled, and takes no memory. Else it is a
    frozen copy, in the number format of the weights.

    Args:
        model: the model to be trained, with the weights, and adapters, it has before training.
        adapters: whether it is adapters that are trained.
    """

    def __init__(self, model: PreTrainedModel, *, adapters: bool) -> None:
        self._adapted = model if adapters else None
        self._copy = None if adapters else copy.deepcopy(model).requires_grad_(False)

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """The model as it was; only inside the block, where nothing else may use the trained one."""
        if self._copy is not None:
            yield self._copy
            return
        assert self._adapted is not None
        with adapters_disabled(self._adapted):
            yield self._adapted
