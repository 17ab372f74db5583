"""Low-rank adapters of peft, put into a model in place, so that whoever samples from it samples with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agentfly.errors import ConfigError, PrerequisiteError
from agentfly.policies.embedded.adapters import ADAPTER_FOLDER, has_adapters
from agentfly.training.config.lora_config import LoRAConfig


def add_adapters(model: PreTrainedModel, config: LoRAConfig, *, seed: int) -> None:
    """Put fresh adapters into a model, and have nothing else of it learn. Untrained they change no number.

    Args:
        model: the model; it stays the same object.
        config: rank, scale and places of the adapters.
        seed: where their first weights are drawn from.

    Raises:
        PrerequisiteError: peft is not installed.
        ConfigError: the model has no such modules, or has adapters already.
    """
    refuse_adapters(model)
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise PrerequisiteError(
            "Training adapters (lora) needs the package peft: pip install 'agentfly-rl[train]'."
        ) from error
    modules = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            model.add_adapter(
                LoraConfig(
                    r=config.rank,
                    lora_alpha=config.alpha,
                    lora_dropout=config.dropout,
                    target_modules=modules,
                    task_type="CAUSAL_LM",
                )
            )
        except ValueError as error:
            raise ConfigError(
                f"lora.target_modules={config.target_modules!r} does not fit {type(model).__name__}: {error}"
            ) from error
    # An absolute path, so that the adapters find their model from wherever they are loaded.
    model.peft_config["default"].base_model_name_or_path = str(Path(model.name_or_path or "").resolve())
    model.eval()  # type: ignore[no-untyped-call]


def refuse_adapters(model: PreTrainedModel) -> None:
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
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


@contextmanager
def adapter_dropout(model: PreTrainedModel) -> Iterator[None]:
    """In the block the inputs of adapters are dropped at random; dropout of the model itself stays off."""
    layers = [
        module
        for name, module in model.named_modules()
        if "lora_dropout" in name.split(".") and isinstance(module, torch.nn.Dropout)
    ]
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.eval()


def save_adapters(model: PreTrainedModel, path: Path) -> None:
    """Write a model's adapters into a checkpoint: its configuration, and peft's files in a folder beside it."""
    model.config.save_pretrained(path)
    model.save_pretrained(path / ADAPTER_FOLDER)


def load_adapters(model: PreTrainedModel, path: Path) -> None:
    """Put the adapters of the checkpoint at ``path`` into those of a model, in place.

    Raises:
        ConfigError: they are adapters of another model, or there are none.
    """
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    file = path / ADAPTER_FOLDER / "adapter_model.safetensors"
    if not file.is_file():
        raise ConfigError(f"The checkpoint {path} holds no adapters: it is of a run that trained all weights.")
    saved = {name.removeprefix("base_model.model."): weight for name, weight in load_file(file).items()}
    own = model.get_adapter_state_dict()
    shapes = {name: weight.shape for name, weight in own.items()}
    if {name: weight.shape for name, weight in saved.items()} != shapes:
        raise ConfigError(f"The checkpoint {path} holds adapters of another model, rank or modules than this run's.")
    set_peft_model_state_dict(model, saved)
