"""Loading of models for the embedded policy: device, precision, LoRA adapters, threads, check of the packed pass."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.core.installation import install_command
from agentfly.policies.embedded.packed_attention import enable_packed_attention
from agentfly.policies.embedded.scoring import score_tokens

ADAPTER_FOLDER = "adapter"
"""Folder of a model's directory in which adapters are, in the files of peft."""

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""What peft puts before the names of weights in its files."""


def base_of(path: Path) -> Path | None:
    """Return the directory of the model that the adapters in ``path`` belong to; None if ``path`` holds a whole model.

    Raises:
        PrerequisiteError: the model is no longer there.
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
    """Merge the adapters in ``path`` into a model's weights. Return it as a plain model, named after ``path``.

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
    """Write a model's adapters in peft's format."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    configs: Any = model.peft_config
    configs["default"].save_pretrained(folder)
    weights = {f"{_PREFIX}{name}": weight.contiguous() for name, weight in get_peft_model_state_dict(model).items()}
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})


def load_adapters(model: PreTrainedModel, path: Path) -> None:
    """Load the adapters in ``path`` into a model that has adapters already, in place.

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
    """Return whether the model has adapters."""
    return bool(getattr(model, "peft_config", None))


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights by their names without adapters, with the adapters merged unless they are disabled.

    Only one changed layer is in memory at a time.
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


_ALONE = threading.RLock()

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(device: str) -> torch.device:
    """Return the device for a setting. ``auto`` is the first GPU if there is one, else the CPU.

    Raises:
        PrerequisiteError: the GPU does not exist.
        ConfigError: the kind of device is unknown.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}; it must be 'auto', 'cpu', 'cuda' or 'cuda:N'.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise PrerequisiteError(f"device is {device!r}, but torch finds no GPU here. Use device='cpu' or 'auto'.")
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the number format for a setting. ``auto`` is float32 on a CPU and bfloat16 on a GPU.

    The features of the CPU do not count, so a run computes in the same format on every machine. A CPU with native
    bfloat16 samples at most a fifth faster in it and trains no faster. The log-probs of sampling and training then
    differ (measured in docs/guides/updates.md).

    Raises:
        ConfigError: the format is unknown.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it must be 'auto' or one of {', '.join(map(repr, _DTYPES))}.")
    return _DTYPES[dtype]


def dtype_of(model: PreTrainedModel) -> str:
    """Return the number format that a model computes in, by its name in the settings."""
    return str(model.dtype).removeprefix("torch.")


def load_model(path: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Load the causal language model in a directory, ready for packed attention. Adapters are merged into their base.

    Raises:
        PrerequisiteError: the directory holds no such model.
        ConfigError: the embedded policy does not support the model's kind of attention.
    """
    try:
        _refuse_unsupported(path, AutoConfig.from_pretrained(path, local_files_only=True))
        model: PreTrainedModel = _weights_of(path, dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise PrerequisiteError(f"{path} holds no causal language model that transformers can load: {error}") from error
    model = model.to(device).eval()  # type: ignore[arg-type]
    enable_packed_attention(model)
    _check_packed_forward(model, path)
    return model


def _weights_of(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    base = base_of(path)
    if base is not None:
        return merge_adapters(_weights_of(base, dtype), path)
    with quiet_transformers():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, use_safetensors=True
        )
    return model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars from the terminal, and let one thread at a time load or save a model.

    While it loads a model, transformers changes global state of the process, so concurrent loads would conflict.
    """
    with _ALONE:
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if shown:
                logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _refuse_unsupported(path: Path, config: Any) -> None:
    """Refuse layers with a sliding window, which the check on a few tokens would not reveal."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"The model in {path} has layers of the kinds {', '.join(sorted(kinds))}; the embedded policy runs models "
            "with full attention in every layer."
        )


def _check_packed_forward(model: PreTrainedModel, path: Path) -> None:
    """Compare packed and plain log-probs of a few tokens, so that an unusual model fails here and not in training."""
    ids = [1 + (index * 7) % (model.config.vocab_size - 1) for index in range(24)]
    other = [*ids[:20], *reversed(ids[:8])]
    with torch.no_grad():
        packed = score_tokens(model, [ids, other], [range(1, len(ids)), range(1, len(other))]).logprobs
        plain = []
        for row in (ids, other):
            tokens = torch.tensor([row], device=model.device)
            logprobs = model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(dim=-1)
            plain.append(logprobs.gather(1, tokens[0, 1:, None])[:, 0])
    difference = (packed - torch.cat(plain)).abs().max().item()
    limit = 1e-3 if model.dtype == torch.float32 else 0.5
    if not difference <= limit:
        raise ConfigError(
            f"{type(model).__name__} in {path} gives other log-probs packed than plain (by up to {difference:.3g}), so "
            "the embedded policy cannot run it. Models with causal softmax attention and a plain output layer work."
        )


SMALL_MODEL = 5_000_000
"""Below this many parameters one thread is fastest: distributing the work costs more than it saves."""


def choose_threads(parameters: int) -> int:
    """Return the number of threads for a model with this many parameters.

    ``OMP_NUM_THREADS`` is respected if it is set. Otherwise it is the number of cores that this process may use, with
    hyper-threads counted once. Its CPU affinity and the CPU quota of its control group limit this number.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    if parameters < SMALL_MODEL:
        return 1
    cpus = os.sched_getaffinity(0)
    cores = {_core(cpu) for cpu in cpus}
    return max(1, min(len(cores), int(_quota() or len(cores))))


def _core(cpu: int) -> str:
    """Return a key that is equal for all hyper-threads of a core."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return siblings.read_text()
    except OSError:
        return str(cpu)


def _quota() -> float | None:
    """Return the CPU limit of the control group, or None if it sets none."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)
