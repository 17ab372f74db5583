"""Models of the Hugging Face hub: out of its local cache where they are whole, else fetched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from agentfly.errors import ConfigError, PrerequisiteError
from agentfly.policies.extras import require_training_packages

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_CURE = (
    "Check the network and HF_ENDPOINT; or copy the model's directory here and give its path; or use the model 'tiny', "
    "which is part of this package."
)


def get_from_hub(name: str, report: Callable[[str], None] | None = None) -> Path:
    """The directory of the model of that id (``owner/name``), fetched as far as it is not here yet.

    Raises:
        ConfigError: the hub has no such model.
        PrerequisiteError: no network, no access, a package is missing, or the model lacks weights or tokenizer.
    """
    require_training_packages()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    here = "not on this machine"
    try:
        path = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    else:
        if not (lacking := missing_of_model(path)):
            return path
        here = f"only partly on this machine ({', '.join(lacking)} missing), as after an interrupted download,"
    if report:
        report(f"Fetching {name} from the Hugging Face hub: it is {here.rstrip(',')}.")
    path = _fetched(name, here)
    if lacking := missing_of_model(path):
        raise PrerequisiteError(
            f"The model {name} lacks {', '.join(lacking)}, also after it was asked of the Hugging Face hub. {_CURE} If "
            "the hub itself has no such files for it, choose a model with safetensors weights and a tokenizer."
        )
    return path


def missing_of_model(path: Path) -> list[str]:
    """What a directory lacks to be a model: its configuration, files of weights, a tokenizer."""
    missing = [] if (path / "config.json").is_file() else ["config.json"]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing += sorted(shard for shard in shards if not (path / shard).is_file())
    elif not any(path.glob("*.safetensors")):
        missing.append("model.safetensors")
    if not any((path / file).is_file() for file in _TOKENIZERS):
        missing.append("tokenizer.json")
    return missing


def _fetched(name: str, here: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except GatedRepoError as error:
        raise PrerequisiteError(
            f"The model {name} asks for consent to its licence: give it on its page of the hub, then set HF_TOKEN."
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"The Hugging Face hub has no model {name}, or shows it with a token (HF_TOKEN) only."
        ) from error
    except Exception as error:
        raise PrerequisiteError(
            f"The model {name} is {here} and cannot be fetched ({type(error).__name__}). {_CURE}"
        ) from error
