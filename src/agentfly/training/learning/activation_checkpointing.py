"""Activation checkpointing (gradient checkpointing): activations are computed twice in place of being kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from agentfly.errors import ConfigError


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Have each layer of a model be able to compute its activations again, which `checkpointed` makes it do.

    Raises:
        ConfigError: the model's class cannot do that.
    """
    how = {"use_reentrant": False}
    try:
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(how)
        else:  # transformers before 5.24
            model.gradient_checkpointing_enable(how)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise ConfigError(f"{type(model).__name__} cannot be trained with gradient_checkpointing: {error}") from error


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """In the block, layers that can do so keep no activations, while what they are made of stays as for sampling.

    Transformers' layers do it in training mode only, which would turn on dropout too if their parts were in it.
    """
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
