"""Low-rank adapters of peft in a directory: written, read, and merged into the model that they belong to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from agentfly.errors import ConfigError, PrerequisiteError
from agentfly.installation import install_command

ADAPTER_FOLDER = "adapter"
"""Folder of a model's directory in which adapters are, in the files of peft."""

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""What peft puts before the names of weights in its files."""


def base_of(path: Path) -> Path | None:
    """The directory of the model that the adapters in ``path`` belong to; None if it holds a whole model.

    Raises:
        PrerequisiteError: that model is not where it was.
    """
    described = path / ADAPTER_FOLDER / "adapter_config.json"
    if not described.is_file():
        return None
    base = Path(json.loads(described.read_text(encoding="utf-8"))["base_model_name_or_path"] or "nowhere")
    if not (base / "config.json").is_file():
        raise PrerequisiteError(
            f"{path} holds adapters for the model in {base}, which is not there. Put it back, or write where it is "
            f"into {described} as base_model_name_or_path."
        )
    return base


def merge_adapters(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """The model with the adapters in ``path`` merged into its weights: a plain model again, named after ``path``.

    Args:
        model: the model in `base_of` that directory, which is changed.
        path: the directory.

    Raises:
        PrerequisiteError: peft is not installed.
    """
    try:
        from peft import LoraConfig, LoraModel
    except ImportError as error:
        raise PrerequisiteError(
            f"{path} holds adapters, which are read by the package peft: {install_command('train')}."
        ) from error
    tuner = LoraModel(model, LoraConfig.from_pretrained(str(path / ADAPTER_FOLDER)), "default")
    load_adapters(model, path)
    merged: PreTrainedModel = tuner.merge_and_unload()  # type: ignore[assignment]
    merged.name_or_path = str(path)
    return merged


def save_adapters(model: PreTrainedModel, path: Path) -> None:
    """Write a model's adapters into a directory: its configurations, and peft's files in a folder beside them."""
    model.config.save_pretrained(path)
    if model.generation_config is not None:  # at which ids the model is to stop
        model.generation_config.save_pretrained(path)
    write_adapters(model, path / ADAPTER_FOLDER)


def write_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Write a model's adapters as peft does, for whatever loads adapters of peft."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    configs: Any = model.peft_config
    configs["default"].save_pretrained(folder)
    weights = {f"{_PREFIX}{name}": weight.contiguous() for name, weight in get_peft_model_state_dict(model).items()}
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})


def load_adapters(model: PreTrainedModel, path: Path) -> None:
    """Put the adapters in ``path`` into those of a model, in place.

    Raises:
        ConfigError: they are adapters of another model, or there are none.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    file = path / ADAPTER_FOLDER / _WEIGHTS
    if not file.is_file():
        raise ConfigError(f"{path} holds no adapters: it is of a run that trained all weights.")
    saved = {name.removeprefix(_PREFIX): weight for name, weight in load_file(file).items()}
    own = get_peft_model_state_dict(model)
    if {name: each.shape for name, each in saved.items()} != {name: each.shape for name, each in own.items()}:
        raise ConfigError(f"{path} holds adapters of another model, rank or modules.")
    set_peft_model_state_dict(model, saved)


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether adapters have been put into the model."""
    return bool(getattr(model, "peft_config", None))


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights by the names they have without adapters, with what these add unless they are disabled.

    One changed layer is made at a time.
    """
    if not has_adapters(model):
        yield from model.state_dict().items()
        return
    modules = dict(model.named_modules())
    for name, weight in model.state_dict().items():
        owner, _, rest = name.partition(".base_layer.")
        if rest:
            layer: Any = modules[owner]
            adds = rest == "weight" and not layer.disable_adapters
            added = layer.get_delta_weight(layer.active_adapters[0]).to(weight.dtype) if adds else 0
            yield f"{owner}.{rest}", weight + added
        elif ".lora_" not in name:
            yield name, weight
