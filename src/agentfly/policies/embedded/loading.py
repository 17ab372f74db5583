"""Loading a model for the embedded policy: device, precision, and the proof that it runs packed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from agentfly.errors import ConfigError, PrerequisiteError
from agentfly.policies.embedded.adapters import base_of, merge_adapters
from agentfly.policies.embedded.attention import enable_packed_attention
from agentfly.policies.embedded.scoring import score_tokens

_ALONE = threading.RLock()

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(device: str) -> torch.device:
    """``auto`` is the first GPU if there is one, else the CPU.

    Raises:
        PrerequisiteError: a GPU was asked for that is not there.
        ConfigError: no such kind of device.
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
    """``auto`` is float32 on a CPU and bfloat16 on a GPU.

    The features of the CPU do not count, so a run computes in the same format on every machine. A CPU with native
    bfloat16 samples at most a fifth faster in it and trains no faster, and log-probs of sampling and training come to
    differ (measured in docs/guides/learning.md).

    Raises:
        ConfigError: no such precision.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it must be 'auto' or one of {', '.join(map(repr, _DTYPES))}.")
    return _DTYPES[dtype]


def dtype_of(model: PreTrainedModel) -> str:
    """The number format that a model computes in, by its name in the settings."""
    return str(model.dtype).removeprefix("torch.")


def load_model(path: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model in a directory, ready to run packed. Adapters are merged into their base.

    Raises:
        PrerequisiteError: the directory holds no such model.
        ConfigError: the model's attention is of a kind that the embedded policy does not run.
    """
    try:
        _refuse_unsupported(path, AutoConfig.from_pretrained(path, local_files_only=True))
        model: PreTrainedModel = _weights_of(path, dtype)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise PrerequisiteError(f"{path} holds no causal language model that transformers can load: {error}") from error
    model = model.to(device).eval()  # type: ignore[arg-type]
    enable_packed_attention(model)
    _prove_packed(model, path)
    return model


def _weights_of(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    base = base_of(path)
    if base is not None:
        return merge_adapters(_weights_of(base, dtype), path)
    with quiet_transformers():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    return model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars from the terminal, and let one thread at a time load or save a model.

    While it loads, transformers changes what makes weights in the whole process: two at once spoil each other.
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
    """Refuse what a short proof would not show: layers that see a window of the text only."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"The model in {path} has layers of the kinds {', '.join(sorted(kinds))}; the embedded policy runs models "
            "with full attention in every layer."
        )


def _prove_packed(model: PreTrainedModel, path: Path) -> None:
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
