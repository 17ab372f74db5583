"""export: writes a run's model as a Hugging Face directory, and verifies its log-probs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.core.run_directory import RunDirectory
from agentfly.policies.catalog import resolve_model
from agentfly.policies.embedded.loading import ADAPTER_FOLDER, base_of, choose_dtype, load_model
from agentfly.policies.embedded.scoring import score_tokens
from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.training.checkpoints import Checkpoints, require_valid, write_model

DType = Literal["auto", "float32", "bfloat16", "float16"]

_PROBE_TOKENS = 48
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Tolerance of the probe's log-probs, by the number format of the written weights."""


class ExportMismatch(PrerequisiteError):
    """The exported model has other log-probs than the checkpoint. It was removed."""


@dataclass(frozen=True)
class ExportResult:
    """An exported model.

    Attributes:
        path: its directory.
        source: the exported checkpoint.
        adapter: whether the directory contains only an adapter for ``base``.
        base: base model of the adapter; None if the directory contains a complete model.
        difference: the largest difference between log-probs of checkpoint and exported model on a probe, in nats.
    """

    path: Path
    source: Path
    adapter: bool
    base: Path | None
    difference: float


def export(
    source: Path | str,
    to: Path | str,
    *,
    step: int | None = None,
    adapter: bool = False,
    dtype: DType = "auto",
) -> ExportResult:
    """Write the model of a run or checkpoint as a Hugging Face directory: weights, tokenizer and chat template.

    Adapters are merged into the weights, unless ``adapter`` is set. The written model is loaded again and compared with
    the checkpoint on a probe. The directory appears only once both agree.

    Args:
        source: the directory of a run (then its last checkpoint), of a checkpoint or of a model, or a model's name.
        to: the new directory; an existing one must be empty.
        step: the checkpoint of a run.
        adapter: write only the adapter, in peft's format.
        dtype: number format of the weights; ``auto`` keeps the format of the checkpoint.

    Raises:
        ConfigError: there is no such run or checkpoint, the directory is not empty, or there is no adapter.
        PrerequisiteError: the model cannot be loaded, or the directory cannot be written.
        ExportMismatch: the written model differs from the checkpoint.
    """
    checkpoint, target = _checkpoint(Path(source), step), Path(to).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty. Choose a new or an empty directory.")
    base = base_of(checkpoint)
    if adapter and base is None:
        raise ConfigError(f"{checkpoint} contains a whole model and no adapter. Leave out --adapter (adapter=True).")
    if adapter and dtype != "auto":
        raise ConfigError("An adapter alone keeps its number format. Leave out --dtype, or --adapter.")
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    expected = _logprobs(model)
    written_as = torch.float32 if adapter else _written_dtype(dtype, base or checkpoint)
    with atomic_directory(target) as draft:
        if adapter:
            shutil.copytree(checkpoint / ADAPTER_FOLDER, draft, dirs_exist_ok=True)
            HFTokenizer.load(checkpoint).hf.save_pretrained(draft)
            found = _adapted_logprobs(base or checkpoint, draft)
        else:
            model.to(written_as)  # type: ignore[arg-type]
            write_model(draft, model, HFTokenizer.load(checkpoint).hf)
            del model
            found = _logprobs(load_model(draft, torch.device("cpu"), torch.float32))
        difference = float((found - expected).abs().max())
        if not difference <= _TOLERANCE[written_as]:
            raise ExportMismatch(
                f"The model exported from {checkpoint} has other log-probs than the checkpoint: they differ by up to "
                f"{difference:.3g} in {written_as}. It was removed again. Try dtype=float32, which loses nothing."
            )
    return ExportResult(target, checkpoint, adapter, base if adapter else None, difference)


def _checkpoint(source: Path, step: int | None) -> Path:
    """Return the directory of the model to export.

    Raises:
        ConfigError: there is none.
    """
    if (source / "config.json").is_file() or not source.is_dir():
        if step is not None:
            raise ConfigError(f"A step chooses among the checkpoints of a run, and {source} is not a run's directory.")
        return resolve_model(str(source) if len(source.parts) == 1 else source)  # one word may be a name
    checkpoints = Checkpoints(RunDirectory(source).checkpoints, keep=1)
    saved = dict(checkpoints.saved())
    if not saved:
        raise ConfigError(f"{source} contains neither a model nor a checkpoint. Name a run that has saved one.")
    if step is not None and step not in saved:
        raise ConfigError(f"{source} has no checkpoint of step {step}. It has {', '.join(map(str, saved))}.")
    if step is None and (sound := checkpoints.latest_valid()) is not None:
        return sound
    return require_valid(saved[max(saved) if step is None else step])


def _written_dtype(dtype: DType, weights: Path) -> torch.dtype:
    """Return the requested number format, or the format of the stored weights."""
    if dtype != "auto":
        return choose_dtype(dtype, torch.device("cpu"))
    from transformers import AutoConfig

    kept = AutoConfig.from_pretrained(weights, local_files_only=True).dtype
    return kept if kept in _TOLERANCE else torch.float32


def _logprobs(model: PreTrainedModel) -> torch.Tensor:
    ids = [1 + (index * 7) % (model.config.vocab_size - 1) for index in range(_PROBE_TOKENS)]
    with torch.no_grad():
        return score_tokens(model, [ids], [range(1, len(ids))]).logprobs


def _adapted_logprobs(base: Path, adapter: Path) -> torch.Tensor:
    """Return the log-probs of the probe with the adapter loaded by peft."""
    from peft import PeftModel

    model = load_model(base, torch.device("cpu"), torch.float32)
    merged: PreTrainedModel = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    return _logprobs(merged)


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a draft directory, which becomes ``target`` if the block succeeds and is removed otherwise."""
    draft = target.with_name(f".unfinished-{target.name}")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        for path in draft.iterdir():  # safetensors makes them readable by the owner only
            path.chmod(draft.stat().st_mode & 0o666)
        if target.is_dir():
            target.rmdir()
        draft.rename(target)
    except OSError as error:
        raise PrerequisiteError(
            f"{target} cannot be written: {error.strerror or error}. Name another directory."
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
