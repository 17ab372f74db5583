"""The catalogue of models: where a model's directory is, by name, and how it gets there if it is not there yet.

A model is always a Hugging Face directory (config, safetensors, tokenizer, chat template). It can be named by

* a name of the catalogue: ``tiny`` and ``tiny-depot`` are part of this package; ``smollm2-135m`` is fetched when it is
  first needed;
* a local directory;
* a Hugging Face id such as ``Qwen/Qwen2.5-0.5B-Instruct``, taken from its local cache or fetched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentfly.errors import ConfigError, PrerequisiteError, nearest_name
from agentfly.run_directory import RunDirectory, numbered
from agentfly.user_directories import cache_directory, is_seen

Report = Callable[[str], None]
"""Called with a line of text when something begins that takes a while."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class CatalogModel:
    """A model that has a name of its own.

    Attributes:
        name: what to call it by.
        summary: what it is, in a line.
        parameters: number of weights.
        licence: the weights' licence.
        path: its directory, or None if it has not been fetched yet.
    """

    name: str
    summary: str
    parameters: int
    licence: str
    path: Path | None


def list_models() -> list[CatalogModel]:
    """The models of the catalogue."""
    try:
        smollm2: Path | None = cache_dir() / "smollm2-135m"
    except PrerequisiteError:  # there is no place for it to be
        smollm2 = None
    return [
        CatalogModel(
            name="tiny",
            summary="half a million parameters, made for tests; plays the tool-call format and learns in minutes",
            parameters=500_000,
            licence="Apache-2.0",
            path=_shipped("tiny"),
        ),
        CatalogModel(
            name="tiny-depot",
            summary="half a million parameters, made for studies; walks about in the depot and seldom arrives",
            parameters=500_000,
            licence="Apache-2.0",
            path=_shipped("tiny-depot"),
        ),
        CatalogModel(
            name="smollm2-135m",
            summary="SmolLM2-135M-Instruct (4-bit weights, unpacked); a real pretrained model for a CPU",
            parameters=134_515_008,
            licence="Apache-2.0",
            path=smollm2 if smollm2 is not None and is_seen(smollm2) else None,
        ),
    ]


def find_model(name: str | Path, *, report: Report | None = None) -> Path:
    """The directory of a model, fetched first if it is not on this machine.

    Without a system message, SmolLM2's chat template adds one of its own ("You are a helpful AI assistant named
    SmolLM, trained by Hugging Face"), as the model was trained with: give the agent a system prompt to have another.

    Raises:
        ConfigError: there is no model of that name.
        PrerequisiteError: the model cannot be had: no network, no disk space, no access, a package is missing.
    """
    if isinstance(name, str) and name in ("tiny", "tiny-depot"):
        return _shipped(name)
    if isinstance(name, str) and name == "smollm2-135m":
        from agentfly.policies.smollm2 import get_smollm2

        return get_smollm2(cache_dir() / "smollm2-135m", report)
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked_directory(path)
    if isinstance(name, str) and _HUB_ID.fullmatch(name) and not name.startswith("."):
        from agentfly.policies.hub import get_from_hub

        return get_from_hub(name, report)
    if path.is_absolute() or len(path.parts) > 1:
        raise ConfigError(f"There is no model directory {path}.")
    names = [model.name for model in list_models()]
    near = nearest_name(str(name), names)
    hint = f" Did you mean {near!r}?" if near else ""
    raise ConfigError(
        f"There is no model {str(name)!r}.{hint} Known names: {', '.join(names)}; or give a local directory or a "
        "Hugging Face id (owner/name)."
    )


def cache_dir() -> Path:
    """Where fetched models are kept: ``$AGENTFLY_CACHE_DIR/models``, by default in the user's cache directory.

    Raises:
        PrerequisiteError: the user has no home directory, and none is given.
    """
    return cache_directory() / "models"


def _shipped(name: str) -> Path:
    """The directory of a model that is part of this package."""
    return Path(__file__).parent / "models" / name


def _checked_directory(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    run = RunDirectory(path.parent if path.name == RunDirectory(path).checkpoints.name else path)
    checkpoints = numbered(run.checkpoints.glob("step-*"), "step-")
    if checkpoints:
        raise ConfigError(
            f"{path} is of a run, and no model by itself. Name a checkpoint, of which {checkpoints[-1][1]} is the "
            f"last. For other programs, agentfly export {run.path} --to DIR writes it as a model."
        )
    if run.holds_run:
        raise ConfigError(f"{path} is the directory of a run that has saved no checkpoint yet, and holds no model.")
    if (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"{path} holds an adapter alone. Name the checkpoint that it is of, or have it merged into its model: "
            "agentfly export RUN_DIR --to DIR, without --adapter."
        )
    raise ConfigError(
        f"{path} is not a model directory: it has no config.json. Name a directory as Hugging Face's save_pretrained "
        "writes it, with weights and tokenizer."
    )
