"""Low-rank adapters of peft, put into a model in place, so that whoever samples from it samples with them.

Activation checkpointing (gradient checkpointing): activations are computed twice in place of being kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn import Parameter
from transformers import PreTrainedModel

from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.core.installation import install_command
from agentfly.policies.embedded.loading import has_adapters
from agentfly.training.config.groups import LoRAConfig


def trainable_weights(model: PreTrainedModel, lora: LoRAConfig | None, *, seed: int) -> list[Parameter]:
    """The weights that are to learn: those of fresh adapters, or without a configuration of any all of the model's.

    Raises:
        PrerequisiteError, ConfigError: as of `add_adapters`.
    """
    if lora is None:
        model.requires_grad_()
    else:
        add_adapters(model, lora, seed=seed)
    return [weight for weight in model.parameters() if weight.requires_grad]


def add_adapters(model: PreTrainedModel, config: LoRAConfig, *, seed: int) -> None:
    """Put fresh adapters into a model, and have nothing else of it learn. Untrained they change no number.

    Args:
        model: the model; it stays the same object.
        config: rank, scale and places of the adapters.
        seed: where their first weights are drawn from.

    Raises:
        PrerequisiteError: peft is not installed.
        ConfigError: the model has no such modules, has adapters already, or would have one on a weight that two layers
            share.
    """
    reject_adapted_model(model)
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise PrerequisiteError(
            f"Training adapters (lora) needs the package peft: {install_command('train')}."
        ) from error
    asked = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules),
        task_type="CAUSAL_LM",
        # An absolute path, so that the adapters find their model from wherever they are loaded.
        base_model_name_or_path=str(Path(model.name_or_path or "").resolve()),
    )
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(asked, model)
        except ValueError as error:
            raise ConfigError(
                f"lora.target_modules={config.target_modules!r} does not fit {type(model).__name__}: {error}"
            ) from error
    _reject_tied_weights(model, config)
    model.eval()  # type: ignore[no-untyped-call]


def _reject_tied_weights(model: PreTrainedModel, config: LoRAConfig) -> None:
    """Raise if an adapter is on a weight that another layer has too: merged, it would change that one besides.

    Raises:
        ConfigError: there is one.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.nn.Parameter) and not isinstance(module, BaseTunerLayer):
            owners.setdefault(id(weight), []).append(name)
    for names in owners.values():
        adapted = [name.removesuffix(".base_layer") for name in names if name.endswith(".base_layer")]
        if adapted and len(names) > 1:
            raise ConfigError(
                f"lora.target_modules={config.target_modules!r} puts an adapter on {adapted[0]}, whose weight this "
                "model's input and output layers share: merged into it, the adapter would change both, and the model "
                "that is saved would not be the one that was trained. Leave it out, as all-linear does."
            )


def reject_adapted_model(model: PreTrainedModel) -> None:
    """Refuse to train a model that has adapters of an earlier run: only they, or only what is below, would be saved.

    Raises:
        ConfigError: the model has adapters.
    """
    if has_adapters(model):
        raise ConfigError(
            "The policy's model has the adapters of an earlier run. Load that run's checkpoint as a policy of its own, "
            "which merges them into the weights, and train that."
        )


@contextmanager
def adapters_disabled(model: PreTrainedModel) -> Iterator[None]:
    """In the block the model computes as if it had no adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)


@contextmanager
def adapter_dropout(model: PreTrainedModel, lora: LoRAConfig | None, *, seed: int, step: int) -> Iterator[None]:
    """In the block the inputs of adapters are dropped at random; dropout of the model itself stays off.

    Args:
        model: a model with the adapters of ``lora``.
        lora: says how much is dropped; without adapters, or at a rate of 0, nothing is, and nothing is drawn.
        seed, step: what is dropped follows from these two, and whoever draws numbers elsewhere draws the same.
    """
    if lora is None or not lora.dropout:
        yield
        return
    layers = [
        module
        for name, module in model.named_modules()
        if "lora_dropout" in name.split(".") and isinstance(module, torch.nn.Dropout)
    ]
    for layer in layers:
        layer.train()
    try:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(1_000_003 * seed + step)
            yield
    finally:
        for layer in layers:
            layer.eval()


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Have each layer of a model be able to compute its activations again, which `gradient_checkpointing` makes it do.

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
def gradient_checkpointing(model: nn.Module) -> Iterator[None]:
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
