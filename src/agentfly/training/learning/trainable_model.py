"""Preparation of a model for training: LoRA adapters, injected in place, and gradient checkpointing."""

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
    """Return the weights to train: those of new adapters, or all weights of the model without ``lora``.

    Raises:
        PrerequisiteError, ConfigError: see `add_adapters`.
    """
    if lora is None:
        model.requires_grad_()
    else:
        add_adapters(model, lora, seed=seed)
    return [weight for weight in model.parameters() if weight.requires_grad]


def add_adapters(model: PreTrainedModel, config: LoRAConfig, *, seed: int) -> None:
    """Inject new adapters into a model and freeze its own weights. New adapters do not change the model's outputs.

    Args:
        model: the model, which is changed in place.
        config: rank, scale and target modules of the adapters.
        seed: seed of the initial weights.

    Raises:
        PrerequisiteError: peft is not installed.
        ConfigError: the model has no such modules, already has adapters, or would have one on a tied weight.
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
    """Raise if an adapter is on a weight that another layer shares: merging would change that layer too.

    Raises:
        ConfigError: there is such an adapter.
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
    """Reject a model with adapters of an earlier run: a checkpoint could contain only these or only the base weights.

    Raises:
        ConfigError: the model has adapters.
    """
    if has_adapters(model):
        raise ConfigError(
            "The policy's model has the adapters of an earlier run. Load that run's checkpoint as a new policy, "
            "which merges them into the weights, and train that."
        )


@contextmanager
def adapters_disabled(model: PreTrainedModel) -> Iterator[None]:
    """Disable the model's adapters in the block."""
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
    """Enable dropout of the adapters' inputs in the block; dropout of the model itself stays off.

    Args:
        model: a model with the adapters of ``lora``.
        lora: the dropout rate; without adapters or at rate 0, this does nothing.
        seed, step: determine what is dropped. Other random number generators are not affected.
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
    """Prepare the layers of a model for recomputing activations, which `gradient_checkpointing` activates.

    Raises:
        ConfigError: the model's class does not support it.
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
    """Recompute activations instead of keeping them in the block.

    Transformers' layers do this in training mode only. Their submodules stay in evaluation mode, so dropout stays off.
    """
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
