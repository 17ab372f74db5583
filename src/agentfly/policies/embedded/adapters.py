"""Models of which a directory holds low-rank adapters only: found, and loaded as plain models with them merged in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from agentfly.errors import PrerequisiteError

ADAPTER_FOLDER = "adapter"
"""Folder of a model's directory in which adapters are, in the files of peft."""


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
        from peft import PeftModel
    except ImportError as error:
        raise PrerequisiteError(
            f"{path} holds adapters, which are read by the package peft: pip install 'agentfly-rl[train]'."
        ) from error
    merged: PreTrainedModel = PeftModel.from_pretrained(
        model, str(path / ADAPTER_FOLDER), autocast_adapter_dtype=False
    ).merge_and_unload()
    merged.name_or_path = str(path)
    return merged


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether adapters have been put into the model."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights by the names they have without adapters, with what these add; one changed layer is made at a time."""
    if not has_adapters(model):
        yield from model.state_dict().items()
        return
    modules = dict(model.named_modules())
    for name, weight in model.state_dict().items():
        owner, _, rest = name.partition(".base_layer.")
        if rest:
            layer: Any = modules[owner]
            added = layer.get_delta_weight(layer.active_adapters[0]).to(weight.dtype) if rest == "weight" else 0
            yield f"{owner}.{rest}", weight + added
        elif ".lora_" not in name:
            yield name, weight
