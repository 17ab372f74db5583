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

_REMEMBERED = 1024
"""Images whose ids are kept, since all attempts at a task are shown the same ones."""


class HFVision:
    """Implements `agentfly.policies.policy.Vision` by the image processor in a model's directory.

    How many tokens an image has is told by its size alone where the processor lays a grid over images of any size (as
    of Qwen2-VL and what came after it), and by processing it for all other models.

    Args:
        path: the model's directory.
        tokenizer: its tokenizer.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._remembered: dict[bytes, Sequence[int]] = {}  # by digest, because an image is large
        self._lock = threading.Lock()

    @classmethod
    def of(cls, path: Path, tokenizer: PreTrainedTokenizerFast) -> Self | None:
        """The vision of the model in a directory; None where the model sees nothing."""
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
        """The ids that only images may have."""
        found = (value for name, value in self._config.items() if _RESERVED.fullmatch(name))
        return frozenset(value for value in found if isinstance(value, int))

    def ids(self, image: Image) -> Sequence[int]:
        """What stands in place of the template's placeholder for one image.

        Raises:
            UsageError: it cannot be read, or the model cannot be shown it.
            PrerequisiteError: what reads images is not installed.
        """
        digest = hashlib.blake2b(image.data, digest_size=16).digest()  # what is decoded is the bytes alone
        with self._lock:
            known = self._remembered.pop(digest, None)
        ids = self._computed(image) if known is None else known
        with self._lock:
            self._remembered[digest] = ids  # as the one that was used last
            while len(self._remembered) > _REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
        return ids

    def _computed(self, image: Image) -> Sequence[int]:
        picture = _decoded(image)
        try:
            if self._processor is None:
                patches = int(self._images.get_number_of_image_patches(picture.height, picture.width, {}))
                return (self._image_id,) * (patches // int(self._images.merge_size) ** 2)
            made = self._processor(text=[self.placeholder], images=[picture], add_special_tokens=False)
        except ValueError as error:  # for instance a picture that is far wider than it is high
            raise UsageError(f"The model in {self._path} cannot be shown {image.label}: {error}") from error
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
        """The image processor; the one on Pillow, so that no other package has a say in the pixels."""
        if importlib.util.find_spec("PIL") is None:
            raise PrerequisiteError(f"Images are read by Pillow, not installed here: {install_command('images')}")
        try:
            return AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                self._path, local_files_only=True, backend="pil"
            )
        except (OSError, ValueError, ImportError) as error:
            raise PrerequisiteError(
                f"The model in {self._path} sees images, but has no image processor that can be used here: {error}"
            ) from error

    @cached_property
    def _processor(self) -> Any:
        """What writes an image's tokens; None where they are but one placeholder for each cell of a grid."""
        if hasattr(self._images, "merge_size") and "image_token_id" in self._config:
            return None
        try:
            return AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                self._path, local_files_only=True, backend="pil"
            )
        except (OSError, ValueError, ImportError) as error:
            raise PrerequisiteError(
                f"The model in {self._path} sees images, but has no processor that can be used here: {error} Where "
                "it takes videos, too, it needs torchvision: pip install torchvision"
            ) from error


def _decoded(image: Image) -> Any:
    """The picture as Pillow has it, the right side up.

    Raises:
        UsageError: it cannot be read, or has too many pixels.
    """
    from PIL import ImageOps

    picture = image.opened()
    try:
        return ImageOps.exif_transpose(picture).convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"{image.label} cannot be read as a picture: {error}.") from error
