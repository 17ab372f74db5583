"""Exchange: the directory through which weights go from a trainer to servers."""

from __future__ import annotations

import logging
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from agentfly.errors import ConfigError, PrerequisiteError
from agentfly.policies.extras import require_packages
from agentfly.resources.cleanup_record import DIRECTORY, CleanupRecord
from agentfly.resources.tree_removal import remove_tree

if TYPE_CHECKING:
    import torch

Source = Path | str | Iterable[tuple[str, "torch.Tensor"]]
"""Weights: a directory with safetensors files, or names and tensors as in a transformers state dict."""

AdapterSource = Path | str | Callable[[Path], object]
"""A LoRA adapter: a directory of peft's files, or a function that saves them into the directory it is given."""

logger = logging.getLogger(__name__)

_CONFIGURATIONS = ("config.json", "generation_config.json")


class Exchange:
    """Writes weights where servers can read them, and keeps what servers that start again may need.

    Args:
        model: the model's directory; what says how it is built is put beside the weights.
        directory: where; servers on other machines must see it under the same path. By default the machine's
            directory for temporary files.
    """

    def __init__(self, model: Path, directory: Path | None = None) -> None:
        self._model = model
        self._parent = directory
        self._home: Path | None = None
        self._record: CleanupRecord | None = None
        self._numbers = count(1)

    def put(self, source: Source) -> Path:
        """The directory of some weights, written if they are not in one. It takes as long as the disk does.

        Raises:
            ConfigError: the directory has no safetensors files.
        """
        if isinstance(source, str | Path):
            path = Path(source).expanduser().resolve()
            if not any(path.glob("*.safetensors")):
                raise ConfigError(f"{path} has no safetensors files. Save the model there with save_pretrained.")
            return path
        require_packages("Writing weights for servers", "torch", "huggingface_hub", "safetensors")
        from huggingface_hub import save_torch_state_dict

        path = self._new()
        for name in _CONFIGURATIONS:
            if (self._model / name).is_file():
                shutil.copy(self._model / name, path)
        save_torch_state_dict({name: tensor.detach() for name, tensor in source}, path)
        return path

    def put_adapter(self, source: AdapterSource) -> Path:
        """The directory of an adapter, written if it is not in one.

        Raises:
            ConfigError: the directory holds none.
        """
        if isinstance(source, str | Path):
            path = Path(source).expanduser().resolve()
        else:
            path = self._new()
            source(path)
        if not (path / "adapter_config.json").is_file():
            raise ConfigError(f"{path} holds no LoRA adapter: it has no adapter_config.json. Save one with peft.")
        return path

    def keep_only(self, *paths: Path | None) -> None:
        """Remove what was written here, but for some directories."""
        if self._home is not None:
            for old in self._home.iterdir():
                if old not in paths:
                    remove_tree(old)

    def close(self) -> None:
        """Remove everything that was written here."""
        if self._home is not None and self._record is not None:
            try:
                remove_tree(self._home)
            except OSError as error:  # it stays written down, for a later process
                logger.warning("Weights for servers are left in %s: %s", self._home, error)
            else:
                self._record.close()
            self._home = self._record = None

    def _new(self) -> Path:
        if self._home is None:
            home = Path(self._parent or tempfile.gettempdir()) / f"agentfly-weights-{uuid.uuid4().hex}"
            record = CleanupRecord("weights", DIRECTORY, {"directory": str(home.absolute())})
            try:
                home.mkdir(mode=0o700)
            except BaseException as error:
                record.close()
                if isinstance(error, OSError):
                    raise PrerequisiteError(
                        f"Weights for servers cannot be written to {home.parent}: {error.strerror}. Make that a "
                        "directory that this process can write to, or name another one."
                    ) from error
                raise
            self._home, self._record = home, record
        path = self._home / str(next(self._numbers))
        path.mkdir()
        return path
