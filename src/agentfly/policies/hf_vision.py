"""HFVision: the image processor of a transformers model that sees images."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import threading
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, PreTrainedTokenizerFast

from agentfly.core.errors import PrerequisiteError, UsageError
from agentfly.core.installation import install_command
from agentfly.core.messages import Image

_RESERVED = re.compile(r"(image|video|vision|boi|eoi)_(\w+_)?token_(id|index)")
"""How configurations name the ids that only images and videos have."""

_CACHE_SIZE = 1024
"""Images whose ids are kept, since all attempts at a task are shown the same ones."""


class HFVision:
    """Implements `agentfly.policies.policy.Vision` with the image processor in a model's directory.

    Some processors lay a grid over images of any size, such as those of Qwen2-VL and its successors. The size of an
    image then determines its number of tokens. For all other models the image is processed to find it.

    Args:
        path: the model's directory.
        tokenizer: its tokenizer.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._cached: dict[bytes, Sequence[int]] = {}  # by digest, because an image is large
        self._lock = threading.Lock()

    @classmethod
    def of(cls, path: Path, tokenizer: PreTrainedTokenizerFast) -> Self | None:
        """Return the vision of the model in a directory; None if the model takes no images."""
        file = path / "config.json"
        sees = file.is_file() and "vision_config" in json.loads(file.read_text(encoding="utf-8"))
        return cls(path, tokenizer) if sees else None

    @cached_property
    def placeholder(self) -> str:
        """The control token that the chat template writes once for each image."""
        if self._processor is not None:
            token: str = self._processor.image_token
            return token
        return str(self._tokenizer.convert_ids_to_tokens(self._image_id))

    @cached_property
    def reserved_ids(self) -> Collection[int]:
        """The ids that are reserved for images."""
        found = (value for name, value in self._config.items() if _RESERVED.fullmatch(name))
        return frozenset(value for value in found if isinstance(value, int))

    def ids(self, image: Image) -> Sequence[int]:
        """Return the ids that replace the template's placeholder for one image.

        Raises:
            UsageError: the image cannot be read, or the model does not accept it.
            PrerequisiteError: a package that reads images is not installed.
        """
        digest = hashlib.blake2b(image.data, digest_size=16).digest()
        with self._lock:
            known = self._cached.pop(digest, None)
        ids = self._computed(image) if known is None else known
        with self._lock:
            self._cached[digest] = ids  # at the end: it was used last
            while len(self._cached) > _CACHE_SIZE:
                del self._cached[next(iter(self._cached))]
        return ids

    def _computed(self, image: Image) -> Sequence[int]:
        picture = _decoded(image)
        try:
            if self._processor is None:
                patches = int(self._images.get_number_of_image_patches(picture.height, picture.width, {}))
                return (self._image_id,) * (patches // int(self._images.merge_size) ** 2)
            made = self._processor(text=[self.placeholder], images=[picture], add_special_tokens=False)
        except ValueError as error:  # for instance an image that is far wider than high
            raise UsageError(f"The model in {self._path} does not accept {image.label}: {error}") from error
        return tuple(map(int, made["input_ids"][0]))

    @cached_property
    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = AutoConfig.from_pretrained(self._path, local_files_only=True).to_dict()
        return config

    @property
    def _image_id(self) -> int:
        return int(self._config["image_token_id"])

    @cached_property
    def _images(self) -> Any:
        """The image processor that uses Pillow, so that no other installed package changes the pixels."""
        if importlib.util.find_spec("PIL") is None:
            raise PrerequisiteError(f"Images are read with Pillow, which is not installed: {install_command('images')}")
        try:
            return AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                self._path, local_files_only=True, backend="pil"
            )
        except (OSError, ValueError, ImportError) as error:
            raise PrerequisiteError(
                f"The model in {self._path} takes images, but its image processor cannot be loaded: {error}"
            ) from error

    @cached_property
    def _processor(self) -> Any:
        """The processor that writes an image's tokens; None if they are only one placeholder per cell of a grid."""
        if hasattr(self._images, "merge_size") and "image_token_id" in self._config:
            return None
        try:
            return AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                self._path, local_files_only=True, backend="pil"
            )
        except (OSError, ValueError, ImportError) as error:
            raise PrerequisiteError(
                f"The model in {self._path} takes images, but its processor cannot be loaded: {error} If it "
                "also takes videos, it needs torchvision: pip install torchvision"
            ) from error


def _decoded(image: Image) -> Any:
    """Return the image as a Pillow image, upright.

    Raises:
        UsageError: the image cannot be read, or has too many pixels.
    """
    from PIL import ImageOps

    picture = image.opened()
    try:
        return ImageOps.exif_transpose(picture).convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"{image.label} cannot be read as an image: {error}.") from error
